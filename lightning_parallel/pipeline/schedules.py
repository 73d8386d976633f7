"""Pure: the pipeline schedules, built as compute-only plans and lowered by passes.

``compute_plan`` orders forwards and backwards, ``add_communication`` inserts the sends and receives between stages,
``add_reduction`` appends the gradient reduction, and ``validate_schedule`` checks the result. GPipe: Huang et al. 2019;
1F1B: PipeDream-Flush, Narayanan et al. 2021; zero bubble: ZB-H1, Qi et al. 2024, section 3.1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache

from lightning_parallel.pipeline.actions import Action, Kind, Schedule, plan_grid

__all__ = [
    "SCHEDULE_NAMES",
    "Plan",
    "add_communication",
    "add_reduction",
    "build_schedule",
    "compute_plan",
    "forward_only_schedule",
    "validate_schedule",
]

SCHEDULE_NAMES = ("gpipe", "1f1b", "zero-bubble")

Plan = tuple[tuple[Action, ...], ...]
"""Actions per rank."""


def build_schedule(name: str, stages: int, micro_batches: int) -> Schedule:
    """The complete, checked training schedule of one pipeline; any number of stages and micro-batches >= 1.

    >>> print(build_schedule("1f1b", stages=2, micro_batches=2).to_text(), end="")
    schedule 1f1b stages=2 micro_batches=2
    rank 0: 0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1 0R
    rank 1: 1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1 1R

    Raises:
        ValueError: an unknown name, or fewer than 1 stage or micro-batch.
    """
    plan = add_reduction(add_communication(compute_plan(name, stages, micro_batches)))
    schedule = Schedule(name, stages, micro_batches, plan)
    validate_schedule(schedule)
    return schedule


def forward_only_schedule(stages: int, micro_batches: int) -> Schedule:
    """Forwards of every micro-batch in order, for evaluation and prediction.

    >>> print(forward_only_schedule(2, 1).to_text(), end="")
    schedule forward stages=2 micro_batches=1
    rank 0: 0F0 0SF0
    rank 1: 1RF0 1F0
    """
    _check_counts(stages, micro_batches)
    plan = tuple(tuple(Action(Kind.FORWARD, s, i) for i in range(micro_batches)) for s in range(stages))
    schedule = Schedule("forward", stages, micro_batches, add_communication(plan))
    validate_schedule(schedule, training=False)
    return schedule


def compute_plan(name: str, stages: int, micro_batches: int) -> Plan:
    """Forwards and backwards of every rank, without communication.

    ``gpipe`` runs all forwards, then all backwards; stage s keeps ``micro_batches`` activations alive. ``1f1b`` runs
    ``stages - 1 - s`` forwards ahead, then alternates, so it keeps ``min(micro_batches, stages - s)``. ``zero-bubble``
    does the same with backwards that stop at the gradients that other stages wait for; their second halves, the
    gradients of weights, follow s micro-batches later, where stage s would wait otherwise (all at the end, if there are
    fewer micro-batches than stages). All run backwards in the order of the micro-batches, so that they add up gradients
    in the same order.
    """
    _check_counts(stages, micro_batches)
    if name not in SCHEDULE_NAMES:
        raise ValueError(f"schedule {name!r} is unknown; use {' or '.join(map(repr, SCHEDULE_NAMES))}")
    plan = []
    for stage in range(stages):
        ahead = micro_batches if name == "gpipe" else min(micro_batches, stages - 1 - stage)
        forwards = [Action(Kind.FORWARD, stage, i) for i in range(micro_batches)]
        backwards = [Action(Kind.BACKWARD, stage, i) for i in range(micro_batches)]
        actions = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            actions += [forward, backward]
        actions += backwards[micro_batches - ahead :]
        if name == "zero-bubble" and stages > 1:
            actions = list(_with_weights(actions, stage if micro_batches >= stages else micro_batches))
        plan.append(tuple(actions))
    return tuple(plan)


def _with_weights(actions: list[Action], lag: int) -> Iterator[Action]:
    """The second half of each backward after the backward that comes ``lag`` micro-batches later, or at the end."""
    waiting: deque[Action] = deque()
    for action in actions:
        yield action
        if action.kind is Kind.BACKWARD:
            waiting.append(Action(Kind.WEIGHT, action.stage, action.micro_batch))
            if len(waiting) > lag:
                yield waiting.popleft()
    yield from waiting


def add_communication(plan: Plan) -> Plan:
    """Receive right before and send right after every forward and backward that crosses a stage boundary.

    Neighbouring sends and receives form one batch. In the steady state of 1F1B ``SF i, RB j`` of stage s meets
    ``SB j, RF i`` of stage s + 1, so each batch finds its peer's batch and neither buffered nor rendezvous transports
    can deadlock. A receive looks at what arrives, so gradients of weights come before it, not while it waits.
    """
    ranks = len(plan)
    stages = 1 + max((action.stage for actions in plan for action in actions), default=0)
    return tuple(tuple(_with_transfers(actions, stages, ranks)) for actions in plan)


def _with_transfers(actions: tuple[Action, ...], stages: int, ranks: int) -> Iterator[Action]:
    sends = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD}
    for action in actions:
        needed = action.needs(stages)
        if needed is not None and needed.peer_stage % ranks != action.stage % ranks:
            yield needed
        yield action
        if action.kind in sends:
            send = Action(sends[action.kind], action.stage, action.micro_batch)
            if 0 <= send.peer_stage < stages and send.peer_stage % ranks != action.stage % ranks:
                yield send


def add_reduction(plan: Plan) -> Plan:
    """Append the gradient reduction of every stage after the last action of its rank."""
    return tuple(
        (*actions, *(Action(Kind.REDUCE, stage) for stage in sorted({action.stage for action in actions})))
        for actions in plan
    )


@lru_cache(maxsize=16)  # who builds one checks it, and so does whoever simulates it, for each kind of transfer
def validate_schedule(schedule: Schedule, training: bool = True) -> None:
    """Check that a schedule computes every micro-batch once, in a possible order, and that transfers match.

    Every forward (and, in ``training``, backward) once per stage and micro-batch; backward after forward; each
    receive before the action that reads it and each send after the action that fills it; between two ranks, receives
    in the order of the sends; the reduction last on its rank.

    Raises:
        ValueError: the text names the rule and shows the whole plan with the failing cell marked ``>like this<``.
    """
    for rank in range(schedule.ranks):
        _validate_rank(schedule, rank, training)
    _validate_transfers(schedule)


def _validate_rank(schedule: Schedule, rank: int, training: bool) -> None:
    done: set[Action] = set()
    reduced = False
    for index, action in enumerate(schedule.actions[rank]):
        problem = _problem(schedule, rank, action, done, training)
        if reduced and action.kind is not Kind.REDUCE:
            problem = problem or "follows the gradient reduction"
        reduced = reduced or action.kind is Kind.REDUCE
        if problem:
            raise _invalid(schedule, f"{action} {problem}", rank, index)
        done.add(action)
    for action in _required(schedule, rank, training):
        if action not in done:
            raise _invalid(schedule, f"{action} is missing", rank, len(schedule.actions[rank]), f"missing {action}")


def _problem(schedule: Schedule, rank: int, action: Action, done: set[Action], training: bool) -> str:
    """Why ``action`` may not follow the actions in ``done``; empty when it may."""
    if action.stage >= schedule.stages or schedule.rank_of_stage(action.stage) != rank:
        return f"does not belong on rank {rank}"
    if action.micro_batch is not None and action.micro_batch >= schedule.micro_batches:
        return f"is outside the {schedule.micro_batches} micro-batches"
    if action in done:
        return "appears twice"
    if not training and action.kind not in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD):
        return "has no place in a forward-only schedule"
    if action.kind.is_communication and not _crosses(schedule, action):
        return "has no neighbouring rank on that side"
    for earlier in _prerequisites(schedule, action):
        if earlier not in done:
            return f"comes before {earlier}"
    return ""


_PREREQUISITES = {
    Kind.BACKWARD: Kind.FORWARD,
    Kind.WEIGHT: Kind.BACKWARD,
    Kind.SEND_FORWARD: Kind.FORWARD,
    Kind.SEND_BACKWARD: Kind.BACKWARD,
}


def _prerequisites(schedule: Schedule, action: Action) -> Iterator[Action]:
    needed = action.needs(schedule.stages)
    if needed is not None and _crosses(schedule, needed):
        yield needed
    if action.kind in _PREREQUISITES:
        yield Action(_PREREQUISITES[action.kind], action.stage, action.micro_batch)


def _required(schedule: Schedule, rank: int, training: bool) -> Iterator[Action]:
    """Every action that ``rank`` must have; a schedule splits every backward or none."""
    kinds = [Kind.FORWARD, Kind.SEND_FORWARD]
    if training:
        kinds += [Kind.BACKWARD, Kind.SEND_BACKWARD]
        kinds += [Kind.WEIGHT] if schedule.splits_backward else []
    for stage in range(rank, schedule.stages, schedule.ranks):
        for micro_batch in range(schedule.micro_batches):
            for kind in kinds:
                action = Action(kind, stage, micro_batch)
                if not kind.is_communication or _crosses(schedule, action):
                    yield action
        if training:
            yield Action(Kind.REDUCE, stage)


def _crosses(schedule: Schedule, action: Action) -> bool:
    """Whether a transfer goes to another rank of the pipeline."""
    peer = action.peer_stage
    return 0 <= peer < schedule.stages and schedule.rank_of_stage(peer) != schedule.rank_of_stage(action.stage)


def _validate_transfers(schedule: Schedule) -> None:
    """Receives of each ordered pair of ranks must name the tensors in the order in which they are sent."""
    sent: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind.is_send:
                sent.setdefault((rank, schedule.rank_of_stage(action.peer_stage)), []).append(action.counterpart)
    taken: dict[tuple[int, int], int] = {}
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if not action.kind.is_receive:
                continue
            channel = (schedule.rank_of_stage(action.peer_stage), rank)
            position = taken.get(channel, 0)
            taken[channel] = position + 1
            arriving = sent.get(channel, [])[position : position + 1]
            if arriving != [action]:
                found = f"rank {channel[0]} sends {arriving[0].counterpart} then" if arriving else "nothing is sent"
                raise _invalid(schedule, f"{action} does not match: {found}", rank, index)
    for channel, tensors in sent.items():
        for action in tensors[taken.get(channel, 0) :]:
            end = len(schedule.actions[channel[1]])
            raise _invalid(schedule, f"{action.counterpart} is never received", channel[1], end, f"missing {action}")


def _invalid(schedule: Schedule, rule: str, rank: int, index: int, note: str = "") -> ValueError:
    where = f"schedule {schedule.name} ({schedule.stages} stages, {schedule.micro_batches} micro-batches)"
    return ValueError(f"{where} is invalid: {rule}\n{plan_grid(schedule, rank, index, note)}")


def _check_counts(stages: int, micro_batches: int) -> None:
    for name, value in (("stages", stages), ("micro_batches", micro_batches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, such as 1, got {value!r}")
