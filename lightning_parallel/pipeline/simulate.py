"""Pure: what a schedule costs before it is run: time, bubble, live activations, deadlock.

Each rank walks its execution steps as the runtime does. A run of sends and receives is posted as one batch. With a
"buffered" transport sends never block and a receive is waited for only before the action that reads it. With a
"rendezvous" transport a transfer completes only once both sides have posted it, and a batch blocks its rank until all
of its transfers are complete: the worst that NCCL may do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from lightning_parallel.pipeline.actions import Action, Kind, Schedule, execution_steps
from lightning_parallel.pipeline.schedules import validate_schedule

__all__ = [
    "TRANSPORTS",
    "DeadlockError",
    "Simulation",
    "Span",
    "check_deadlock",
    "peak_live_micro_batches",
    "peak_put_off_micro_batches",
    "simulate",
    "simulate_equal_stages",
]

TRANSPORTS = ("buffered", "rendezvous")


class DeadlockError(ValueError):
    """A schedule whose ranks wait for each other; ``waiting`` holds the actions that cannot complete."""

    def __init__(self, text: str, waiting: tuple[Action, ...]) -> None:
        super().__init__(text)
        self.waiting = waiting


@dataclass(frozen=True)
class Span:
    """One computing action with its start and stop in seconds."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Simulation:
    """The simulated run. ``spans`` and ``busy`` are per rank, ``peak_live`` per stage, times in seconds."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    peak_live: tuple[int, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds of each rank in which it computes nothing."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle share of the total: (p - 1) / (m + p - 1) for 1F1B, p equal stages, m micro-batches, free transfers."""
        total = self.makespan * len(self.busy)
        return sum(self.idle) / total if total else 0.0

    def timeline(self, slot: float | None = None) -> str:
        """A text grid: a row per stage, a column per time slot, ``--`` where an action goes on and ``.`` where idle.

        ``slot`` is the width of a column in seconds, by default the shortest action that takes time.

        >>> from lightning_parallel.pipeline.schedules import build_schedule
        >>> print(simulate(build_schedule("1f1b", 2, 3)).timeline())
        stage 0 | F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
        stage 1 | .  F0 B0 -- F1 B1 -- F2 B2 -- .  .
        """
        lengths = [span.stop - span.start for spans in self.spans for span in spans]
        width = slot if slot is not None else min((length for length in lengths if length > 0), default=1.0)
        if width <= 0:
            raise ValueError(f"a time slot must be longer than 0 seconds, got {width}; use 1.0")
        columns = max(1, ceil(self.makespan / width - 1e-9))
        rows = [[_cell(spans, column, width) for column in range(columns)] for spans in self.spans]
        broadest = max(len(cell) for row in rows for cell in row)
        lines = [f"stage {rank} | " + " ".join(c.ljust(broadest) for c in row) for rank, row in enumerate(rows)]
        return "\n".join(line.rstrip() for line in lines)


def _cell(spans: tuple[Span, ...], column: int, width: float) -> str:
    middle = (column + 0.5) * width
    for span in spans:
        if span.start <= middle < span.stop:
            first = span.start > middle - width
            return f"{span.action.kind.value}{span.action.micro_batch}" if first else "--"
    return "."


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    *,
    weight: float | Sequence[float] = 0.0,
    latency: float = 0.0,
    transport: str = "rendezvous",
) -> Simulation:
    """Run a schedule on paper.

    Args:
        schedule: a complete plan; it is validated first.
        forward: seconds per micro-batch, one number for all stages or one per stage.
        backward: seconds of a backward, likewise.
        weight: seconds of the weight half of a split backward, likewise.
        latency: seconds that every transfer between stages takes.
        transport: "buffered" or "rendezvous", see the head of this module.

    Raises:
        ValueError: an invalid plan, a negative cost, or a wrong number of costs.
        DeadlockError: the ranks wait for each other; the text names the waiting actions.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport {transport!r} is unknown; use {' or '.join(map(repr, TRANSPORTS))}")
    if latency < 0:
        raise ValueError(f"latency must be at least 0 seconds, got {latency}; use 0.0")
    validate_schedule(schedule, training=_is_training(schedule))
    costs = {
        Kind.FORWARD: _per_stage("forward", forward, schedule.stages),
        Kind.BACKWARD: _per_stage("backward", backward, schedule.stages),
        Kind.WEIGHT: _per_stage("weight", weight, schedule.stages),
        Kind.REDUCE: (0.0,) * schedule.stages,
    }
    walk = _Walk(schedule, costs, latency, rendezvous=transport == "rendezvous")
    walk.run()
    busy = tuple(sum(span.stop - span.start for span in spans) for spans in walk.spans)
    spans = tuple(map(tuple, walk.spans))
    return Simulation(schedule, spans, max(walk.clock), busy, peak_live_micro_batches(schedule))


def simulate_equal_stages(schedule: Schedule) -> Simulation:
    """A forward takes 1 s and a backward 2 s on every stage, half of it for weights where it is split; transfers none.

    >>> from lightning_parallel.pipeline.schedules import build_schedule
    >>> print(simulate_equal_stages(build_schedule("zero-bubble", 2, 3)).timeline())
    stage 0 | F0 F1 .  B0 W0 F2 B1 W1 B2 W2
    stage 1 | .  F0 B0 F1 B1 W0 F2 B2 W1 W2
    """
    first_half = 1.0 if schedule.splits_backward else 2.0
    return simulate(schedule, 1.0, first_half, weight=1.0, transport="buffered")


def check_deadlock(schedule: Schedule) -> None:
    """Raise DeadlockError when the schedule can hang with any transport that the simulator knows."""
    for transport in TRANSPORTS:
        simulate(schedule, transport=transport)


def peak_live_micro_batches(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the largest number of micro-batches between their forward and their backward at one time.

    1F1B: min(m, p - s) on stage s of p with m micro-batches. A forward-only schedule keeps none for a backward, so each
    counts only while it runs: 1.
    """
    training = _is_training(schedule)
    live, peak = [0] * schedule.stages, [0] * schedule.stages
    for actions in schedule.actions:
        for action in actions:
            if action.kind is Kind.FORWARD:
                live[action.stage] = live[action.stage] + 1 if training else 1
                peak[action.stage] = max(peak[action.stage], live[action.stage])
            elif action.kind is Kind.BACKWARD:
                live[action.stage] -= 1
    return tuple(peak)


def peak_put_off_micro_batches(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the largest number of micro-batches between the halves of their backward at one time.

    Zero bubble: s + 1 on stage s, if there is a micro-batch per stage. 0 where no backward is split.
    """
    waiting, peak = [0] * schedule.stages, [0] * schedule.stages
    if schedule.splits_backward:
        for action in (action for actions in schedule.actions for action in actions):
            waiting[action.stage] += {Kind.BACKWARD: 1, Kind.WEIGHT: -1}.get(action.kind, 0)
            peak[action.stage] = max(peak[action.stage], waiting[action.stage])
    return tuple(peak)


class _Walk:
    """The state of a simulated run: a clock and a position per rank, and when each transfer was posted."""

    def __init__(
        self, schedule: Schedule, costs: dict[Kind, tuple[float, ...]], latency: float, rendezvous: bool
    ) -> None:
        self.schedule = schedule
        self.costs = costs
        self.latency = latency
        self.rendezvous = rendezvous
        self.steps = [execution_steps(actions) for actions in schedule.actions]
        self.position = [0] * schedule.ranks
        self.clock = [0.0] * schedule.ranks
        self.spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
        self.posted: dict[Action, float] = {}

    def run(self) -> None:
        """Advance every rank until all are done; raise DeadlockError when none can move."""
        # Clocks only depend on what each rank waits for, so the order in which ranks are advanced does not matter.
        while any(self._advance(rank) for rank in range(self.schedule.ranks)):
            pass
        waiting = {r: self._waiting(r) for r in range(self.schedule.ranks) if self.position[r] < len(self.steps[r])}
        if waiting:
            lines = [f"rank {rank} waits for {' '.join(map(str, actions))}" for rank, actions in waiting.items()]
            kind = "rendezvous" if self.rendezvous else "buffered"
            raise DeadlockError(
                f"schedule {self.schedule.name} deadlocks with {kind} transfers: {'; '.join(lines)}",
                tuple(action for actions in waiting.values() for action in actions),
            )

    def _advance(self, rank: int) -> bool:
        """Walk ``rank`` as far as it gets; True when it finished at least one step or posted a batch."""
        moved = False
        while self.position[rank] < len(self.steps[rank]):
            step = self.steps[rank][self.position[rank]]
            if step[0].kind.is_communication and step[0] not in self.posted:
                self.posted.update(dict.fromkeys(step, self.clock[rank]))
                moved = True
            if self._waiting(rank):
                break
            self._finish(rank, step)
            self.position[rank] += 1
            moved = True
        return moved

    def _waiting(self, rank: int) -> tuple[Action, ...]:
        """The transfers that keep ``rank`` from finishing its present step."""
        step = self.steps[rank][self.position[rank]]
        batch = step if self.rendezvous else ()
        needed = batch if step[0].kind.is_communication else self._reads(step[0])
        return tuple(action for action in needed if action.counterpart not in self.posted)

    def _finish(self, rank: int, step: tuple[Action, ...]) -> None:
        now = self.clock[rank]
        if step[0].kind.is_communication:
            if self.rendezvous:
                now = max(max(self.posted[a], self.posted[a.counterpart]) + self.latency for a in step)
        else:
            action = step[0]
            # A receive completes when it is posted and the message, sent at the counterpart's time, has travelled.
            arrivals = [self.posted[read.counterpart] + self.latency for read in self._reads(action)]
            start = max([now, *arrivals])
            now = start + self.costs[action.kind][action.stage]
            if action.kind is not Kind.REDUCE:
                self.spans[rank].append(Span(action, start, now))
        self.clock[rank] = now

    def _reads(self, action: Action) -> tuple[Action, ...]:
        """The receive that ``action`` reads, where the schedule has it."""
        needed = action.needs(self.schedule.stages)
        return (needed,) if needed is not None and needed in self.posted else ()


def _is_training(schedule: Schedule) -> bool:
    forward_kinds = (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    return any(action.kind not in forward_kinds for actions in schedule.actions for action in actions)


def _per_stage(name: str, cost: float | Sequence[float], stages: int) -> tuple[float, ...]:
    values = tuple(cost) if isinstance(cost, Sequence) else (float(cost),) * stages
    if len(values) != stages:
        raise ValueError(f"{name} costs need one number for each of the {stages} stages, got {len(values)}")
    if not all(value >= 0 for value in values):
        raise ValueError(f"{name} costs must be at least 0 seconds, got {values}; use 1.0")
    return values
