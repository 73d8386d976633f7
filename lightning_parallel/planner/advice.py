"""Pure: the reason for the best split in a sentence or two, with its numbers."""

from __future__ import annotations

from dataclasses import replace

from lightning_parallel.planner.hardware import GIB
from lightning_parallel.planner.job import TrainingJob
from lightning_parallel.planner.search import Plan, SearchResult, search

__all__ = ["advice"]

MOST_NODES = 64
# Part of the parameters that adapters of rank 8 or 16 usually train.
ADAPTERS = 0.005


def advice(result: SearchResult) -> list[str]:
    """Sentences about the best plan, or about what would make the job fit."""
    job = result.job
    states = job.weight_bytes + job.gradient_bytes + job.master_bytes + job.optimizer_bytes
    size = job.shape.parameters * states
    usable = job.cluster.gpu.memory_gib
    need = (
        f"weights, gradients and optimizer take {states:.0f} bytes x {job.shape.parameters / 1e9:.3g}e9 parameters = "
        f"{size / 1e9:.0f} GB, {size / job.cluster.gpus / GIB:.1f} GiB per GPU if split over all {job.cluster.gpus}"
    )
    best = result.plans[0] if result.plans else None
    if best is None or best.split.offload != "none":
        return [f"Nothing fits without offloading: {need}; a GPU has {usable:.1f} GiB.", *_ways_out(job, best)]
    return [_why(job, best, need)]


def _why(job: TrainingJob, plan: Plan, need: str) -> str:
    split = plan.split
    if split.tensor * split.pipeline == 1 and split.zero_stage < 3:
        return (
            f"Data parallel over {split.data} GPUs: the whole model fits on one GPU "
            f"({plan.worst.total / GIB:.1f} of {job.cluster.gpu.memory_gib:.1f} GiB), so GPUs only have to share "
            f"gradients once a step ({plan.time.data / plan.time.total:.0%} of it is waiting for them)."
        )
    reasons = [f"One GPU cannot hold the model: {need}."]
    if split.tensor > 1:
        place = (
            "inside the node, whose links"
            if split.tensor <= job.cluster.gpus_per_node
            else "over the domain whose links"
        )
        reasons.append(
            f"Tensor parallelism {split.tensor} stays {place} carry its sums ({plan.time.tensor / plan.time.total:.0%} "
            "of the step is waiting for them)."
        )
    if split.pipeline > 1:
        reasons.append(
            f"{split.pipeline} pipeline stages send only activations over the network, at the price of an idle share "
            f"of {plan.time.bubble / plan.time.total:.0%}."
        )
    if split.zero_stage == 3:
        reasons.append(f"The states are sharded over {split.data * split.context} GPUs and gathered block by block.")
    if split.recompute != "none":
        reasons.append(f"The model has to recompute activations ({split.recompute}): switch on its checkpointing.")
    return " ".join(reasons)


def _ways_out(job: TrainingJob, offloading: Plan | None) -> list[str]:
    sentences = []
    if offloading is not None:
        host = offloading.host["offload" if offloading.split.offload == "cpu" else "nvme"] / GIB
        kind = "host memory" if offloading.split.offload == "cpu" else "NVMe"
        sentences.append(
            f"ZeRO-{offloading.split.zero_stage} with offload fits: it needs {host:.0f} GiB of {kind} per node and "
            f"takes {offloading.time.total:.3g} s per step."
        )
    for nodes in range(job.cluster.nodes + 1, MOST_NODES + 1):
        larger = replace(job, cluster=replace(job.cluster, nodes=nodes), global_batch=job.global_batch * nodes)
        found = search(larger, {"offload": "none"}).plans
        if found:
            split = found[0].split
            sentences.append(
                f"Without offloading it needs at least {nodes} nodes: tensor {split.tensor} x pipeline "
                f"{split.pipeline} x data {split.data}, ZeRO-{split.zero_stage}, "
                f"{found[0].worst.total / GIB:.1f} GiB per GPU."
            )
            break
    sentences.append(_adapters(job))
    return sentences


def _adapters(job: TrainingJob) -> str:
    """Whether training adapters only would fit."""
    weights = job.shape.parameters * job.weight_bytes
    plans = search(replace(job, trainable=ADAPTERS), {"offload": "none"}).plans
    if not plans:
        return (
            f"Adapters (LoRA) alone do not help: the frozen weights take {weights / 1e9:.0f} GB in 16 bit; "
            "they would have to be quantized as well."
        )
    split = plans[0].split
    return (
        f"Adapters (LoRA, {ADAPTERS:.1%} of the parameters trained) fit: tensor {split.tensor} x pipeline "
        f"{split.pipeline} x data {split.data}, {plans[0].worst.total / GIB:.1f} GiB per GPU."
    )
