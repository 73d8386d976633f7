"""Pure: what a pipeline rank does, as data with a text form.

An action is one token such as ``0F3`` (stage 0, forward, micro-batch 3); a schedule is one line of tokens per rank. The
runtime executes exactly the schedule that is printed, checked and simulated. The text form follows torch's pipeline
actions, but is parsed strictly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["Action", "Kind", "Schedule", "execution_steps", "plan_grid"]


class Kind(Enum):
    """Kinds of actions; the value is the token in the text form.

    Each is named from the view of the acting stage: stage 1 receives its input with ``1RF``, sends its output with
    ``1SF``, receives the gradient of its output with ``1RB`` and sends the gradient of its input with ``1SB``.
    ``WEIGHT`` is the weight half of a split backward; ``REDUCE`` reduces gradients over the data replicas.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"
    REDUCE = "R"

    __hash__ = object.__hash__  # there is one object of each kind; Enum's own hash runs Python for every look-up

    @property
    def is_send(self) -> bool:
        """Whether it hands a boundary tensor to a neighbour."""
        return self is Kind.SEND_FORWARD or self is Kind.SEND_BACKWARD

    @property
    def is_receive(self) -> bool:
        """Whether it takes a boundary tensor from a neighbour."""
        return self is Kind.RECV_FORWARD or self is Kind.RECV_BACKWARD

    @property
    def is_communication(self) -> bool:
        """Whether it is a send or a receive between stages."""
        return self.is_send or self.is_receive


_NUMBER = "(0|[1-9][0-9]*)"
_ACTION = re.compile(f"{_NUMBER}(SF|RF|SB|RB|F|B|W|R){_NUMBER}?")
_HEADER = re.compile(f"schedule ([a-z0-9_-]+) stages={_NUMBER} micro_batches={_NUMBER}")


@dataclass(frozen=True)
class Action:
    """One step of one stage. ``micro_batch`` is None for REDUCE and a number for everything else.

    >>> str(Action(Kind.RECV_BACKWARD, 1, 2)), Action.parse("0R")
    ('1RB2', Action(kind=<Kind.REDUCE: 'R'>, stage=0, micro_batch=None))
    """

    kind: Kind
    stage: int
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        if self.stage < 0 or (self.micro_batch is not None and self.micro_batch < 0):
            raise ValueError(f"stage and micro-batch start at 0, got {self.stage} and {self.micro_batch}")
        if (self.micro_batch is None) != (self.kind is Kind.REDUCE):
            wanted = "no micro-batch, as in 0R" if self.kind is Kind.REDUCE else "a micro-batch, as in 0F3"
            raise ValueError(f"an action of kind {self.kind.value} needs {wanted}, got {self.micro_batch}")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.micro_batch is None else self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as ``text``; raises ValueError for anything that is not exactly one action."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an action; write stage, kind and micro-batch as in 0F3, 1RB2 or 0R")
        stage, kind, micro_batch = match.groups()
        return cls(Kind(kind), int(stage), None if micro_batch is None else int(micro_batch))

    @property
    def peer_stage(self) -> int:
        """The stage at the other end of a send or receive (-1 or ``stages`` for one that leaves the pipeline)."""
        if self.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD):
            return self.stage + 1
        if self.kind in (Kind.SEND_BACKWARD, Kind.RECV_FORWARD):
            return self.stage - 1
        raise ValueError(f"{self} is not a send or a receive, so it has no peer stage")

    @property
    def counterpart(self) -> Action:
        """The action of the peer stage that completes this send or receive.

        >>> str(Action.parse("0SF3").counterpart), str(Action.parse("0RB3").counterpart)
        ('1RF3', '1SB3')
        """
        return Action(_COUNTERPARTS[self.kind], self.peer_stage, self.micro_batch)

    def needs(self, stages: int) -> Action | None:
        """The receive whose tensor a forward or backward reads; None where there is no neighbour on that side."""
        if self.kind is Kind.FORWARD and self.stage > 0:
            return Action(Kind.RECV_FORWARD, self.stage, self.micro_batch)
        if self.kind is Kind.BACKWARD and self.stage < stages - 1:
            return Action(Kind.RECV_BACKWARD, self.stage, self.micro_batch)
        return None


_COUNTERPARTS = {
    Kind.SEND_FORWARD: Kind.RECV_FORWARD,
    Kind.RECV_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECV_BACKWARD,
    Kind.RECV_BACKWARD: Kind.SEND_BACKWARD,
}


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank of one pipeline, in execution order.

    Stage ``s`` runs on pipeline rank ``s % ranks``; at present there is one stage per rank.

    >>> print(Schedule("demo", 1, 1, ((Action.parse("0F0"), Action.parse("0B0")),)).to_text(), end="")
    schedule demo stages=1 micro_batches=1
    rank 0: 0F0 0B0
    """

    name: str
    stages: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if self.stages < 1 or self.micro_batches < 1:
            raise ValueError(
                f"a schedule needs at least 1 stage and 1 micro-batch, got {self.stages} and {self.micro_batches}"
            )
        if not self.actions or self.stages % len(self.actions):
            raise ValueError(f"{self.stages} stages cannot be spread evenly over {len(self.actions)} ranks")
        if not re.fullmatch("[a-z0-9_-]+", self.name):
            raise ValueError(f"a schedule name has small letters, digits, - and _ only, as in 1f1b, got {self.name!r}")

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.actions)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are actions of their own."""
        return any(action.kind is Kind.WEIGHT for actions in self.actions for action in actions)

    def rank_of_stage(self, stage: int) -> int:
        """The pipeline rank that runs ``stage``."""
        return stage % self.ranks

    def to_text(self) -> str:
        """Header and one line per rank, ending in a newline; :meth:`from_text` reads it back."""
        lines = [f"schedule {self.name} stages={self.stages} micro_batches={self.micro_batches}"]
        lines += [" ".join([f"rank {rank}:", *map(str, actions)]) for rank, actions in enumerate(self.actions)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """The schedule that prints as ``text``.

        Raises:
            ValueError: the header, a rank label or an action is wrong; the text names the line.
        """
        header, *lines = text.removesuffix("\n").split("\n")
        match = _HEADER.fullmatch(header)
        if match is None:
            raise ValueError(f"line 1 must read like 'schedule 1f1b stages=2 micro_batches=4', got {header!r}")
        actions = []
        for rank, line in enumerate(lines):
            label, *tokens = line.removeprefix("rank ").split(" ")
            if not line.startswith("rank ") or label != f"{rank}:":
                raise ValueError(f"line {rank + 2} must start with 'rank {rank}:', got {line!r}")
            try:
                actions.append(tuple(Action.parse(token) for token in tokens))
            except ValueError as error:
                raise ValueError(f"line {rank + 2}: {error}") from error
        return cls(match[1], int(match[2]), int(match[3]), tuple(actions))


def execution_steps(actions: Iterable[Action]) -> tuple[tuple[Action, ...], ...]:
    """Split the actions of a rank into what the runtime does at once.

    A maximal run of sends and receives is one step, posted as one batch; every other action is a step of its own.

    >>> line = "0F0 0SF0 0RB0 0B0 0R"
    >>> [" ".join(map(str, step)) for step in execution_steps(map(Action.parse, line.split()))]
    ['0F0', '0SF0 0RB0', '0B0', '0R']
    """
    steps: list[list[Action]] = []
    for action in actions:
        if action.kind.is_communication and steps and steps[-1][-1].kind.is_communication:
            steps[-1].append(action)
        else:
            steps.append([action])
    return tuple(map(tuple, steps))


def plan_grid(schedule: Schedule, rank: int | None = None, index: int | None = None, note: str = "") -> str:
    """All actions as a table, one row per rank; the cell at ``rank`` and ``index`` is marked ``>like this<``.

    An index behind the last action marks an extra cell that shows ``note``.
    """
    rows = [[str(action) for action in actions] for actions in schedule.actions]
    if rank is not None and index is not None:
        if index >= len(rows[rank]):
            rows[rank].append(note or "end")
            index = len(rows[rank]) - 1
        rows[rank][index] = f">{rows[rank][index]}<"
    columns = max(map(len, rows))
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(columns)]
    lines = [
        f"rank {number} | " + " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        for number, row in enumerate(rows)
    ]
    return "\n".join(line.rstrip() for line in lines)
