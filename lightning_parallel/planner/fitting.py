"""Pure: which splits fit the machines, and the fastest variant of a layout that does.

Another schedule than the usual 1F1B has to gain 1%, which is less than the figures tell apart. What is skipped is only
what something else beats. A bound from below on a variant's seconds must undercut the best one so far. With everything
else equal, recomputing less is never slower, so the least recomputation that fits is taken; except under ZeRO stage 3,
where what is recomputed hides the gathers. Memory grows with the micro-batch, so once a size does not fit in any
variant, no larger one does; except under ZeRO stage 2, which keeps whole gradients only while micro-batches add up.
Where a bound from below on its memory is more than there is, a variant does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_parallel.planner.cost import StepTime, least_seconds, pass_seconds, step_time
from lightning_parallel.planner.hardware import GIB
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.memory import (
    StageMemory,
    fullest_stage,
    host_bytes,
    least_bytes,
    memory_by_stage,
    worst_stage,
)
from lightning_parallel.planner.units import memory_text, plural, recompute_text, whole_memory_text
from lightning_parallel.planner.variants import micro_batches, orders, recomputes, sequence_parallelism

__all__ = [
    "USABLE_MEMORY",
    "WORTHWHILE",
    "Plan",
    "Rejected",
    "best_variant",
    "fits",
    "has_room",
    "may_undercut",
    "plan_of",
    "surely_too_large",
]

# Part of the memory that may be planned: the rest is for what the allocator and the driver do unasked.
USABLE_MEMORY = 0.96
# What is less than this part faster is not worth a schedule that keeps more, or another runtime.
WORTHWHILE = 0.01


@dataclass(frozen=True)
class Plan:
    """A split with its time and the memory of each stage."""

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


def plan_of(job: TrainingJob, split: Candidate) -> Plan:
    """All figures of a split.

    Raises:
        ValueError: the batch, the sequence, the heads or the blocks cannot be split that way.
    """
    host = host_bytes(job, split, job.cluster.gpus_per_node)
    return Plan(split, step_time(job, split), memory_by_stage(job, split), host)


def surely_too_large(job: TrainingJob, split: Candidate) -> bool:
    """Whether a split surely does not fit, whatever its schedule and what it recomputes."""
    return least_bytes(job, split) > _usable(job)


def fits(job: TrainingJob, split: Candidate, worst: StageMemory) -> bool:
    """Whether the GPUs hold the worst stage of a split, and the hosts what is offloaded."""
    return worst.total <= _usable(job) and not _host_lacks(job, split)


def has_room(job: TrainingJob, base: Candidate, fixed: Mapping[str, Any]) -> bool:
    """Whether any variant of a layout fits, whatever its time: the smallest micro-batch or the whole batch."""
    try:
        sizes = micro_batches(job, base, fixed)
        for size in sorted({*sizes[:1], *sizes[-1:]}):
            for variant, _ in _arranged(job, replace(base, micro_batch=size), fixed):
                if surely_too_large(job, variant):
                    continue
                for recompute in recomputes(fixed):
                    split = replace(variant, recompute=recompute)
                    worst = fullest_stage(job, split)
                    if fits(job, split, worst):
                        return True
                    if worst.states + job.cluster.gpu.context_gib * GIB > _usable(job):
                        return False  # of every variant
    except ValueError:
        return False
    return False


def may_undercut(job: TrainingJob, base: Candidate, fixed: Mapping[str, Any], limit: float) -> bool:
    """Whether a bound from below on the seconds of some variant of a layout is less than a limit."""
    try:
        return any(
            least_seconds(job, variant, whole) < limit
            for size in micro_batches(job, base, fixed)
            for variant, whole in _arranged(job, replace(base, micro_batch=size), fixed)
        )
    except ValueError:
        return False


def best_variant(job: TrainingJob, base: Candidate, fixed: Mapping[str, Any]) -> Plan | Rejected:
    """The fastest variant of one layout that fits, or why none does."""
    try:
        best, nearest = _search(job, base, fixed)
    except ValueError as error:
        first = (micro_batches(job, base, fixed) or [1])[0]
        return Rejected(replace(base, micro_batch=first), str(error))
    if best is not None:
        return plan_of(job, best)
    if nearest is None:
        batch = f"a global batch of {job.global_batch} does not split over {plural(base.data, 'data rank')}"
        return Rejected(base, f"{batch}; use a multiple of {base.data}")
    plan = plan_of(job, nearest)
    return Rejected(nearest, _too_much(job, plan), plan)


def _search(job: TrainingJob, base: Candidate, fixed: Mapping[str, Any]) -> tuple[Candidate | None, Candidate | None]:
    """The fastest variant that fits, and the one that lacks least."""
    best: Candidate | None = None
    nearest: Candidate | None = None
    seconds = least = float("inf")
    too_large = False
    for micro_batch in micro_batches(job, base, fixed):
        sized = replace(base, micro_batch=micro_batch)
        if too_large and not (sized.zero_stage == 2 and sized.micro_batches(job) == 1):
            continue
        any_fits = False
        for variant, whole in _arranged(job, sized, fixed):
            handicap = 1.0 if "schedule" in fixed or variant.schedule == "1f1b" else 1 / (1 - WORTHWHILE)
            if handicap * least_seconds(job, variant, whole) >= seconds:
                any_fits = True  # not looked at, so that nothing follows for larger ones
                continue
            for recompute in recomputes(fixed):
                split = replace(variant, recompute=recompute)
                worst = fullest_stage(job, split)
                if not fits(job, split, worst):
                    nearest, least = (split, worst.total) if worst.total < least else (nearest, least)
                    continue
                any_fits = True
                total = handicap * step_time(job, split).total
                best, seconds = (split, total) if total < seconds else (best, seconds)
                if split.zero_stage < 3:
                    break
        too_large |= not any_fits
    return best, nearest


def _arranged(job: TrainingJob, sized: Candidate, fixed: Mapping[str, Any]) -> Iterator[tuple[Candidate, float]]:
    """Variants of a micro-batch but for the recomputation, and the seconds of a pass."""
    for shared in sequence_parallelism(job, sized, fixed):
        arranged = replace(sized, sequence_parallel=shared)
        whole = pass_seconds(job, arranged)
        for variant in orders(job, arranged, fixed):
            yield variant, whole


def _usable(job: TrainingJob) -> float:
    return job.cluster.gpu.memory_gib * USABLE_MEMORY * GIB


def _too_much(job: TrainingJob, plan: Plan) -> str:
    """Why a plan does not fit."""
    worst, limit = plan.worst, _usable(job)
    if worst.total <= limit:
        return _host_lacks(job, plan.split)
    terms = sorted(((value, name) for name, value in worst.gib().items() if name != "total"), reverse=True)
    largest = ", ".join(f"{name.replace('_', ' ')} {memory_text(value * GIB)}" for value, name in terms[:2])
    stage = f" on stage {plan.stages.index(worst)}" if len(plan.stages) > 1 else ""
    counted = f"with micro-batches of {plan.split.micro_batch}, {recompute_text(plan.split.recompute)}"
    return f"needs {memory_text(worst.total)}{stage} {counted} ({largest}), usable are {memory_text(limit)}"


def _host_lacks(job: TrainingJob, split: Candidate) -> str:
    """What offloading needs beyond the memory and the disk of a node; empty when they suffice or are not known."""
    if split.offload == "none":
        return ""
    needed = host_bytes(job, split, job.cluster.gpus_per_node)
    for name, known, kind in (("offload", job.cluster.host_gib, "host memory"), ("nvme", job.cluster.nvme_gib, "NVMe")):
        if known and needed[name] / GIB > known:
            lacking = f"offloading needs {whole_memory_text(needed[name])} of {kind} per node"
            return f"{lacking}, there are {whole_memory_text(known * GIB)}"
    return ""
