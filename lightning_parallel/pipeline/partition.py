"""Pure: which contiguous run of blocks each pipeline stage owns."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import isfinite, lcm

__all__ = ["partition_blocks", "stage_weights"]

Bounds = tuple[tuple[int, int], ...]
"""Per stage, the half-open range of its blocks."""


def partition_blocks(weights: Sequence[float], stages: int, first: float = 0, last: float = 0) -> Bounds:
    """Split blocks into contiguous stages so that the heaviest stage is as light as possible.

    Exact (dynamic programming over exact numbers). Among the splits with the lightest heaviest stage the most even one
    is taken (smallest sum of squares), and among those the one whose earlier stages have fewer blocks: earlier stages
    keep more micro-batches alive under 1F1B.

    >>> partition_blocks([1] * 10, 4)
    ((0, 2), (2, 4), (4, 7), (7, 10))
    >>> partition_blocks([1, 1, 1, 1, 1, 1], 2, last=2)
    ((0, 4), (4, 6))

    Args:
        weights: cost of each block, in any unit (parameters, seconds), at least 0.
        stages: number of stages; each gets at least one block.
        first: extra weight of the first stage (embedding).
        last: extra weight of the last stage (norm and head).

    Raises:
        ValueError: fewer blocks than stages, or a weight that is negative or not finite.
    """
    if stages < 1:
        raise ValueError(f"stages must be at least 1, got {stages}")
    if len(weights) < stages:
        raise ValueError(
            f"{len(weights)} blocks cannot be split into {stages} pipeline stages, each needs at least one; "
            f"use pipeline_parallel_size {len(weights)} or less"
        )
    *blocks, first_extra, last_extra = _exact([*weights, first, last])
    costs = _Costs(blocks, stages, first_extra, last_extra)
    return _most_even(costs, _lightest_maximum(costs))


def stage_weights(weights: Sequence[float], bounds: Bounds, first: float = 0, last: float = 0) -> tuple[float, ...]:
    """Weight of every stage of a split, in the unit of ``weights``.

    >>> stage_weights([1, 1, 1, 1, 1, 1], ((0, 4), (4, 6)), last=2)
    (4, 4)
    """
    final = len(bounds) - 1
    return tuple(
        sum(weights[start:stop]) + (first if stage == 0 else 0) + (last if stage == final else 0)
        for stage, (start, stop) in enumerate(bounds)
    )


class _Costs:
    """Integer weight of any run of blocks on any stage."""

    def __init__(self, blocks: Sequence[int], stages: int, first: int, last: int) -> None:
        self.blocks = len(blocks)
        self.stages = stages
        self._extra = [0] * stages
        self._extra[0] += first
        self._extra[-1] += last
        self._sums = [0]
        for weight in blocks:
            self._sums.append(self._sums[-1] + weight)

    def __call__(self, stage: int, start: int, stop: int) -> int:
        return self._sums[stop] - self._sums[start] + self._extra[stage]

    def starts(self, stage: int) -> range:
        """Where ``stage`` may begin when every stage before and after it has a block."""
        return range(stage, self.blocks - (self.stages - stage) + 1)

    def stops(self, stage: int, start: int) -> range:
        """Where ``stage`` may end when it begins at ``start``."""
        if stage == self.stages - 1:
            return range(self.blocks, self.blocks + 1)
        return range(start + 1, self.blocks - (self.stages - stage - 1) + 1)

    def stops_within(self, stage: int, start: int, limit: int) -> range:
        """The `stops` up to which ``stage`` is no heavier than ``limit``."""
        stops = self.stops(stage, start)
        return stops[: bisect_right(stops, limit, key=lambda stop: self(stage, start, stop))]


def _lightest_maximum(costs: _Costs) -> int:
    """Weight of the heaviest stage in the best split."""
    best = {costs.blocks: 0}
    for stage in reversed(range(costs.stages)):
        best = {start: _lightest_from(costs, stage, start, best) for start in costs.starts(stage)}
    return best[0]


def _lightest_from(costs: _Costs, stage: int, start: int, rest: Mapping[int, int]) -> int:
    """Weight of the heaviest stage from ``stage`` on, with ``rest`` that of those behind it by their start.

    The later a stage stops, the heavier it is and the lighter the rest: the best stop is where the two cross.
    """
    stops = costs.stops(stage, start)
    crossing = bisect_left(stops, True, key=lambda stop: costs(stage, start, stop) >= rest[stop])
    return min(max(costs(stage, start, stop), rest[stop]) for stop in stops[max(0, crossing - 1) : crossing + 1])


def _most_even(costs: _Costs, limit: int) -> Bounds:
    """The split with the smallest sum of squares in which no stage is heavier than ``limit``."""
    best: dict[int, tuple[int, Bounds]] = {costs.blocks: (0, ())}
    for stage in reversed(range(costs.stages)):
        found: dict[int, tuple[int, Bounds]] = {}
        for start in costs.starts(stage):
            # Smaller bounds compare first, so a tie goes to fewer blocks on the earlier stage.
            options = (
                (best[stop][0] + costs(stage, start, stop) ** 2, ((start, stop), *best[stop][1]))
                for stop in costs.stops_within(stage, start, limit)
                if stop in best
            )
            option = min(options, default=None)
            if option is not None:
                found[start] = option
        best = found
    return best[0][1]


def _exact(weights: Sequence[float]) -> list[int]:
    """The weights as whole numbers in a common unit, so that sums and ties are exact."""
    for weight in weights:
        if not isfinite(weight) or weight < 0:
            raise ValueError(f"a block weight must be a finite number of at least 0, got {weight}; use 1")
    fractions = [Fraction(weight) for weight in weights]
    unit = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * unit) for fraction in fractions]
