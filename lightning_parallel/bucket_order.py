"""Pure: in which order buckets of gradients are reduced, so that every rank uses the same one."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BucketOrder"]


class BucketOrder:
    """Lets each bucket go as soon as it and all before it are complete, whatever order their parts arrive in.

    Args:
        sizes: number of parts that each bucket waits for.

    >>> order = BucketOrder([1, 2])
    >>> order.arrived(1), order.arrived(0), order.arrived(1), order.rest()
    ([], [0], [1], [])
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._pending = list(sizes)
        self._next = 0

    def arrived(self, bucket: int) -> list[int]:
        """One more part of a bucket is there; returns the buckets that may go now, in order."""
        self._pending[bucket] -= 1
        start = self._next
        while self._next < len(self._pending) and self._pending[self._next] <= 0:
            self._next += 1
        return list(range(start, self._next))

    def rest(self) -> list[int]:
        """The buckets that have not gone yet, which go now."""
        start, self._next = self._next, len(self._pending)
        return list(range(start, self._next))
