"""Pure: which micro-batches keep a global batch, and the search for the largest that fits."""

from __future__ import annotations

from collections.abc import Callable

from lightning_parallel.layout import divisors

__all__ = ["candidates", "largest_that_fits"]


def candidates(samples: int, limit: int | None = None) -> tuple[int, ...]:
    """Micro-batches that divide the samples of one replica and optimizer step, ascending.

    >>> candidates(12, limit=6)
    (1, 2, 3, 4, 6)
    """
    return tuple(size for size in divisors(samples) if limit is None or size <= limit)


def largest_that_fits(sizes: tuple[int, ...], fits: Callable[[int], bool]) -> int | None:
    """The last of ascending sizes before the first that does not fit; None if the smallest does not.

    Ascending, so that nothing much larger than what fits is ever tried.

    >>> largest_that_fits((1, 2, 4, 8), lambda size: size <= 5)
    4
    """
    best = None
    for size in sizes:
        if not fits(size):
            break
        best = size
    return best
