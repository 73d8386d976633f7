"""Pure: the one tag per parameter from which norms, reductions, counts and checkpoints derive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from lightning_parallel.tensor_parallel.sharding import ShardSpec

__all__ = ["ParameterTag", "check_complete", "describe_difference", "name_difference"]

_NAMES_SHOWN = 5


@dataclass(frozen=True)
class ParameterTag:
    """What the parallel run knows about one parameter of the user's plain model.

    ``name`` and ``shape`` are those of the plain model. ``shard`` says how the tensor group splits it (None: every
    tensor rank holds it whole). ``partial_gradient``: each tensor rank holds the parameter whole but only part of its
    gradient, which must be summed over the tensor group. ``stages``: every pipeline stage that holds it, ascending;
    more than one for tied and shared parameters.

    Raises:
        ValueError: no stages, stages out of order, or a shard that does not fit the shape.
    """

    name: str
    shape: tuple[int, ...]
    shard: ShardSpec | None
    partial_gradient: bool = False
    stages: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.stages or list(self.stages) != sorted(set(self.stages)) or self.stages[0] < 0:
            raise ValueError(f"parameter {self.name!r} needs ascending, distinct stages, got {self.stages}")
        if self.shard is not None:
            if self.shard.dim >= len(self.shape) or self.shape[self.shard.dim] != self.shard.size:
                raise ValueError(
                    f"parameter {self.name!r} of shape {self.shape} has no dimension {self.shard.dim} of size "
                    f"{self.shard.size}, which its shard splits"
                )
            if self.partial_gradient:
                raise ValueError(f"parameter {self.name!r} is split, so its gradient cannot be partial")

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return prod(self.shape)

    @property
    def shared(self) -> bool:
        """Whether several stages hold it, so that its gradient must be summed over them."""
        return len(self.stages) > 1

    def local_shape(self, tensor_rank: int) -> tuple[int, ...]:
        """Shape that ``tensor_rank`` holds, padding included."""
        return self.shape if self.shard is None else self.shard.local_shape(self.shape, tensor_rank)

    def counted_ranges(self, stage: int, tensor_rank: int) -> tuple[tuple[int, int], ...] | None:
        """What this rank contributes to sums over the whole model (norms, counts), so that each element counts once.

        The lowest stage that holds the parameter counts it; of a shard, each segment is counted by its owner; a
        replicated parameter by tensor rank 0. Returns None for the whole local tensor, an empty tuple for nothing,
        otherwise half-open ranges along ``shard.dim`` of the local tensor (padding and repeated heads left out).
        """
        if stage != self.stages[0]:
            return ()
        if self.shard is None:
            return None if tensor_rank == 0 else ()
        owned = tuple((w.start, w.stop) for s, w in self.shard.local_slices(tensor_rank) if s.owner == tensor_rank)
        covered = sum(stop - start for start, stop in owned)
        return None if covered and covered == self.shard.local_size(tensor_rank) else owned

    def counted_numel(self, stage: int, tensor_rank: int) -> int:
        """Elements of the full parameter that this rank counts; over all stages and tensor ranks they add up to it."""
        ranges = self.counted_ranges(stage, tensor_rank)
        if ranges is None:
            return prod(self.local_shape(tensor_rank))
        if not ranges or self.shard is None:
            return 0
        return sum(stop - start for start, stop in ranges) * (self.numel // self.shard.size)


def name_difference(expected: Iterable[str], found: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that are missing from ``found`` and names in it that were not expected, each in given order.

    >>> name_difference(["a", "b"], ["b", "c"])
    (('a',), ('c',))
    """
    wanted, given = dict.fromkeys(expected), dict.fromkeys(found)
    return tuple(n for n in wanted if n not in given), tuple(n for n in given if n not in wanted)


def describe_difference(missing: tuple[str, ...], unexpected: tuple[str, ...]) -> str:
    """The difference as a phrase with counts and the first names; empty when there is none.

    >>> describe_difference(("a",), ())
    '1 missing (a)'
    """
    sides = [(missing, "missing"), (unexpected, "unexpected")]
    return ", ".join(f"{len(names)} {word} ({_some(names)})" for names, word in sides if names)


def check_complete(expected: Iterable[str], found: Iterable[str], *, what: str = "the checkpoint") -> None:
    """Check that ``found`` holds every expected name once and nothing else.

    Raises:
        ValueError: names are missing, unexpected or given twice; ``what`` opens the text.
    """
    given = Counter(found)
    twice = tuple(name for name, times in given.items() if times > 1)
    text = describe_difference(*name_difference(expected, given))
    if twice:
        text = ", ".join(filter(None, [text, f"{len(twice)} given twice ({_some(twice)})"]))
    if text:
        raise ValueError(f"{what} does not hold exactly the parameters of the model: {text}")


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
