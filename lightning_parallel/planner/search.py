"""Pure: every way to split a job over its GPUs, the ones that fit, and the fastest of them.

What is skipped is only what another candidate beats on both counts. With everything else equal, recomputing less is
never slower, so the least recomputation that fits is taken; and memory grows with the micro-batch, so once a size does
not fit with full recomputation no larger one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_parallel.layout import choices_text, divisors
from lightning_parallel.planner.cost import StepTime, step_time
from lightning_parallel.planner.hardware import GIB
from lightning_parallel.planner.job import RECOMPUTES, Candidate, Recompute, TrainingJob
from lightning_parallel.planner.memory import StageMemory, host_bytes, memory_by_stage, worst_stage
from lightning_parallel.planner.units import device_word, memory_text, plural

__all__ = ["FIXABLE", "Plan", "Rejected", "SearchResult", "rank_layouts", "search"]

# Part of the memory that may be planned: the rest is for what the allocator and the driver do unasked.
USABLE_MEMORY = 0.96
LARGEST_MICRO_BATCH = 16

FIXABLE = (
    "tensor",
    "pipeline",
    "data",
    "context",
    "micro_batch",
    "zero_stage",
    "offload",
    "schedule",
    "virtual_stages",
    "recompute",
    "sequence_parallel",
    "balance",
)
"""Fields of a candidate that a user may fix."""


@dataclass(frozen=True)
class Plan:
    """A split that fits, with its time and the memory of each stage."""

    split: Candidate
    time: StepTime
    stages: tuple[StageMemory, ...]
    host: Mapping[str, float]

    @property
    def worst(self) -> StageMemory:
        """The stage that needs most."""
        return worst_stage(self.stages)


@dataclass(frozen=True)
class Rejected:
    """A split that is not proposed, why, and what is known about it."""

    split: Candidate
    reason: str
    plan: Plan | None = None


@dataclass(frozen=True)
class SearchResult:
    """``plans`` fastest first, at most one per layout, ZeRO stage and offload; every other layout in ``rejected``.

    ``fixed`` is what was given, and searched in no other way.
    """

    job: TrainingJob
    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)


def search(job: TrainingJob, fixed: Mapping[str, Any] | None = None) -> SearchResult:
    """The splits of ``job`` over all its GPUs, with some fields of the candidate ``fixed``.

    Offload to the host is tried only when nothing fits without it, or when it is fixed; it comes with ZeRO.

    Raises:
        ValueError: a fixed field that no candidate has, or sizes that do not multiply to the number of GPUs.
    """
    given = dict(fixed or {})
    unknown = sorted(set(given) - set(FIXABLE))
    if unknown:
        raise ValueError(f"{', '.join(unknown)} cannot be fixed; use {', '.join(FIXABLE)}")
    result = replace(rank_layouts(job, {"offload": "none", **given}), fixed=given)
    if not result.plans and not result.rejected:
        raise ValueError(_no_layout(job, given))
    if result.plans or "offload" in given or given.get("zero_stage") == 0:
        return result
    for offload in ("cpu", "nvme"):
        moved = rank_layouts(job, {**given, "offload": offload})
        if moved.plans:
            return replace(moved, rejected=moved.rejected + result.rejected, fixed=given)
    return result


def rank_layouts(job: TrainingJob, fixed: Mapping[str, Any]) -> SearchResult:
    """The search with ``offload`` among the fixed fields; it may find no layout at all."""
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    for base in _layouts(job, fixed):
        found = _best(job, base, fixed)
        if isinstance(found, Plan):
            plans.append(found)
        else:
            rejected.append(found)
    return SearchResult(job, tuple(sorted(plans, key=lambda plan: plan.time.total)), tuple(rejected))


def _layouts(job: TrainingJob, fixed: Mapping[str, Any]) -> Iterator[Candidate]:
    """Sizes, ZeRO stage and schedule of every layout that fills the GPUs."""
    gpus, domain = job.cluster.gpus, job.cluster.link_domain
    tensors = (
        [fixed["tensor"]] if "tensor" in fixed else [t for t in divisors(gpus) if t <= min(domain, job.shape.heads)]
    )
    virtual = fixed.get("virtual_stages", 1)
    schedule = fixed.get("schedule", "interleaved" if virtual > 1 else "1f1b")
    context = fixed.get("context", 1)
    for tensor in tensors:
        pipelines = [fixed["pipeline"]] if "pipeline" in fixed else divisors(gpus)
        for pipeline in pipelines:
            if pipeline > job.shape.layers and "pipeline" not in fixed:
                continue
            data, rest = divmod(gpus, tensor * pipeline * context)
            if rest or not data or fixed.get("data", data) != data:
                continue
            stages = (
                [fixed["zero_stage"]]
                if "zero_stage" in fixed
                else _zero_stages(data * context, tensor * pipeline, fixed["offload"])
            )
            for zero_stage in stages:
                yield Candidate(
                    tensor=tensor,
                    pipeline=pipeline,
                    data=data,
                    context=context,
                    zero_stage=zero_stage,
                    offload=fixed["offload"],
                    schedule=schedule,
                    virtual_stages=virtual,
                    sequence_parallel=fixed.get("sequence_parallel", tensor > 1),
                    balance=fixed.get("balance", "parameters"),
                )


def _zero_stages(replicas: int, model_ranks: int, offload: str) -> tuple[int, ...]:
    """ZeRO stages worth a look: none without replicas, and stage 3 only where a strategy runs it."""
    if offload != "none":
        # A single replica shards over itself.
        return (2, 3) if model_ranks == 1 else (2,)
    if replicas == 1:
        return (0,)
    return (0, 1, 2, 3) if model_ranks == 1 else (0, 1, 2)


def _best(job: TrainingJob, base: Candidate, fixed: Mapping[str, Any]) -> Plan | Rejected:
    """The fastest micro-batch and recomputation of one layout that fits, or why none does."""
    best: Plan | None = None
    nearest: Plan | None = None
    recomputes: tuple[Recompute, ...] = (fixed["recompute"],) if "recompute" in fixed else RECOMPUTES
    for micro_batch in _micro_batches(job, base, fixed):
        fits = False
        for recompute in recomputes:
            split = replace(base, micro_batch=micro_batch, recompute=recompute)
            try:
                plan = _plan(job, split)
            except ValueError as error:
                return Rejected(split, str(error))
            if not _too_much(job, plan):
                fits = True
                if best is None or plan.time.total < best.time.total:
                    best = plan
                break
            if nearest is None or plan.worst.total < nearest.worst.total:
                nearest = plan
        if not fits:
            break
    if best is not None:
        return best
    if nearest is None:
        batch = f"a global batch of {job.global_batch} does not split over {plural(base.data, 'data rank')}"
        return Rejected(base, f"{batch}; use a multiple of {base.data}")
    return Rejected(nearest.split, _too_much(job, nearest), nearest)


def _micro_batches(job: TrainingJob, base: Candidate, fixed: Mapping[str, Any]) -> list[int]:
    if "micro_batch" in fixed:
        return [fixed["micro_batch"]]
    per_replica, rest = divmod(job.global_batch, base.data)
    return [] if rest or not per_replica else [b for b in divisors(per_replica) if b <= LARGEST_MICRO_BATCH]


def _plan(job: TrainingJob, split: Candidate) -> Plan:
    stages = memory_by_stage(job, split)
    host = host_bytes(job, split, job.cluster.gpus_per_node)
    return Plan(split, step_time(job, split), stages, host)


def _too_much(job: TrainingJob, plan: Plan) -> str:
    """Why a plan does not fit; empty when it does."""
    worst, limit = plan.worst, job.cluster.gpu.memory_gib * USABLE_MEMORY * GIB
    if worst.total > limit:
        terms = sorted(((value, name) for name, value in worst.gib().items() if name != "total"), reverse=True)
        largest = ", ".join(f"{name.replace('_', ' ')} {memory_text(value * GIB)}" for value, name in terms[:2])
        stage = f" on stage {plan.stages.index(worst)}" if len(plan.stages) > 1 else ""
        return f"needs {memory_text(worst.total)}{stage} ({largest}), usable are {memory_text(limit)}"
    host, known = plan.host["offload"] / GIB, job.cluster.host_gib
    if known and host > known:
        return f"offloading needs {host:.0f} GiB of host memory per node, there are {known:.0f} GiB"
    disk, known = plan.host["nvme"] / GIB, job.cluster.nvme_gib
    if known and disk > known:
        return f"offloading needs {disk:.0f} GiB of NVMe per node, there are {known:.0f} GiB"
    return ""


def _no_layout(job: TrainingJob, fixed: Mapping[str, Any]) -> str:
    sizes = {name: fixed[name] for name in ("tensor", "pipeline", "data", "context") if name in fixed}
    text = " x ".join(f"{name}={size}" for name, size in sizes.items())
    gpus = job.cluster.gpus
    word = device_word(job.cluster)
    if len(sizes) == 1:
        return f"{text} does not fill the {plural(gpus, word)}; use {choices_text(divisors(gpus)[:16])}"
    return f"{text} does not fill the {plural(gpus, word)}; use sizes whose product divides {gpus}"
