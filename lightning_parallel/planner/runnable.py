"""Pure: what a split needs that no strategy of Lightning or of this package does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_parallel.pipeline.schedules import SCHEDULE_NAMES
from lightning_parallel.planner.job import ON_REQUEST, Candidate, TrainingJob
from lightning_parallel.planner.precisions import keeps_masters
from lightning_parallel.planner.stages import blocks_per_stage
from lightning_parallel.planner.units import device_word, plural

__all__ = ["FSDP_SHARDINGS", "missing", "not_planned", "unrunnable"]

FSDP_SHARDINGS = {2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}


def missing(job: TrainingJob, split: Candidate) -> Mapping[str, str]:
    """What a split needs and nothing here does, by kind: what it is in words. Empty when a strategy runs the split."""
    found = {}
    node = job.cluster.gpus_per_node
    if node % split.tensor:
        found["nodes"] = f"tensor groups of {split.tensor} over nodes of {plural(node, device_word(job.cluster))}"
    if split.context > 1:
        found["context"] = f"sequences split over {split.context} ranks (context parallelism)"
    if split.tensor * split.pipeline > 1 and split.zero_stage == 3:
        beside = " and ".join(name for name in ("tensor", "pipeline") if getattr(split, name) > 1)
        found["zero_3"] = f"ZeRO-3 beside {beside} parallelism"
    if split.pipeline > 1 and split.schedule not in SCHEDULE_NAMES:
        chunks = f" with {split.virtual_stages} virtual stages" if split.virtual_stages > 1 else ""
        found[f"schedule {split.schedule}"] = f"the schedule {split.schedule}{chunks}"
    if _cut_otherwise(job, split):
        found["balance"] = "stages of equal numbers of blocks"
    if _bare_shards(job, split):
        found["states"] = f"ZeRO-{split.zero_stage} without 32-bit copies of weights"
    return found


def not_planned(job: TrainingJob, split: Candidate, fixed: Mapping[str, Any]) -> Mapping[str, str]:
    """What keeps a split from being planned: `missing`, and a schedule that is taken only where it is given."""
    found = dict(missing(job, split))
    if split.pipeline > 1 and split.schedule in ON_REQUEST and fixed.get("schedule") != split.schedule:
        found[f"schedule {split.schedule}"] = f"schedule={split.schedule!r}, which is planned where it is given"
    return found


def _cut_otherwise(job: TrainingJob, split: Candidate) -> bool:
    """Whether the stages are others than strategies here cut, which weigh blocks by their parameters."""
    if split.balance != "even" or not 1 < split.pipeline <= job.shape.layers or split.virtual_stages > 1:
        return False
    return blocks_per_stage(job.shape, split) != blocks_per_stage(job.shape, replace(split, balance="parameters"))


def _bare_shards(job: TrainingJob, split: Candidate) -> bool:
    """Whether 16-bit states without 32-bit copies are to be sharded, which of all strategies FSDP does."""
    if not (job.narrow and job.states == "true" and keeps_masters(split)):
        return False
    model_ranks = split.tensor * split.pipeline * split.context
    return model_ranks > 1 or split.zero_stage not in FSDP_SHARDINGS or split.offload != "none"


def unrunnable(job: TrainingJob, split: Candidate) -> str:
    """Why no strategy runs a split; empty when one does."""
    found = missing(job, split)
    if not found:
        return ""
    advice = "; use --states mixed" if list(found) == ["states"] else ""
    return f"no strategy here runs {' and '.join(found.values())}{advice}"
