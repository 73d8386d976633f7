"""Pure: the arithmetic of collectives and sharding, worked through on small numbers.

The collectives are played on plain lists; what is said about models comes from the functions that plan them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_parallel.planner.hardware import Cluster
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.links import Group, all_reduce_seconds
from lightning_parallel.planner.memory import memory_by_stage
from lightning_parallel.planner.stages import stage_parameters
from lightning_parallel.planner.typical import typical_shape
from lightning_parallel.tensor_parallel.sharding import ShardSpec, split_even

__all__ = [
    "Ring",
    "RingStep",
    "Wire",
    "ZeroRow",
    "collectives",
    "ring_all_reduce",
    "split_product",
    "wires",
    "zero_rows",
]

Vector = tuple[float, ...]
Vectors = tuple[Vector, ...]


@dataclass(frozen=True)
class RingStep:
    """One step: every rank sends one chunk to the next rank. ``sends`` are (sender, receiver, chunk)."""

    phase: str
    sends: tuple[tuple[int, int, int], ...]
    complete: tuple[tuple[int, ...], ...]
    """Per rank, the chunks that hold the sum over all ranks after the step."""


@dataclass(frozen=True)
class Ring:
    """A played ring all-reduce: its steps and what every rank holds at the end."""

    ranks: int
    steps: tuple[RingStep, ...]
    result: Vectors

    @property
    def sends(self) -> int:
        """Messages of all ranks."""
        return sum(len(step.sends) for step in self.steps)

    @property
    def share(self) -> float:
        """Bytes that one rank sends as a part of the vector: 2 (n - 1) / n."""
        return sum(send[0] == 0 for step in self.steps for send in step.sends) / self.ranks


def ring_all_reduce(vectors: Sequence[Sequence[float]]) -> Ring:
    """Sums one vector per rank around a ring, chunk by chunk: reduce-scatter, then all-gather.

    In step s of the first phase rank r sends chunk r - s to rank r + 1, which adds it; in the second it sends chunk
    r + 1 - s, which is complete (Patarasuk and Yuan 2009).

    >>> ring = ring_all_reduce([[1, 2], [10, 20]])
    >>> ring.result, ring.sends, ring.share
    (((11.0, 22.0), (11.0, 22.0)), 4, 1.0)

    Raises:
        ValueError: fewer than two ranks, or vectors that are not one number per rank.
    """
    n = len(vectors)
    if n < 2 or any(len(vector) != n for vector in vectors):
        raise ValueError(f"a ring needs at least 2 ranks with a vector of one number per rank each, got {n} ranks")
    held = [[float(value) for value in vector] for vector in vectors]
    parts = [[{rank} for _ in range(n)] for rank in range(n)]
    steps = []
    for phase, first in (("reduce-scatter", 0), ("all-gather", 1)):
        for step in range(n - 1):
            sends = tuple((rank, (rank + 1) % n, (rank + first - step) % n) for rank in range(n))
            moving = [(held[a][chunk], parts[a][chunk]) for a, _, chunk in sends]
            for (_, receiver, chunk), (value, summed) in zip(sends, moving, strict=True):
                held[receiver][chunk] = value if first else held[receiver][chunk] + value
                parts[receiver][chunk] = set(summed) if first else parts[receiver][chunk] | summed
            complete = tuple(tuple(c for c in range(n) if len(parts[rank][c]) == n) for rank in range(n))
            steps.append(RingStep(phase, sends, complete))
    return Ring(n, tuple(steps), tuple(map(tuple, held)))


def collectives(vectors: Sequence[Sequence[float]]) -> dict[str, Vectors]:
    """What every rank holds after each collective on one vector per rank (rank 0 is the root).

    >>> after = collectives([[1, 2], [10, 20]])
    >>> after["reduce_scatter"], after["all_gather"][1]
    (((11.0,), (22.0,)), (1.0, 2.0, 10.0, 20.0))

    Raises:
        ValueError: vectors that are not one number per rank.
    """
    n = len(vectors)
    if not n or any(len(vector) != n for vector in vectors):
        raise ValueError(f"the example needs one number per rank on every rank, got {n} ranks")
    values: Vectors = tuple(tuple(map(float, vector)) for vector in vectors)
    total = tuple(map(sum, zip(*values, strict=True)))
    everything = tuple(number for vector in values for number in vector)
    return {
        "broadcast": (values[0],) * n,
        "scatter": tuple((number,) for number in values[0]),
        "reduce": (total, *values[1:]),
        "all_gather": (everything,) * n,
        "reduce_scatter": tuple((number,) for number in total),
        "all_reduce": (total,) * n,
    }


@dataclass(frozen=True)
class ZeroRow:
    """Bytes of model states on one rank at one ZeRO stage."""

    stage: int
    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All states."""
        return self.weights + self.gradients + self.optimizer


def zero_rows(parameters: float, ranks: int, cluster: Cluster) -> tuple[ZeroRow, ...]:
    """Model states per rank for every ZeRO stage, mixed precision and Adam (Rajbhandari et al. 2020, figure 1)."""
    job = TrainingJob(typical_shape(parameters), cluster, ranks)
    rows = []
    for stage in range(4):
        (memory,) = memory_by_stage(job, Candidate(data=ranks, zero_stage=stage))
        rows.append(ZeroRow(stage, memory.weights, memory.gradients, memory.master_weights + memory.optimizer))
    return tuple(rows)


@dataclass(frozen=True)
class SplitProduct:
    """Y = X A B with A cut into columns and B into rows: what each tensor rank computes, and the sum."""

    columns: ShardSpec
    rows: ShardSpec
    partial: Vectors
    total: Vector


def split_product(ranks: int) -> SplitProduct:
    """The MLP of Megatron (Shoeybi et al. 2019) on small whole numbers, cut as the layers here are.

    Raises:
        ValueError: ``ranks`` does not divide the 4 columns of the example.
    """
    x, a = (1.0, 2.0), ((1.0, 0.0, 2.0, 1.0), (0.0, 1.0, 1.0, 2.0))
    b = ((1.0, 2.0), (0.0, 1.0), (2.0, 0.0), (1.0, 1.0))
    columns, rows = split_even(1, 4, ranks, what="column count"), split_even(0, 4, ranks, what="row count")
    inner = [sum(x[i] * a[i][j] for i in range(2)) for j in range(4)]
    partial = []
    for rank in range(ranks):
        own = [index for segment in columns.parts[rank] for index in range(segment.start, segment.stop)]
        partial.append(tuple(sum(inner[j] * b[j][k] for j in own) for k in range(2)))
    return SplitProduct(columns, rows, tuple(partial), tuple(map(sum, zip(*partial, strict=True))))


@dataclass(frozen=True)
class Wire:
    """One kind of traffic in a step: bytes that a rank sums, and seconds over fast links and over the network."""

    kind: str
    size: float
    inside: float
    across: float


def wires(job: TrainingJob, split: Candidate) -> tuple[Wire, ...]:
    """What tensor and data parallelism send in one step, and what it would cost on either wire."""
    micro_batches = split.micro_batches(job)
    activation = split.micro_batch_tokens(job) * job.shape.hidden * job.residual_bytes
    # Two sums forward and two backward in every block of a stage.
    often = 4 * micro_batches * job.shape.layers / split.pipeline
    gradients = max(stage_parameters(job.shape, split)) * job.gradient_bytes
    found = []
    for kind, ranks, size, times in (("tensor", split.tensor, activation, often), ("data", split.data, gradients, 1.0)):
        near = all_reduce_seconds(job.cluster, Group(ranks, ranks), size)
        far = all_reduce_seconds(job.cluster, Group(ranks, 1), size)
        found.append(Wire(kind, size * times, near * times, far * times))
    return tuple(found)
