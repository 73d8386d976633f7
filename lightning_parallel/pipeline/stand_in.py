"""Mechanism: stands in for the neighbours of a stage, so that it can walk a schedule on its own."""

from __future__ import annotations

from typing import Any

from lightning_parallel import comm
from lightning_parallel.pipeline.boundary import Boundary, BoundaryLink
from lightning_parallel.pipeline.outline import Outline, TensorMeta

__all__ = ["Arrival", "StandInLink", "arrival_of"]

Arrival = tuple[Outline, tuple[Outline, ...]]
"""Outline of what a stage receives, and of the outputs of all earlier blocks if shapes change from block to block."""


class StandInLink(BoundaryLink):
    """A link whose neighbours take everything and send zeros; gradients that come back are whatever is in memory.

    Args:
        link: of the stage.
        arrival: what the previous stage would send; None on the first stage.
    """

    def __init__(self, link: BoundaryLink, arrival: Arrival | None) -> None:
        super().__init__(link.previous, link.following, link.group, link.control, link.device)
        self._arrival = arrival

    def announce(self, boundary: Boundary) -> None:
        """Nobody listens."""

    def await_headers(self, count: int) -> None:
        """What will arrive is known."""

    def expect(self) -> Boundary:
        """Zeros."""
        assert self._arrival is not None, "a stage that receives knows what"
        boundary = Boundary.like(*self._arrival, self.device)
        for tensor in boundary.tensors:
            tensor.zero_()
        return boundary

    def exchange(self, transfers: list[comm.SendRecv]) -> list[comm.Work]:
        """Nothing travels."""
        return []


def arrival_of(one: Arrival, two: Arrival, samples: int) -> Arrival:
    """What a stage receives for so many samples, from what it received for one and for two: sizes grow linearly.

    Raises:
        ValueError: the structure itself depends on the number of samples.
    """
    outlines = zip((one[0], *one[1]), (two[0], *two[1]), strict=True)
    first, *earlier = [_grown(a, b, samples) for a, b in outlines]
    return first, tuple(earlier)


def _grown(one: Outline, two: Outline, samples: int) -> Outline:
    if one.spec != two.spec or len(one.leaves) != len(two.leaves):
        raise ValueError(
            "what a stage passes on is built differently from one sample and from two, so its size for more cannot be "
            "told; divide the batch by TensorPipelineStrategy(micro_batches=...), for example micro_batches=8"
        )
    return Outline(tuple(_grown_leaf(a, b, samples) for a, b in zip(one.leaves, two.leaves, strict=True)), one.spec)


def _grown_leaf(one: Any, two: Any, samples: int) -> Any:
    if isinstance(one, TensorMeta):
        shape = tuple(_line(a, b, samples) for a, b in zip(one.shape, two.shape, strict=True))
        return TensorMeta(shape, one.dtype, one.requires_grad)
    if type(one) is int and type(two) is int:
        return _line(one, two, samples)
    return one


def _line(one: int, two: int, samples: int) -> int:
    return one + (two - one) * (samples - 1)
