"""Pure: how the ranks of a run are arranged over pipeline, data and tensor.

The arithmetic only. Process groups are made from a layout in ``mesh``, which takes the rank lists found here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Coordinate", "ParallelLayout", "SizeOrAuto", "choices_text", "divisors"]

SizeOrAuto = int | Literal["auto"]


def divisors(number: int) -> tuple[int, ...]:
    """Every divisor of ``number`` (>= 1), ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    if number < 1:
        raise ValueError(f"divisors are defined for numbers of at least 1, got {number}")
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    large = [number // d for d in reversed(small) if d * d != number]
    return tuple(small + large)


def choices_text(values: tuple[int, ...]) -> str:
    """Values as a phrase for an error message.

    >>> choices_text((1, 2, 4)), choices_text((1,))
    ('1, 2 or 4', '1')
    """
    if len(values) < 2:
        return "".join(map(str, values))
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"


@dataclass(frozen=True, order=True)
class Coordinate:
    """Where one rank sits: its pipeline stage, its data replica and its index inside the tensor group."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the three dimensions: ``pipeline`` x ``data`` x ``tensor`` ranks.

    Tensor is the fastest dimension, so that tensor groups are neighbours inside one node; pipeline is the slowest.

    >>> layout = ParallelLayout(pipeline=2, data=1, tensor=2)
    >>> layout.world_size
    4
    >>> layout.coordinate(3)
    Coordinate(pipeline=1, data=0, tensor=1)
    >>> layout.rank_of(pipeline=1, tensor=1)
    3
    >>> layout.tensor_groups(), layout.pipeline_groups()
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("pipeline", "data", "tensor"):
            _check_size(f"{name} size", getattr(self, name))

    @property
    def world_size(self) -> int:
        """Number of ranks (processes) of the whole run."""
        return self.pipeline * self.data * self.tensor

    def coordinate(self, rank: int) -> Coordinate:
        """The place of a global rank; raises ValueError outside ``0 <= rank < world_size``."""
        _check_index("rank", rank, self.world_size)
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinate(pipeline, data, tensor)

    def rank_of(self, *, pipeline: int = 0, data: int = 0, tensor: int = 0) -> int:
        """The global rank at a place; raises ValueError for an index outside its dimension."""
        _check_index("pipeline index", pipeline, self.pipeline)
        _check_index("data index", data, self.data)
        _check_index("tensor index", tensor, self.tensor)
        return (pipeline * self.data + data) * self.tensor + tensor

    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """Every tensor group, as global ranks in tensor order."""
        return tuple(
            tuple(self.rank_of(pipeline=p, data=d, tensor=t) for t in range(self.tensor))
            for p in range(self.pipeline)
            for d in range(self.data)
        )

    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks that hold the same shards and read different data, in data order.

        >>> ParallelLayout(pipeline=1, data=2, tensor=2).data_groups()
        ((0, 2), (1, 3))
        """
        return tuple(
            tuple(self.rank_of(pipeline=p, data=d, tensor=t) for d in range(self.data))
            for p in range(self.pipeline)
            for t in range(self.tensor)
        )

    def pipeline_groups(self) -> tuple[tuple[int, ...], ...]:
        """Every chain of stages, as global ranks in stage order."""
        return tuple(
            tuple(self.rank_of(pipeline=p, data=d, tensor=t) for p in range(self.pipeline))
            for d in range(self.data)
            for t in range(self.tensor)
        )

    def model_groups(self) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks that together hold one replica of the model, one per data index, ascending.

        >>> ParallelLayout(pipeline=2, data=2, tensor=1).model_groups()
        ((0, 2), (1, 3))
        """
        return tuple(
            tuple(self.rank_of(pipeline=p, data=d, tensor=t) for p in range(self.pipeline) for t in range(self.tensor))
            for d in range(self.data)
        )

    @classmethod
    def choose(
        cls,
        world_size: int,
        devices_per_node: int,
        tensor: SizeOrAuto = "auto",
        pipeline: SizeOrAuto = "auto",
    ) -> ParallelLayout:
        """The layout for a world of equal nodes; what tensor and pipeline leave over is data parallel.

        Both "auto": the devices of one node are split as evenly as possible with tensor >= pipeline. One "auto": it
        takes the devices of the node that the other leaves. Tensor groups never leave a node.

        >>> ParallelLayout.choose(8, 8)
        ParallelLayout(pipeline=2, data=1, tensor=4)
        >>> ParallelLayout.choose(16, 8, tensor=2)
        ParallelLayout(pipeline=4, data=2, tensor=2)
        >>> ParallelLayout.choose(4, 4, tensor=3)
        Traceback (most recent call last):
        ...
        ValueError: tensor_parallel_size=3 does not divide the 4 devices of a node; use 1, 2 or 4, or a multiple of 3

        Raises:
            ValueError: the sizes do not fit the world; the text names sizes that would.
        """
        _check_world(world_size, devices_per_node)
        if tensor != "auto":
            _check_size("tensor_parallel_size", tensor)
            if devices_per_node % tensor:
                raise ValueError(
                    f"tensor_parallel_size={tensor} does not divide the {devices_per_node} devices of a node; "
                    f"use {choices_text(divisors(devices_per_node))}, or a multiple of {tensor}"
                )
        if pipeline != "auto":
            _check_size("pipeline_parallel_size", pipeline)
        chosen_tensor, chosen_pipeline = _fill_auto(world_size, devices_per_node, tensor, pipeline)
        if world_size % (chosen_tensor * chosen_pipeline):
            raise ValueError(
                f"tensor_parallel_size={chosen_tensor} x pipeline_parallel_size={chosen_pipeline} = "
                f"{chosen_tensor * chosen_pipeline} does not divide the world size {world_size}; with "
                f"tensor_parallel_size={chosen_tensor} use pipeline_parallel_size "
                f"{choices_text(divisors(world_size // chosen_tensor))}"
            )
        return cls(chosen_pipeline, world_size // (chosen_tensor * chosen_pipeline), chosen_tensor)


def _fill_auto(world_size: int, devices: int, tensor: SizeOrAuto, pipeline: SizeOrAuto) -> tuple[int, int]:
    """Tensor and pipeline sizes with every "auto" replaced."""
    if tensor == "auto" and pipeline == "auto":
        chosen = next(d for d in divisors(devices) if d * d >= devices)
        return chosen, devices // chosen
    if pipeline == "auto":
        return int(tensor), devices // int(tensor)
    if tensor == "auto":
        if devices % pipeline == 0:
            return devices // pipeline, pipeline
        # The chain leaves its node: the widest tensor group that still tiles the world, else none.
        fitting = [d for d in divisors(devices) if world_size % (d * pipeline) == 0]
        return max(fitting, default=1), pipeline
    return tensor, pipeline


def _check_world(world_size: int, devices_per_node: int) -> None:
    _check_size("world_size", world_size)
    _check_size("devices_per_node", devices_per_node)
    if world_size % devices_per_node:
        raise ValueError(
            f"world size {world_size} is not a whole number of nodes of {devices_per_node} devices; "
            f"use {world_size // devices_per_node * devices_per_node or devices_per_node} processes"
        )


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, such as 1, got {value!r}")


def _check_index(name: str, value: int, size: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise ValueError(f"{name} {value!r} is outside 0..{size - 1}")
