"""Pure: which rank owns which elements of which parameter.

Parameters lie behind one another in buckets. A bucket is divided among the ranks in one of two ways: evenly, for
optimizers that treat every element alone, or wholly owned by one rank, for optimizers that need whole matrices. What
lies behind the last parameter of an evenly divided bucket is padding: it belongs to no parameter, so that it can enter
neither a norm nor weight decay.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["BucketLayout", "Item", "Slot", "plan_buckets"]

ALIGNMENT = 8
"""Every rank's share is a multiple of so many elements, as vector instructions and network cards like it."""


@dataclass(frozen=True)
class Item:
    """A parameter as the plan sees it.

    Attributes:
        numel: its elements.
        kind: only parameters of one kind (dtype, device, optimizer) share a bucket.
        whole: its optimizer needs all of it at once.
    """

    numel: int
    kind: Hashable = None
    whole: bool = False

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise ValueError(f"a parameter has at least 0 elements, got {self.numel}")


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies: elements ``offset : offset + numel`` of its bucket are those of item ``index``."""

    index: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """A bucket's parameters, and the half-open range of its elements that each rank owns.

    Attributes:
        slots: the parameters, behind one another without gaps.
        bounds: range per rank; together they cover the bucket, padding included, in the order of ranks.
        owner: the rank that owns all of it; None if it is divided evenly.
    """

    slots: tuple[Slot, ...]
    bounds: tuple[tuple[int, int], ...]
    owner: int | None = None

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return self.bounds[-1][1]

    @property
    def used(self) -> int:
        """Elements without padding."""
        return self.slots[-1].offset + self.slots[-1].numel

    def share(self, rank: int) -> int:
        """Elements that a rank owns, padding included."""
        start, stop = self.bounds[rank]
        return stop - start

    def piece(self, place: int, rank: int) -> tuple[int, int] | None:
        """The range of the parameter in slot ``place`` that a rank owns; None if it owns nothing of it.

        Counted from the parameter's own first element. Of a parameter without elements exactly one rank owns the
        empty range, so that its optimizer state exists once.
        """
        slot = self.slots[place]
        start, stop = self.bounds[rank]
        if slot.numel == 0:
            return (0, 0) if rank == self._rank_at(slot.offset) else None
        low, high = max(start, slot.offset), min(stop, slot.offset + slot.numel)
        return (low - slot.offset, high - slot.offset) if low < high else None

    def _rank_at(self, position: int) -> int:
        if self.owner is not None:
            return self.owner
        found = (rank for rank, (start, stop) in enumerate(self.bounds) if start <= position < stop)
        return next(found, len(self.bounds) - 1)


def plan_buckets(items: Sequence[Item], ranks: int, limit: int) -> tuple[BucketLayout, ...]:
    """Places every parameter in exactly one bucket.

    Parameters keep their order within a bucket, and buckets come in the order of their last items, so that the
    gradients of the first buckets are ready first if the items come in reverse order of the model.

    Args:
        items: the parameters.
        ranks: ranks to divide among.
        limit: a bucket is closed once it holds so many elements.

    Raises:
        ValueError: no rank, or a limit below 1.

    >>> [bucket.bounds for bucket in plan_buckets([Item(20), Item(3)], ranks=2, limit=100)]
    [((0, 16), (16, 32))]
    """
    if ranks < 1 or limit < 1:
        raise ValueError(f"buckets need at least 1 rank and a limit of at least 1 element, got {ranks} and {limit}")
    owners = _choose_owners(items, ranks)
    unfinished: dict[Hashable, list[int]] = {}
    closed: list[list[int]] = []
    for index, item in enumerate(items):
        key = (item.kind, owners.get(index))
        members = unfinished.setdefault(key, [])
        members.append(index)
        if sum(items[member].numel for member in members) >= limit:
            closed.append(unfinished.pop(key))
    closed = sorted([*closed, *unfinished.values()], key=lambda members: members[-1])
    return tuple(_bucket(items, members, ranks, owners.get(members[0])) for members in closed)


def _choose_owners(items: Sequence[Item], ranks: int) -> dict[int, int]:
    """Owner of every item that stays whole: the largest first, each to the rank that has least so far."""
    loads = [0] * ranks
    owners: dict[int, int] = {}
    whole = [index for index, item in enumerate(items) if item.whole]
    for index in sorted(whole, key=lambda index: -items[index].numel):
        rank = loads.index(min(loads))
        owners[index] = rank
        loads[rank] += items[index].numel
    return owners


def _bucket(items: Sequence[Item], members: Iterable[int], ranks: int, owner: int | None) -> BucketLayout:
    slots: list[Slot] = []
    used = 0
    for index in members:
        slots.append(Slot(index, used, items[index].numel))
        used += items[index].numel
    if owner is not None:
        bounds = tuple((0 if rank <= owner else used, used if rank >= owner else 0) for rank in range(ranks))
        return BucketLayout(tuple(slots), bounds, owner)
    share = -(-used // (ranks * ALIGNMENT)) * ALIGNMENT
    return BucketLayout(tuple(slots), tuple((rank * share, (rank + 1) * share) for rank in range(ranks)))
