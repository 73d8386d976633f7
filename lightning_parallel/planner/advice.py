"""Pure: the reason for the best split in a sentence or two, with its numbers."""

from __future__ import annotations

from dataclasses import replace

from lightning_parallel.planner.hardware import GIB
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.memory import memory_by_stage, worst_stage
from lightning_parallel.planner.nothing_fits import host_text, states_text, why_nothing_fits
from lightning_parallel.planner.search import USABLE_MEMORY, Plan, SearchResult
from lightning_parallel.planner.units import device_word, memory_text, plural, recompute_text

__all__ = ["advice"]


def advice(result: SearchResult) -> list[str]:
    """Sentences about the best plan, or about what would make the job fit."""
    best = result.plans[0] if result.plans else None
    without = next((plan for plan in result.plans if plan.split.offload == "none"), None)
    if best is None or (without is None and "offload" not in result.fixed):
        return why_nothing_fits(result)
    return [_why(result.job, best) if best is without else _offloading(best, without)]


def _offloading(plan: Plan, without: Plan | None) -> str:
    """What offloading takes, and what it is faster than where it was not given."""
    costs = f"takes {host_text(plan)} per node and {plan.time.offload:.3g} s of a step"
    if without is None:
        return f"Offloading as given {costs}."
    other, gain = without.split, without.time.total / plan.time.total - 1
    return (
        f"Offloading {costs}, and with the memory that it frees the step is {gain:.0%} "
        f"faster than the best without it: tensor {other.tensor} x pipeline {other.pipeline} x data {other.data}, "
        f"ZeRO-{other.zero_stage}, {without.time.total:.3g} s."
    )


def _why(job: TrainingJob, plan: Plan) -> str:
    split = plan.split
    alone = _alone(job, plan)
    if split.tensor * split.pipeline * split.context == 1 and split.zero_stage < 3:
        return _data_parallel(job, plan, alone)
    return " ".join([_one_device(job, alone, split), *_parts(job, plan)])


def _alone(job: TrainingJob, plan: Plan) -> float:
    """Bytes that one device would need for the whole model and one micro-batch, nothing sharded."""
    whole = replace(
        plan.split,
        tensor=1,
        pipeline=1,
        data=plan.split.world_size,
        context=1,
        micro_batch=1,
        zero_stage=0,
        virtual_stages=1,
        schedule="1f1b",
        sequence_parallel=False,
    )
    batch = replace(job, global_batch=whole.data)
    return worst_stage(memory_by_stage(batch, whole)).total


def _fits(job: TrainingJob, size: float) -> bool:
    return size <= USABLE_MEMORY * job.cluster.gpu.memory_gib * GIB


def _of(job: TrainingJob, size: float, split: Candidate) -> str:
    """What `_alone` counted of a device's memory, and what of."""
    memory = job.cluster.gpu.memory_gib * GIB
    kept = f", {1 - USABLE_MEMORY:.0%} of which are left free" if USABLE_MEMORY * memory < size <= memory else ""
    return (
        f"{memory_text(size)} of {memory_text(memory)} with micro-batches of 1, {recompute_text(split.recompute)}{kept}"
    )


def _data_parallel(job: TrainingJob, plan: Plan, alone: float) -> str:
    split, word = plan.split, device_word(job.cluster)
    whole = f"the whole model fits on one {word} ({_of(job, alone, split)})"
    if split.data == 1:
        return f"One {word} is all there is, and {whole}."
    waiting = f"gradients once a step ({plan.time.data / plan.time.total:.0%} of it is waiting for them)"
    head = f"Data parallel over {plural(split.data, word)}"
    if _fits(job, alone):
        return f"{head}: {whole}, so they only have to share {waiting}."
    sharded = "optimizer states" if split.zero_stage == 1 else "optimizer states and gradients"
    return (
        f"{head} with ZeRO-{split.zero_stage}: one {word} alone would need {_of(job, alone, split)}; "
        f"sharding the {sharded} leaves {memory_text(plan.worst.total)} on each, and they only share {waiting}."
    )


def _one_device(job: TrainingJob, alone: float, split: Candidate) -> str:
    word, counted = device_word(job.cluster), _of(job, alone, split)
    if _fits(job, alone):
        return f"One {word} could hold the model and its activations ({counted})."
    return f"One {word} cannot hold the model and its activations ({counted}): {states_text(job)}."


def _reach(job: TrainingJob, tensor: int) -> str:
    """Over which links a tensor group talks."""
    if tensor > job.cluster.link_domain:
        return "reaches across nodes, whose network has to"
    inside = tensor <= job.cluster.gpus_per_node
    return "stays inside the node, whose links" if inside else "stays over the domain whose links"


def _parts(job: TrainingJob, plan: Plan) -> list[str]:
    split, word = plan.split, device_word(job.cluster)
    reasons = []
    if split.tensor > 1:
        reasons.append(
            f"Tensor parallelism {split.tensor} {_reach(job, split.tensor)} carry its sums "
            f"({plan.time.tensor / plan.time.total:.0%} of the step is waiting for them)."
        )
    if split.pipeline > 1:
        reasons.append(
            f"{split.pipeline} pipeline stages send only activations to one another, at the price of an idle share "
            f"of {plan.time.bubble / plan.time.total:.0%}."
        )
    if split.context > 1:
        reasons.append(f"Each sequence is split over {plural(split.context, word)}, as given.")
    if split.zero_stage and split.data * split.context > 1:
        parts = ("optimizer states are", "optimizer states and gradients are", "weights, gradients and optimizer are")
        whole = " and gathered block by block" if split.zero_stage == 3 else ""
        reasons.append(
            f"The {parts[split.zero_stage - 1]} sharded over {plural(split.data * split.context, word)}{whole}."
        )
    if split.recompute != "none":
        reasons.append(f"The model has to recompute activations ({split.recompute}): switch on its checkpointing.")
    return reasons
