"""Pure: every way to split a job over its GPUs, the ones that fit, and the fastest of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from lightning_parallel.planner.beyond import Beyond, faster_elsewhere
from lightning_parallel.planner.fitting import (
    USABLE_MEMORY,
    WORTHWHILE,
    Plan,
    Rejected,
    best_variant,
    has_room,
    may_undercut,
)
from lightning_parallel.planner.given import no_layout_text, refuse_unknown
from lightning_parallel.planner.job import TrainingJob
from lightning_parallel.planner.runnable import missing, unrunnable
from lightning_parallel.planner.variants import group_sizes, only_pipelines, wide_tensors, zero_stages

__all__ = [
    "USABLE_MEMORY",
    "Beyond",
    "Plan",
    "Rejected",
    "SearchResult",
    "anything_fits",
    "rank_layouts",
    "runnable_layouts",
    "search",
]


@dataclass(frozen=True)
class SearchResult:
    """``plans`` fastest first, at most one per layout, ZeRO stage and offload; every other layout in ``rejected``.

    A strategy runs each plan, unless nothing that one runs fits or agrees with what is ``fixed``. ``beyond`` are splits
    that are faster and that no strategy runs, the fastest first.
    """

    job: TrainingJob
    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    beyond: tuple[Beyond, ...] = ()


def search(job: TrainingJob, fixed: Mapping[str, Any] | None = None) -> SearchResult:
    """The splits of ``job`` over all its GPUs, with some fields of the candidate ``fixed``.

    Offload to the host is proposed only where it is faster by 1% than all that fits without it, or where nothing does;
    it comes with ZeRO, and the disks are looked at only where the host's memory is no help. Tensor groups reach beyond
    the fast links only when nothing fits otherwise, or when they are fixed. With a schedule given, pipelines only are
    looked at.

    Raises:
        ValueError: a fixed field or value that no candidate has, or sizes that do not multiply to the number of GPUs.
    """
    given = dict(fixed or {})
    refuse_unknown(given)
    result = _with_offload_where_it_helps(job, given)
    if not result.plans and "tensor" not in given:
        across = _across_nodes(job, given)
        result = replace(across, rejected=across.rejected + result.rejected) if across else result
    offload = result.plans[0].split.offload if result.plans else given.get("offload", "none")
    limit = result.plans[0].time.total if result.plans else inf
    beyond = faster_elsewhere(job, {**given, "offload": offload}, limit)
    return replace(result, fixed=given, beyond=beyond)


def _with_offload_where_it_helps(job: TrainingJob, given: dict[str, Any]) -> SearchResult:
    result = runnable_layouts(job, {"offload": "none", **given})
    if not result.plans and not result.rejected:
        raise ValueError(no_layout_text(job.cluster, given))
    if "offload" in given or _cannot_move(job, given):
        return result
    if result.plans:
        limit = result.plans[0].time.total * (1 - WORTHWHILE)
        faster = _undercutting(job, {**given, "offload": "cpu"}, limit)
        faster = faster or _undercutting(job, {**given, "offload": "nvme"}, limit)
        return replace(result, plans=(*faster, *result.plans))
    for offload in ("cpu", "nvme"):
        moved = runnable_layouts(job, {**given, "offload": offload})
        if moved.plans:
            return replace(moved, rejected=moved.rejected + result.rejected)
    return result


def _cannot_move(job: TrainingJob, given: Mapping[str, Any]) -> bool:
    """Whether there are no shards, or no other memory than that of the host, for an offload to move."""
    return given.get("zero_stage") == 0 or job.cluster.gpu.is_host


def _undercutting(job: TrainingJob, fixed: dict[str, Any], limit: float) -> list[Plan]:
    """Plans that a strategy runs in fewer seconds than the limit, the fastest first."""
    found = [
        best_variant(job, base, fixed)
        for sizes in group_sizes(job, fixed)
        if sizes.pipeline > 1 or not only_pipelines(fixed)
        for base in (replace(sizes, zero_stage=stage) for stage in zero_stages(sizes, fixed))
        if may_undercut(job, base, fixed, limit)
    ]
    plans = [plan for plan in found if isinstance(plan, Plan) and not missing(job, plan.split)]
    return sorted((p for p in plans if p.time.total < limit), key=lambda plan: plan.time.total)


def _across_nodes(job: TrainingJob, given: dict[str, Any]) -> SearchResult | None:
    """Layouts with tensor groups over slow links, with as little offload as it takes; None if nothing fits even so."""
    kinds = ["none"] if _cannot_move(job, given) else ["none", "cpu", "nvme"]
    for offload in [given["offload"]] if "offload" in given else kinds:
        choices = [{**given, "offload": offload, "tensor": tensor} for tensor in wide_tensors(job)]
        found = [runnable_layouts(job, fixed) for fixed in choices if anything_fits(job, fixed)]
        plans = sorted((plan for result in found for plan in result.plans), key=lambda plan: plan.time.total)
        if plans:
            return SearchResult(job, tuple(plans), tuple(entry for result in found for entry in result.rejected))
    return None


def runnable_layouts(job: TrainingJob, fixed: Mapping[str, Any]) -> SearchResult:
    """`rank_layouts` without what no strategy runs, unless the fixed fields leave nothing else."""
    result = rank_layouts(job, fixed)
    splits = [*(plan.split for plan in result.plans), *(entry.split for entry in result.rejected)]
    if only_pipelines(fixed):
        splits = [split for split in splits if split.pipeline > 1]
    as_given = all(missing(job, split) for split in splits)
    kept = set(splits)
    plans = [plan for plan in result.plans if plan.split in kept]
    rejected = [entry for entry in result.rejected if entry.split in kept]
    if not as_given:
        rejected += [Rejected(p.split, why) for p in plans if (why := unrunnable(job, p.split))]
        plans = [plan for plan in plans if not missing(job, plan.split)]
    return replace(result, plans=tuple(plans), rejected=tuple(rejected))


def anything_fits(job: TrainingJob, fixed: Mapping[str, Any]) -> bool:
    """Whether `rank_layouts` would find a plan, in a part of its time."""
    return any(
        has_room(job, replace(sizes, zero_stage=stage), fixed)
        for sizes in group_sizes(job, fixed)
        for stage in zero_stages(sizes, fixed)
    )


def rank_layouts(job: TrainingJob, fixed: Mapping[str, Any]) -> SearchResult:
    """The search with ``offload`` among the fixed fields; it may find no layout at all."""
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    for sizes in group_sizes(job, fixed):
        for stage in zero_stages(sizes, fixed):
            found = best_variant(job, replace(sizes, zero_stage=stage), fixed)
            if isinstance(found, Plan):
                plans.append(found)
            else:
                rejected.append(found)
    return SearchResult(job, tuple(sorted(plans, key=lambda plan: plan.time.total)), tuple(rejected))
