"""Pure: in which order shards travel between device, host memory and disk, and where they lie in a file.

Sources: ZeRO-Offload (Ren et al. 2021), ZeRO-Infinity (Rajbhandari et al. 2021, section 5.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

__all__ = ["KINDS", "Extent", "FileLayout", "Offload", "Travel", "Turn", "double_buffered"]

KINDS = ("cpu", "nvme")
ALIGNMENT = 4096
"""Extents begin at multiples of a page, so that no two of them share one."""
RESIDENT = 3
"""Buckets in host memory at one time: one on its way in, one in work, one on its way out."""


@dataclass(frozen=True)
class Offload:
    """Where the optimizer's side of the shards lies instead of on the device.

    Attributes:
        kind: "cpu": gradients, float32 copies and optimizer states in host memory. "nvme": gradients there, the rest in
            a file.
        path: folder on the disk, for "nvme".
        parameters: shares of stage 3's parameters lie there, too.
    """

    kind: str
    path: str | None = None
    parameters: bool = False

    def __post_init__(self) -> None:
        assert self.kind in KINDS, "the kind was checked where it was given"
        assert (self.kind == "nvme") == (self.path is not None), "files need a folder, and nothing else does"


class Turn(Enum):
    """What is done with one bucket (or several that go together)."""

    FETCH = "begin to bring in what the step needs"
    STEP = "wait for that, and step"
    SEND = "begin to put back what the step changed"
    SETTLE = "wait for that; the memory is free"


@dataclass(frozen=True)
class Travel:
    """One entry of a walk over buckets."""

    turn: Turn
    bucket: int


def double_buffered(buckets: int) -> Iterator[Travel]:
    """Steps bucket by bucket, while the next one comes in and the last one goes out.

    >>> " ".join(f"{travel.turn.name}{travel.bucket}" for travel in double_buffered(2))
    'FETCH0 FETCH1 STEP0 SEND0 STEP1 SEND1 SETTLE0 SETTLE1'
    """
    ahead = RESIDENT - 2
    for bucket in range(min(ahead, buckets)):
        yield Travel(Turn.FETCH, bucket)
    for bucket in range(buckets):
        coming, leaving = bucket + ahead, bucket + ahead - RESIDENT
        if leaving >= 0:
            yield Travel(Turn.SETTLE, leaving)
        if coming < buckets:
            yield Travel(Turn.FETCH, coming)
        yield Travel(Turn.STEP, bucket)
        yield Travel(Turn.SEND, bucket)
    for bucket in range(max(0, buckets + ahead - RESIDENT), buckets):
        yield Travel(Turn.SETTLE, bucket)


@dataclass(frozen=True)
class Extent:
    """Bytes ``offset : offset + nbytes`` of a file."""

    offset: int
    nbytes: int


class FileLayout:
    """Where each part of each bucket lies in a rank's file: named, aligned, apart from each other, never moved."""

    def __init__(self) -> None:
        self._extents: dict[tuple[int, str], Extent] = {}
        self.size = 0

    def place(self, bucket: int, name: str, nbytes: int) -> Extent:
        """The extent of a part, which is appended if it is new.

        Raises:
            ValueError: the part was placed with another size, or the size is negative.
        """
        if nbytes < 0:
            raise ValueError(f"part {name!r} of bucket {bucket} cannot have {nbytes} bytes")
        extent = self._extents.get((bucket, name))
        if extent is None:
            extent = Extent(self.size, nbytes)
            self._extents[bucket, name] = extent
            self.size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if extent.nbytes != nbytes:
            raise ValueError(f"part {name!r} of bucket {bucket} has {extent.nbytes} bytes, not {nbytes}")
        return extent
