"""Actions and schedules as text: strict, and the same after a round trip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_parallel.pipeline.actions import Action, Kind, Schedule, execution_steps, plan_grid

numbers = st.integers(0, 10**6)
actions = st.one_of(
    st.builds(Action, st.sampled_from([kind for kind in Kind if kind is not Kind.REDUCE]), numbers, numbers),
    st.builds(Action, st.just(Kind.REDUCE), numbers),
)


@given(actions)
def test_action_text_round_trips(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F3", Action(Kind.FORWARD, 0, 3)),
        ("12B10", Action(Kind.BACKWARD, 12, 10)),
        ("1W0", Action(Kind.WEIGHT, 1, 0)),
        ("0SF1", Action(Kind.SEND_FORWARD, 0, 1)),
        ("1RF1", Action(Kind.RECV_FORWARD, 1, 1)),
        ("1SB2", Action(Kind.SEND_BACKWARD, 1, 2)),
        ("1RB2", Action(Kind.RECV_BACKWARD, 1, 2)),
        ("0R", Action(Kind.REDUCE, 0)),
    ],
)
def test_known_actions(text: str, action: Action) -> None:
    assert Action.parse(text) == action
    assert str(action) == text


@pytest.mark.parametrize(
    "text",
    [
        *["0F3zz", " 0F3", "0F3\n", "0f3", "F3", "0F", "00F3", "0F03", "-1F0", "0X1"],
        *["", "0R3", "0RX1", "0F3 1F3", "٠F3", "0S3"],
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"0F3|0R"):
        Action.parse(text)


def test_an_action_needs_a_micro_batch_except_the_reduction() -> None:
    with pytest.raises(ValueError, match="kind F needs a micro-batch, as in 0F3, got None"):
        Action(Kind.FORWARD, 0)
    with pytest.raises(ValueError, match="kind R needs no micro-batch, as in 0R, got 1"):
        Action(Kind.REDUCE, 0, 1)
    with pytest.raises(ValueError, match="start at 0, got -1 and 0"):
        Action(Kind.FORWARD, -1, 0)


@pytest.mark.parametrize(
    ("text", "peer", "counterpart"),
    [("1SF2", 2, "2RF2"), ("1RF2", 0, "0SF2"), ("1SB2", 0, "0RB2"), ("1RB2", 2, "2SB2")],
)
def test_transfers_know_their_other_end(text: str, peer: int, counterpart: str) -> None:
    action = Action.parse(text)
    assert action.peer_stage == peer
    assert str(action.counterpart) == counterpart
    assert action.counterpart.counterpart == action
    assert action.kind.is_communication
    assert action.kind.is_send != action.kind.is_receive


def test_computation_has_no_other_end() -> None:
    assert not Kind.FORWARD.is_communication
    with pytest.raises(ValueError, match="0F1 is not a send or a receive"):
        _ = Action.parse("0F1").peer_stage


def test_needs_names_the_receive_that_is_read() -> None:
    def needs(text: str) -> str:
        return str(Action.parse(text).needs(stages=3))

    assert [needs(t) for t in ("0F1", "1F1", "2F1")] == ["None", "1RF1", "2RF1"]
    assert [needs(t) for t in ("0B1", "1B1", "2B1")] == ["0RB1", "1RB1", "None"]
    assert [needs(t) for t in ("1W1", "1SF1", "1R")] == ["None", "None", "None"]


@given(st.lists(st.lists(actions, min_size=1, max_size=8), min_size=1, max_size=4), st.integers(1, 99))
def test_schedule_text_round_trips(plan: list[list[Action]], micro_batches: int) -> None:
    schedule = Schedule("any-name_1", 2 * len(plan), micro_batches, tuple(map(tuple, plan)))
    assert Schedule.from_text(schedule.to_text()) == schedule


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("schedule x stages=1\nrank 0: 0F0\n", "line 1 must read like"),
        ("schedule X stages=1 micro_batches=1\nrank 0: 0F0\n", "line 1 must read like"),
        ("schedule x stages=1 micro_batches=1 \nrank 0: 0F0\n", "line 1 must read like"),
        ("schedule x stages=1 micro_batches=1\nrank 1: 0F0\n", "line 2 must start with 'rank 0:'"),
        ("schedule x stages=1 micro_batches=1\n0: 0F0\n", "line 2 must start with 'rank 0:'"),
        ("schedule x stages=1 micro_batches=1\nrank 0: 0F0 0F1z\n", "line 2: '0F1z' is not an action"),
        ("schedule x stages=1 micro_batches=1\nrank 0: 0F0  0B0\n", "line 2: '' is not an action"),
        ("schedule x stages=1 micro_batches=1\nrank 0: 0F0\n\n", "line 3 must start with 'rank 1:'"),
        ("schedule x stages=3 micro_batches=1\nrank 0: 0F0\nrank 1: 1F0\n", "3 stages cannot be spread evenly over 2"),
        ("schedule x stages=0 micro_batches=1\nrank 0: 0F0\n", "at least 1 stage and 1 micro-batch, got 0 and 1"),
        ("schedule x stages=1 micro_batches=1\n", "1 stages cannot be spread evenly over 0 ranks"),
    ],
)
def test_bad_schedule_text_is_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Schedule.from_text(text)


def test_a_schedule_name_fits_the_text_form() -> None:
    with pytest.raises(ValueError, match="got 'two words'"):
        Schedule("two words", 1, 1, ((Action.parse("0F0"),),))


@given(st.lists(actions, max_size=12))
def test_execution_steps_are_maximal_runs_of_communication(line: list[Action]) -> None:
    steps = execution_steps(line)
    assert [action for step in steps for action in step] == line
    for step in steps:
        assert len(step) == 1 or all(action.kind.is_communication for action in step)
    for before, after in zip(steps, steps[1:], strict=False):
        assert not (before[-1].kind.is_communication and after[0].kind.is_communication)


def test_plan_grid_marks_a_cell_or_adds_one_at_the_end() -> None:
    plan = (tuple(map(Action.parse, ["0F0", "0SF0"])), tuple(map(Action.parse, ["1RF0", "1F0", "1B0"])))
    schedule = Schedule("x", 2, 1, plan)
    assert plan_grid(schedule) == "rank 0 | 0F0  0SF0\nrank 1 | 1RF0 1F0  1B0"
    assert plan_grid(schedule, 1, 1) == "rank 0 | 0F0  0SF0\nrank 1 | 1RF0 >1F0< 1B0"
    assert plan_grid(schedule, 0, 2, "missing 0B0") == ("rank 0 | 0F0  0SF0 >missing 0B0<\nrank 1 | 1RF0 1F0  1B0")
