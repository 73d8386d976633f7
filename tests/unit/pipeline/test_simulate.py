"""The simulator, against closed forms, a longest-path reference and plans that are known to hang."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_parallel.pipeline import schedules
from lightning_parallel.pipeline.actions import Action, Kind, Schedule
from lightning_parallel.pipeline.schedules import SCHEDULE_NAMES, forward_only_schedule, validate_schedule
from lightning_parallel.pipeline.simulate import (
    TRANSPORTS,
    DeadlockError,
    check_deadlock,
    peak_live_micro_batches,
    peak_put_off_micro_batches,
    simulate,
    simulate_equal_stages,
)

# Schedules are immutable, so the tests of this module build each once.
build_schedule = cache(schedules.build_schedule)
GRID = [(stages, micro_batches) for stages in range(1, 9) for micro_batches in (*range(1, 10), 16)]
"""Fewer micro-batches than stages, as many, one more, and twice as many as the most stages."""


def longest_path(schedule: Schedule, costs: dict[Kind, Sequence[float]], latency: float) -> float:
    """Reference for buffered transports: order on a stage and data between stages, as one recursion per action."""
    computing = [[a for a in line if a.kind in costs] for line in schedule.actions]

    @cache
    def finish(action: Action) -> float:
        line = computing[action.stage]
        position = line.index(action)
        ready = [finish(line[position - 1])] if position else [0.0]
        step = {Kind.FORWARD: -1, Kind.BACKWARD: 1}.get(action.kind, schedule.stages)
        if 0 <= action.stage + step < schedule.stages:
            ready.append(finish(Action(action.kind, action.stage + step, action.micro_batch)) + latency)
        return max(ready) + costs[action.kind][action.stage]

    return max(finish(line[-1]) for line in computing)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_no_schedule_deadlocks_and_equal_stages_reach_the_known_bubble(name: str) -> None:
    for (stages, micro_batches), transport in product(GRID, TRANSPORTS):
        result = simulate(build_schedule(name, stages, micro_batches), 1.0, 2.0, transport=transport)
        assert result.makespan == 3.0 * (micro_batches + stages - 1)
        assert result.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-12)
        assert result.busy == (3.0 * micro_batches,) * stages


def test_zero_bubble_waits_a_third_of_what_1f1b_waits() -> None:
    """(p - 1) (F + B - W) in place of (p - 1) (F + B + W), if there is a micro-batch per stage (Qi et al. 2024)."""
    for stages, micro_batches in GRID:
        schedule = build_schedule("zero-bubble", stages, micro_batches)
        check_deadlock(schedule)
        usual = simulate_equal_stages(build_schedule("1f1b", stages, micro_batches))
        result = simulate_equal_stages(schedule)
        assert result.busy == usual.busy
        assert result.makespan < usual.makespan or stages == 1
        if micro_batches >= stages:
            assert result.makespan == 3.0 * micro_batches + stages - 1


def test_forward_only_never_deadlocks_and_fills_like_a_conveyor() -> None:
    for stages, micro_batches in GRID:
        schedule = forward_only_schedule(stages, micro_batches)
        for transport in TRANSPORTS:
            assert simulate(schedule, transport=transport).makespan == micro_batches + stages - 1
        assert peak_live_micro_batches(schedule) == (1,) * stages


def test_peak_live_micro_batches() -> None:
    for stages, micro_batches in GRID:
        for name in ("1f1b", "zero-bubble"):
            peak = peak_live_micro_batches(build_schedule(name, stages, micro_batches))
            assert peak == tuple(min(micro_batches, stages - stage) for stage in range(stages))
        peak = peak_live_micro_batches(build_schedule("gpipe", stages, micro_batches))
        assert peak == (micro_batches,) * stages
    assert simulate(build_schedule("1f1b", 3, 4)).peak_live == (3, 2, 1)


def test_peak_put_off_micro_batches() -> None:
    for stages, micro_batches in GRID:
        found = peak_put_off_micro_batches(build_schedule("zero-bubble", stages, micro_batches))
        expected = tuple(stage + 1 if micro_batches >= stages else micro_batches for stage in range(stages))
        assert found == (expected if stages > 1 else (0,))
        assert peak_put_off_micro_batches(build_schedule("1f1b", stages, micro_batches)) == (0,) * stages


@settings()
@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 6), st.integers(1, 9), st.integers(0, 3), st.data())
def test_unequal_stages_take_the_longest_path(
    name: str, stages: int, micro_batches: int, latency: int, data: st.DataObject
) -> None:
    costs = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    forward, backward, weight = data.draw(costs), data.draw(costs), data.draw(costs)
    schedule = build_schedule(name, stages, micro_batches)
    result = simulate(schedule, forward, backward, weight=weight, latency=latency, transport="buffered")
    kinds = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    kinds |= {Kind.WEIGHT: weight} if schedule.splits_backward else {}
    assert result.makespan == longest_path(schedule, kinds, latency)
    assert result.busy == tuple(micro_batches * sum(stage) for stage in zip(*kinds.values(), strict=True))
    assert result.idle == tuple(result.makespan - busy for busy in result.busy)
    blocking = simulate(schedule, forward, backward, weight=weight, latency=latency, transport="rendezvous")
    assert blocking.makespan >= result.makespan
    assert blocking.busy == result.busy


def test_hand_worked_two_stages_with_latency() -> None:
    """Stage 1 is three times as slow; a transfer takes 1 s. F 1 and 3 s, B 2 and 6 s, one micro-batch."""
    result = simulate(build_schedule("1f1b", 2, 1), [1, 3], [2, 6], latency=1)
    assert [(s.start, s.stop) for s in result.spans[0]] == [(0, 1), (12, 14)]
    assert [(s.start, s.stop) for s in result.spans[1]] == [(2, 5), (5, 11)]
    assert (result.makespan, result.busy, result.idle) == (14, (3, 9), (11, 5))
    assert result.bubble == 16 / 28


def test_rendezvous_holds_a_sender_until_the_receiver_posts() -> None:
    """Stage 0 could run ahead when sends are buffered; with rendezvous its second send waits for the slow stage."""
    schedule = build_schedule("gpipe", 2, 3)
    starts = {}
    for transport in TRANSPORTS:
        spans = simulate(schedule, [1, 5], [1, 1], transport=transport).spans[0]
        starts[transport] = [span.start for span in spans if span.action.kind is Kind.FORWARD]
    assert starts == {"buffered": [0, 1, 2], "rendezvous": [0, 1, 6]}


def plan(text: str, micro_batches: int = 2) -> Schedule:
    lines = text.strip().split("\n")
    actions = tuple(tuple(map(Action.parse, line.split())) for line in lines)
    return Schedule("planned", len(lines), micro_batches, actions)


def test_a_plan_whose_ranks_wait_for_each_other_is_named() -> None:
    """Stage 0 wants the gradient of micro-batch 0 before it runs 1, stage 1 wants 1 before it returns that gradient."""
    schedule = plan("""
0F0 0SF0 0RB0 0B0 0F1 0SF1 0RB1 0B1 0R
1RF0 1F0 1RF1 1F1 1B0 1SB0 1B1 1SB1 1R""")
    validate_schedule(schedule)
    with pytest.raises(DeadlockError) as error:
        simulate(schedule, transport="buffered")
    assert str(error.value) == (
        "schedule planned deadlocks with buffered transfers: rank 0 waits for 0RB0; rank 1 waits for 1RF1"
    )
    assert error.value.waiting == (Action.parse("0RB0"), Action.parse("1RF1"))
    with pytest.raises(DeadlockError, match="with rendezvous transfers: rank 0 waits for 0RB0; rank 1 waits for 1RF1"):
        simulate(schedule)
    with pytest.raises(ValueError, match="deadlocks"):
        check_deadlock(schedule)


def test_a_plan_that_only_hangs_without_buffers_is_found() -> None:
    """Stage 1 returns a gradient in one batch with its next receive, stage 0 is two sends ahead of taking it."""
    schedule = plan(
        """
0F0 0SF0 0F1 0SF1 0F2 0SF2 0F3 0SF3 0RB0 0B0 0RB1 0B1 0RB2 0B2 0RB3 0B3 0R
1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1 1RF2 1F2 1B2 1SB2 1RF3 1F3 1B3 1SB3 1R""",
        micro_batches=4,
    )
    assert simulate(schedule, transport="buffered").makespan > 0
    with pytest.raises(DeadlockError, match="rank 0 waits for 0SF2; rank 1 waits for 1SB0"):
        check_deadlock(schedule)


def test_split_backward_costs_its_weight_half() -> None:
    schedule = plan("0F0 0B0 0W0 0R", micro_batches=1)
    assert simulate(schedule, 1, 2, weight=4).busy == (7,)


def test_timeline_shows_idle_running_and_continued_slots() -> None:
    result = simulate(build_schedule("1f1b", 2, 2), 1, 2)
    assert result.timeline() == ("stage 0 | F0 F1 .  .  B0 -- .  B1 --\nstage 1 | .  F0 B0 -- F1 B1 -- .  .")
    assert result.timeline(slot=3) == "stage 0 | F1 B0 B1\nstage 1 | F0 F1 ."
    assert simulate(build_schedule("1f1b", 1, 1), 0, 0).timeline() == "stage 0 | ."
    with pytest.raises(ValueError, match="longer than 0 seconds, got 0"):
        result.timeline(slot=0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"forward": [1.0]}, "forward costs need one number for each of the 2 stages, got 1"),
        ({"backward": -1.0}, "backward costs must be at least 0 seconds"),
        ({"forward": float("nan")}, "forward costs must be at least 0 seconds"),
        ({"latency": -1.0}, "latency must be at least 0 seconds, got -1.0; use 0.0"),
        ({"transport": "tcp"}, "transport 'tcp' is unknown; use 'buffered' or 'rendezvous'"),
    ],
)
def test_bad_costs_are_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        simulate(build_schedule("1f1b", 2, 2), **arguments)  # type: ignore[arg-type]


def test_an_invalid_plan_is_refused_before_it_is_walked() -> None:
    with pytest.raises(ValueError, match="0B0 comes before 0F0"):
        simulate(plan("0B0 0F0 0R", micro_batches=1))


def test_no_time_at_all_has_no_bubble() -> None:
    assert simulate(build_schedule("1f1b", 2, 2), 0, 0).bubble == 0.0
