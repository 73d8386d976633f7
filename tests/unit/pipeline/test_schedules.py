"""Schedules: what each plan must contain, its golden text, and every rule of the validator."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_parallel.pipeline.actions import Action, Kind, Schedule, execution_steps
from lightning_parallel.pipeline.schedules import (
    SCHEDULE_NAMES,
    add_communication,
    add_reduction,
    build_schedule,
    compute_plan,
    forward_only_schedule,
    validate_schedule,
)
from lightning_parallel.pipeline.simulate import simulate, simulate_equal_stages
from tests.golden_files import check_golden

STAGES = range(1, 9)
MICRO_BATCHES = (*range(1, 10), 16)
GRID = [(stages, micro_batches) for stages in STAGES for micro_batches in MICRO_BATCHES]


def line(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def words(actions: tuple[Action, ...]) -> str:
    return " ".join(map(str, actions))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_forward_and_backward_once_in_order(name: str) -> None:
    for stages, micro_batches in GRID:
        for stage, actions in enumerate(build_schedule(name, stages, micro_batches).actions):
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                found = [action for action in actions if action.kind is kind]
                assert found == [Action(kind, stage, i) for i in range(micro_batches)]
            for i in range(micro_batches):
                assert actions.index(Action(Kind.FORWARD, stage, i)) < actions.index(Action(Kind.BACKWARD, stage, i))
            assert actions[-1] == Action(Kind.REDUCE, stage)


def test_gpipe_runs_all_forwards_first() -> None:
    assert list(map(words, compute_plan("gpipe", 2, 3))) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_1f1b_runs_ahead_by_the_stages_behind_and_then_alternates() -> None:
    assert list(map(words, compute_plan("1f1b", 3, 4))) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert list(map(words, compute_plan("1f1b", 4, 1))) == ["0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0"]


def test_zero_bubble_puts_gradients_of_weights_off_by_the_stages_before() -> None:
    assert list(map(words, compute_plan("zero-bubble", 3, 4))) == [
        "0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3",
        "1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3",
    ]
    assert list(map(words, compute_plan("zero-bubble", 3, 2)))[2] == "2F0 2B0 2F1 2B1 2W0 2W1"
    assert compute_plan("zero-bubble", 1, 2) == compute_plan("1f1b", 1, 2)


def test_gradients_of_weights_come_before_a_receive_that_would_wait() -> None:
    plan = add_communication((line("0F0 0B0 0W0 0F1 0B1 0W1"), line("1F0 1B0 1W0 1F1 1B1 1W1")))
    assert words(plan[1]) == "1RF0 1F0 1B0 1SB0 1W0 1RF1 1F1 1B1 1SB1 1W1"


def test_add_communication_receives_before_and_sends_after() -> None:
    plan = add_communication((line("0F0 0B0"), line("1F0 1B0"), line("2F0 2B0")))
    assert list(map(words, plan)) == ["0F0 0SF0 0RB0 0B0", "1RF0 1F0 1SF0 1RB0 1B0 1SB0", "2RF0 2F0 2B0 2SB0"]


def test_add_communication_skips_stages_of_the_same_rank() -> None:
    assert list(map(words, add_communication((line("0F0 1F0 1B0 0B0"),)))) == ["0F0 1F0 1B0 0B0"]
    wrapped = add_communication((line("0F0 2F0"), line("1F0 3F0")))
    assert list(map(words, wrapped)) == ["0F0 0SF0 2RF0 2F0 2SF0", "1RF0 1F0 1SF0 3RF0 3F0"]


def test_add_reduction_appends_one_per_stage() -> None:
    assert list(map(words, add_reduction((line("0F0 0B0"),)))) == ["0F0 0B0 0R"]
    assert list(map(words, add_reduction((line("0B0 2B0"), line("1B0 3B0"))))) == ["0B0 2B0 0R 2R", "1B0 3B0 1R 3R"]


def test_one_stage_needs_no_transfers() -> None:
    assert words(build_schedule("1f1b", 1, 2).actions[0]) == "0F0 0B0 0F1 0B1 0R"
    assert words(forward_only_schedule(1, 2).actions[0]) == "0F0 0F1"


def test_steady_state_of_1f1b_pairs_whole_batches() -> None:
    """A batch that sends forward i and receives backward j meets one that receives forward i and sends backward j."""
    paired = 0
    for stages, micro_batches in GRID:
        schedule = build_schedule("1f1b", stages, micro_batches)
        steps = [set(execution_steps(actions)) for actions in schedule.actions]
        for stage in range(stages - 1):
            ahead = stages - 1 - stage
            for j in range(micro_batches - ahead):
                i = ahead + j
                assert (Action(Kind.SEND_FORWARD, stage, i), Action(Kind.RECV_BACKWARD, stage, j)) in steps[stage]
                peer = (Action(Kind.SEND_BACKWARD, stage + 1, j), Action(Kind.RECV_FORWARD, stage + 1, i))
                assert peer in steps[stage + 1]
                paired += 1
    assert paired > 0


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches"),
    [("gpipe", 3, 4), ("1f1b", 1, 3), ("1f1b", 2, 4), ("1f1b", 4, 2), ("1f1b", 4, 8), ("zero-bubble", 4, 8)],
)
def test_golden_schedule(name: str, stages: int, micro_batches: int) -> None:
    schedule = build_schedule(name, stages, micro_batches)
    text = f"{schedule.to_text()}\n{simulate_equal_stages(schedule).timeline()}\n"
    check_golden(f"schedules/{name}_p{stages}_m{micro_batches}.txt", text)


def test_golden_forward_only_schedule() -> None:
    schedule = forward_only_schedule(3, 4)
    text = f"{schedule.to_text()}\n{simulate(schedule).timeline()}\n"
    check_golden("schedules/forward_p3_m4.txt", text)


def test_every_schedule_round_trips_as_text() -> None:
    for stages, micro_batches in [(1, 1), (3, 2), (8, 16)]:
        for name in SCHEDULE_NAMES:
            schedule = build_schedule(name, stages, micro_batches)
            assert Schedule.from_text(schedule.to_text()) == schedule


def test_unknown_names_and_empty_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="schedule 'zb' is unknown; use 'gpipe' or '1f1b' or 'zero-bubble'"):
        build_schedule("zb", 2, 2)
    with pytest.raises(ValueError, match="stages must be a whole number of at least 1, such as 1, got 0"):
        build_schedule("1f1b", 0, 2)
    with pytest.raises(ValueError, match="micro_batches must be a whole number of at least 1, such as 1, got 0"):
        forward_only_schedule(2, 0)


GOOD = ("0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1 0R", "1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1 1R")


@pytest.mark.parametrize(
    ("rank", "old", "new", "rule", "marked"),
    [
        (0, "0F1 ", "", "0SF1 comes before 0F1", ">0SF1<"),
        (0, " 0RB1 0B1", "", "0B1 is missing", ">missing 0B1<"),
        (0, " 0R ", "", "0R is missing", ">missing 0R<"),
        (1, " 1R ", "", "1R is missing", ">missing 1R<"),
        (0, "0F1", "0F0", "0F0 appears twice", ">0F0<"),
        (0, "0F1", "1F1", "1F1 does not belong on rank 0", ">1F1<"),
        (0, "0F1", "0F2", "0F2 is outside the 2 micro-batches", ">0F2<"),
        (0, "0F0 ", "0RB0 0B0 0F0 ", "0B0 comes before 0F0", ">0B0<"),
        (0, "0RB0 0B0", "0B0 0RB0", "0B0 comes before 0RB0", ">0B0<"),
        (0, "0F0 0SF0", "0SF0 0F0", "0SF0 comes before 0F0", ">0SF0<"),
        (1, "1RF0 1F0", "1F0 1RF0", "1F0 comes before 1RF0", ">1F0<"),
        (1, "1B0 1SB0", "1SB0 1B0", "1SB0 comes before 1B0", ">1SB0<"),
        (0, "0F0", "0RF0 0F0", "0RF0 has no neighbouring rank on that side", ">0RF0<"),
        (1, "1F0", "1F0 1SF0", "1SF0 has no neighbouring rank on that side", ">1SF0<"),
        (0, "0RB1 0B1 0R", "0R 0RB1 0B1", "0RB1 follows the gradient reduction", ">0RB1<"),
        (0, "0SF1 ", "", "0SF1 is missing", ">missing 0SF1<"),
        (0, "0RB0 0B0 0RB1 0B1", "0RB1 0RB0 0B0 0B1", "0RB1 does not match: rank 1 sends 1SB0 then", ">0RB1<"),
        (1, "1RF0 1F0", "1RF1 1RF0 1F0", "1RF1 appears twice", ">1RF1<"),
        (0, "0B0", "0B0 0W0", "0W1 is missing", ">missing 0W1<"),
        (0, "0RB0", "0RB0 0W0", "0W0 comes before 0B0", ">0W0<"),
    ],
)
def test_validator_names_the_rule_and_marks_the_cell(rank: int, old: str, new: str, rule: str, marked: str) -> None:
    lines = [f"{actions} " for actions in GOOD]
    assert lines[rank].count(old) == 1
    lines[rank] = lines[rank].replace(old, new)
    schedule = Schedule("changed", 2, 2, tuple(map(line, lines)))
    with pytest.raises(ValueError) as error:  # noqa: PT011 - rule and grid are checked below
        validate_schedule(schedule)
    first, *grid = str(error.value).split("\n")
    assert first == f"schedule changed (2 stages, 2 micro-batches) is invalid: {rule}"
    assert [row[:8] for row in grid] == ["rank 0 |", "rank 1 |"]
    assert "\n".join(grid).count(marked) == 1
    assert marked in grid[rank]


def test_validator_accepts_the_unchanged_plan_and_a_split_backward() -> None:
    validate_schedule(Schedule("good", 2, 2, tuple(map(line, GOOD))))
    split = tuple(
        text.replace(f"{rank}B0", f"{rank}B0 {rank}W0").replace(f"{rank}B1", f"{rank}B1 {rank}W1")
        for rank, text in enumerate(GOOD)
    )
    validate_schedule(Schedule("split", 2, 2, tuple(map(line, split))))
    with pytest.raises(ValueError, match="1W0 is missing"):
        validate_schedule(Schedule("split", 2, 2, (line(split[0]), line(GOOD[1]))))


def test_validator_follows_the_training_switch() -> None:
    forward = forward_only_schedule(2, 2)
    validate_schedule(forward, training=False)
    with pytest.raises(ValueError, match="0B0 is missing"):
        validate_schedule(forward)
    with pytest.raises(ValueError, match="0RB0 has no place in a forward-only schedule"):
        validate_schedule(build_schedule("1f1b", 2, 2), training=False)


def test_validator_finds_a_send_that_nobody_takes_in_an_evaluation() -> None:
    """Only the last stage may leave its output unsent; a receive that no forward reads still has to be there."""
    split = Schedule("x", 2, 2, (line("0F0 0SF0 0F1 0SF1"), line("1RF0 1F0 1F1")))
    with pytest.raises(ValueError, match="1F1 comes before 1RF1"):
        validate_schedule(split, training=False)
    swapped = Schedule("x", 2, 2, (line("0F0 0F1 0SF1 0SF0"), line("1RF0 1F0 1RF1 1F1")))
    with pytest.raises(ValueError, match="1RF0 does not match: rank 0 sends 0SF1 then"):
        validate_schedule(swapped, training=False)


sizes = st.tuples(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 5), st.integers(1, 5))


@settings(deadline=None)
@given(sizes, st.data())
def test_dropping_or_repeating_any_action_is_noticed(size: tuple[str, int, int], data: st.DataObject) -> None:
    schedule = build_schedule(*size)
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    index = data.draw(st.integers(0, len(schedule.actions[rank]) - 1))
    actions = schedule.actions[rank]
    for changed in (actions[:index] + actions[index + 1 :], actions[: index + 1] + actions[index:]):
        plan = (*schedule.actions[:rank], changed, *schedule.actions[rank + 1 :])
        with pytest.raises(ValueError, match="is invalid"):
            validate_schedule(Schedule("changed", schedule.stages, schedule.micro_batches, plan))
