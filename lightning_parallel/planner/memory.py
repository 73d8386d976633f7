"""Pure: what every pipeline stage of a split keeps in GPU and host memory, term by term.

The states (weights, gradients, master weights, optimizer) are exact: they count the tensors that the code for shards
and partitions hands to each rank. Activations count what autograd keeps. The rest is estimated and listed apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from lightning_parallel.planner.activations import (
    block_bytes,
    boundary_bytes,
    factor_bytes,
    logit_bytes,
    passing_bytes,
)
from lightning_parallel.planner.hardware import GIB
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.stages import (
    ROUNDING,
    blocks_per_stage,
    fullest_moments,
    live_blocks,
    mean_parameters,
    stage_parameters,
)

__all__ = [
    "EXACT_TERMS",
    "StageMemory",
    "fullest_stage",
    "host_bytes",
    "host_states_by_stage",
    "least_bytes",
    "memory_by_stage",
    "worst_stage",
]

EXACT_TERMS = ("weights", "gradients", "master_weights", "optimizer")

# The part of the moving memory that the allocator cannot use.
FRAGMENTATION = 0.05
# Two buffers for collectives of gradients, of at most this many bytes together.
BUCKET_BYTES = 1.0 * GIB
# Blocks whose weights ZeRO-3 holds whole at one time: the running one and the next.
GATHERED_BLOCKS = 2


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank of one pipeline stage; the terms add up to ``total``."""

    weights: float
    gradients: float
    master_weights: float
    optimizer: float
    activations: float
    gathered: float
    working_set: float
    logits: float
    buckets: float
    overhead: float

    @property
    def total(self) -> float:
        """Bytes of all terms."""
        return float(sum(vars(self).values()))

    @property
    def states(self) -> float:
        """Bytes of the exact terms."""
        return float(sum(getattr(self, name) for name in EXACT_TERMS))

    def gib(self) -> dict[str, float]:
        """Every term and the total in GiB."""
        terms = {field.name: getattr(self, field.name) / GIB for field in fields(self)}
        return {"total": self.total / GIB, **terms}


def memory_by_stage(job: TrainingJob, split: Candidate) -> tuple[StageMemory, ...]:
    """Memory of the rank that holds most on every pipeline stage.

    Raises:
        ValueError: the batch, the heads or the blocks cannot be split that way.
    """
    loads, moving = _loads(job, split), _moving(job, split)
    last = split.pipeline - 1
    return tuple(_stage(job, split, load, moving, last=s == last) for s, load in enumerate(loads))


def fullest_stage(job: TrainingJob, split: Candidate) -> StageMemory:
    """The worst of `memory_by_stage` without the others: of stages with equal weights, the one that keeps most.

    Raises:
        ValueError: as there.
    """
    *others, end = _loads(job, split)
    moving = _moving(job, split)
    kept: dict[float, float] = {}
    for load in others:
        kept[load.held] = max(load.kept, kept.get(load.held, 0.0))
    stages = [_stage(job, split, _Load(held, most), moving, last=False) for held, most in kept.items()]
    return worst_stage((*stages, _stage(job, split, end, moving, last=True)))


def least_bytes(job: TrainingJob, split: Candidate) -> float:
    """A bound from below on the bytes of `fullest_stage`, for a part of its time.

    The mean of all stages: they hold the parameters together, and each keeps a micro-batch of its blocks at least. Full
    recomputation keeps least, and less than none of it passes. Buckets are left out, since they do not grow evenly.

    Raises:
        ValueError: the batch, the sequence or the heads cannot be split that way.
    """
    share = 1 / split.pipeline
    kept = block_bytes(job, replace(split, recompute="full")) * job.shape.layers * share
    moving = _Moving(passing_bytes(job, replace(split, recompute="none")), logit_bytes(job, split) * share)
    mean = _stage(job, split, _Load(mean_parameters(job.shape, split), kept), moving, last=True)
    return (mean.total - mean.buckets) * (1 - ROUNDING)


class _Load(NamedTuple):
    """Parameters of a stage, and bytes of activations that it keeps."""

    held: float
    kept: float


class _Moving(NamedTuple):
    """Bytes that come and go on every stage, and on the last one."""

    passing: float
    logits: float


def _loads(job: TrainingJob, split: Candidate) -> list[_Load]:
    micro_batches = split.micro_batches(job)
    blocks = blocks_per_stage(job.shape, split)
    boundary = boundary_bytes(job, split) * split.virtual_stages
    block = block_bytes(job, split)
    kept = [
        live * block + live / max(1, count) * boundary
        for live, count in zip(live_blocks(job.shape, split, micro_batches), blocks, strict=True)
    ]
    if split.schedule == "zero-bubble":
        kept = _kept_by_halves(job, split, kept, blocks)
    return [_Load(*load) for load in zip(stage_parameters(job.shape, split), kept, strict=True)]


def _kept_by_halves(job: TrainingJob, split: Candidate, kept: Sequence[float], blocks: Sequence[float]) -> list[float]:
    """Per stage, what first halves of backwards wait for, and what second ones do that are put off."""
    moments = fullest_moments(split.pipeline, split.micro_batches(job))
    factors = factor_bytes(job, split)
    return [
        max(live / first[0] * whole + waiting * count * factors for live, waiting in (first, second))
        for whole, count, (first, second) in zip(kept, blocks, moments, strict=True)
    ]


def _moving(job: TrainingJob, split: Candidate) -> _Moving:
    return _Moving(passing_bytes(job, split), logit_bytes(job, split))


def worst_stage(stages: tuple[StageMemory, ...]) -> StageMemory:
    """The stage that needs most."""
    return max(stages, key=lambda stage: stage.total)


def host_bytes(job: TrainingJob, split: Candidate, ranks_per_node: int) -> dict[str, float]:
    """Host memory of one node in bytes: while the model is built, and for what is offloaded; disk for NVMe.

    Each process starts with the weights of its own stage in 32 bit (``start``), or with all of them where it builds the
    whole model before that is split (``start_whole``); offloaded states are pinned.
    """
    parameters = max(stage_parameters(job.shape, split))
    host, disk = _offloaded(job, split, parameters)
    return {
        "start": ranks_per_node * parameters * 4.0,
        "start_whole": ranks_per_node * job.shape.parameters * 4.0,
        "offload": ranks_per_node * host,
        "nvme": ranks_per_node * disk,
    }


def host_states_by_stage(job: TrainingJob, split: Candidate) -> tuple[float, ...]:
    """Bytes of offloaded states that one rank of every pipeline stage keeps in host memory between steps."""
    return tuple(_offloaded(job, split, held)[0] for held in stage_parameters(job.shape, split))


def _ranks(split: Candidate, stage: int) -> int:
    return split.data * split.context if split.zero_stage >= stage else 1


def _offloaded(job: TrainingJob, split: Candidate, held: float) -> tuple[float, float]:
    """Bytes of one rank's states that lie in host memory and on disk, as `zero.memory.offloaded_bytes` has them.

    Gradients of its shards wait in host memory, at every stage and also beside disks; optimizer states and, in stage 3,
    weights are where the offload says.
    """
    if split.offload == "none":
        return 0.0, 0.0
    gradients = job.trainable * job.gradient_bytes / _ranks(split, 1)
    moved = job.trainable * (job.master_bytes + job.optimizer_bytes) / _ranks(split, 1)
    if split.zero_stage == 3:
        moved += job.weight_bytes / _ranks(split, 3)
    if split.offload == "nvme":
        return held * gradients, held * moved
    return held * (gradients + moved), 0.0


def _stage(job: TrainingJob, split: Candidate, load: _Load, moving: _Moving, *, last: bool) -> StageMemory:
    held, activations = load
    trained = held * job.trainable
    kept = dict.fromkeys(EXACT_TERMS, 1.0)
    if split.offload != "none":
        kept.update(master_weights=0.0, optimizer=0.0)
        kept["gradients"] = float(split.zero_stage < 2)
        kept["weights"] = float(split.zero_stage < 3)
    gradients = trained * job.gradient_bytes / _ranks(split, 2)
    working = moving.passing + trained * job.step_bytes / _ranks(split, 1)
    logits = moving.logits if last else 0.0
    gathered = 0.0
    if split.zero_stage == 2 and split.micro_batches(job) > 1:
        # Each rank sums its micro-batches before shards are summed over the ranks.
        gathered = trained * job.gradient_bytes - kept["gradients"] * gradients
    elif split.zero_stage == 3 and split.pipeline > 1:
        # Beside a pipeline, weights stay gathered and gradients whole until the last micro-batch.
        gathered = held * job.weight_bytes + trained * job.gradient_bytes
    elif split.zero_stage == 3:
        block = job.shape.local_parameters("block", split.tensor)
        ends = max(job.shape.local_parameters(part, split.tensor) for part in ("embedding", "head"))
        # The whole block is gathered, not its largest matrix; its gradients are whole until they are scattered.
        gathered = max(GATHERED_BLOCKS * block, block + ends) * job.weight_bytes + block * job.gradient_bytes
    whole = trained * job.gradient_bytes
    buckets = min(BUCKET_BYTES, whole) if split.data * split.context > 1 else 0.0
    return StageMemory(
        weights=kept["weights"] * held * job.weight_bytes / _ranks(split, 3),
        gradients=kept["gradients"] * gradients,
        master_weights=kept["master_weights"] * trained * job.master_bytes / _ranks(split, 1),
        optimizer=kept["optimizer"] * trained * job.optimizer_bytes / _ranks(split, 1),
        activations=activations,
        gathered=gathered,
        working_set=working,
        logits=logits,
        buckets=buckets,
        overhead=job.cluster.gpu.context_gib * GIB + FRAGMENTATION * (activations + gathered + working + logits),
    )
