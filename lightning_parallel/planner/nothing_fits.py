"""Pure: why no layout of a job fits, and values that are tried out and work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lightning_parallel.planner.hardware import GIB
from lightning_parallel.planner.job import TrainingJob
from lightning_parallel.planner.memory import EXACT_TERMS
from lightning_parallel.planner.search import USABLE_MEMORY, Plan, SearchResult, anything_fits, runnable_layouts
from lightning_parallel.planner.units import device_word, memory_text, plural, whole_memory_text

__all__ = ["host_text", "states_text", "why_nothing_fits"]

MOST_NODES = 64
# Numbers of nodes on which something would fit, but no strategy runs it, before that is taken for the rule.
MOST_MISSES = 6
# Part of the parameters that adapters of rank 8 or 16 usually train.
ADAPTERS = 0.005
_OPTIONS = {"tensor": "tp", "pipeline": "pp", "data": "dp", "context": "cp", "zero_stage": "zero"}


def states_text(job: TrainingJob) -> str:
    """What weights, gradients and optimizer take, and each device's part of it."""
    states = job.weight_bytes + job.gradient_bytes + job.master_bytes + job.optimizer_bytes
    size, devices, word = job.shape.parameters * states, job.cluster.gpus, device_word(job.cluster)
    each = f", {memory_text(size / devices)} per {word} if split over all {devices}" if devices > 1 else ""
    return (
        f"weights, gradients and optimizer take {states:.0f} bytes x {_count_text(job.shape.parameters)} parameters = "
        f"{_decimal_text(size)}{each}"
    )


def _count_text(parameters: int) -> str:
    if parameters < 1e9:
        return f"{parameters:,}"
    return f"{parameters / 1e9:.3g}e9" if parameters < 1e12 else f"{parameters:.3g}"


def _decimal_text(size: float) -> str:
    """Bytes in thousands, as parameters are counted."""
    for unit, one in (("GB", 1e9), ("MB", 1e6)):
        if size >= 10 * one:
            return f"{size / one:.0f} {unit}"
    return f"{size / 1e3:.0f} kB"


def why_nothing_fits(result: SearchResult) -> list[str]:
    """Sentences: the cause, then what would help."""
    known = [(entry.plan, entry.reason) for entry in result.rejected if entry.plan is not None]
    if not known:
        return [_cannot_split(result), *_remedies(result)]
    nearest, reason = min(known, key=lambda pair: pair[0].worst.total)
    usable = USABLE_MEMORY * result.job.cluster.gpu.memory_gib * GIB
    if "offload" in result.fixed and nearest.worst.total <= usable:
        # The hosts' memory or disks are what does not suffice.
        return [f"Nothing fits as given: {reason}.", *(list(_open_fields(result)) or _ways_out(result, None))]
    moving = nearest.worst.total - nearest.worst.states - nearest.worst.gathered
    offloading = result.plans[0] if result.plans else None
    if offloading is None and moving > max(nearest.worst.states, usable):
        return [_too_large_activations(result.job, nearest), *_remedies(result)]
    remedies = list(_open_fields(result)) if offloading is None else []
    return [_states_too_large(result.job), *(remedies or _ways_out(result, offloading))]


def _cannot_split(result: SearchResult) -> str:
    reasons = tuple(dict.fromkeys(entry.reason for entry in result.rejected))
    more = f" ({plural(len(reasons) - 1, 'other reason')} above)" if len(reasons) > 1 else ""
    return f"No layout runs this job: {reasons[-1]}{more}."


def _too_large_activations(job: TrainingJob, nearest: Plan) -> str:
    terms = {name: size for name, size in vars(nearest.worst).items() if name not in EXACT_TERMS}
    largest = max(terms, key=terms.__getitem__)
    return (
        f"Nothing fits: a micro-batch of {plural(nearest.split.micro_batch, 'sequence')} of {job.shape.seq} tokens "
        f"takes {memory_text(nearest.worst.total)} ({largest.replace('_', ' ')} {memory_text(terms[largest])}); a "
        f"{device_word(job.cluster)} has {memory_text(job.cluster.gpu.memory_gib * GIB)}."
    )


def _states_too_large(job: TrainingJob) -> str:
    word, memory = device_word(job.cluster), memory_text(job.cluster.gpu.memory_gib * GIB)
    return f"Nothing fits without offloading: {states_text(job)}; a {word} has {memory}."


def _fastest(job: TrainingJob, fixed: Mapping[str, Any]) -> Plan | None:
    plans = runnable_layouts(job, {"offload": "none", **fixed}).plans
    return plans[0] if plans else None


def _sizes(plan: Plan) -> str:
    split = plan.split
    return f"tensor {split.tensor} x pipeline {split.pipeline} x data {split.data * split.context}"


def _layout(plan: Plan) -> str:
    split = plan.split
    return f"{_sizes(plan)}, ZeRO-{split.zero_stage}, micro-batch {split.micro_batch}, {memory_text(plan.worst.total)}"


def _remedies(result: SearchResult) -> list[str]:
    """The first values that work, of each kind; every one is searched before it is named."""
    return [*_open_fields(result), *_batches(result), *_sequences(result)] or _ways_out(result, None)


def _open_fields(result: SearchResult) -> Iterator[str]:
    for name, given in result.fixed.items():
        rest = {other: value for other, value in result.fixed.items() if other != name}
        plan = _fastest(result.job, rest)
        if plan is not None and getattr(plan.split, name) != given:
            option = _OPTIONS.get(name, name.replace("_", "-"))
            yield f"Without --{option} {given} it fits: {option} {getattr(plan.split, name)} ({_layout(plan)})."


def _batches(result: SearchResult) -> Iterator[str]:
    """The smallest global batch that splits over the replicas of some layout and fits."""
    job, micro = result.job, result.fixed.get("micro_batch", 1)
    tried = {entry.split.data * micro for entry in result.rejected if entry.plan is None}
    for batch in sorted(tried - {job.global_batch})[:16]:
        plan = _fastest(replace(job, global_batch=batch), result.fixed)
        if plan is not None:
            yield f"--global-batch {batch} fits, or a multiple: {_layout(plan)}."
            return


def _sequences(result: SearchResult) -> Iterator[str]:
    """The longest power of two below the given length that fits."""
    length = 1 << (result.job.shape.seq - 1).bit_length() - 1
    low, high = 7, length.bit_length()
    found = None
    while low < high:
        middle = (low + high) // 2
        plan = _fastest(replace(result.job, shape=replace(result.job.shape, seq=1 << middle)), result.fixed)
        low, high, found = (middle + 1, high, (1 << middle, plan)) if plan else (low, middle, found)
    if found and found[1] and found[0] < result.job.shape.seq:
        yield f"--seq {found[0]} fits: {_layout(found[1])}."


def _ways_out(result: SearchResult, offloading: Plan | None) -> list[str]:
    sentences = [] if offloading is None else [_offloaded(result, offloading)]
    return [*sentences, *_more_nodes(result), _adapters(result.job)]


def _offloaded(result: SearchResult, best: Plan) -> str:
    """What the fastest plan takes, and the fastest with tensor parallelism inside the nodes where that is another."""
    domain = result.job.cluster.link_domain
    inside = next((plan for plan in result.plans if 1 < plan.split.tensor <= domain), None)
    beside = f", beside {_sizes(best)}" if best.split.tensor * best.split.pipeline > 1 else ""
    text = (
        f"ZeRO-{best.split.zero_stage} with offload fits{beside}: it needs {host_text(best)} per node and takes "
        f"{best.time.total:.3g} s per step"
    )
    if inside is None or best.split.tensor > 1:
        return f"{text}."
    return (
        f"{text}; tensor parallelism {inside.split.tensor} inside the node with ZeRO-{inside.split.zero_stage} "
        f"({_sizes(inside)}) needs {host_text(inside)} and takes {inside.time.total:.3g} s."
    )


def host_text(plan: Plan) -> str:
    """What a node's host memory and disks take of offloaded states."""
    kinds = (("nvme", "NVMe"), ("offload", "host memory"))
    return " and ".join(f"{whole_memory_text(plan.host[name])} of {kind}" for name, kind in kinds if plan.host[name])


def _more_nodes(result: SearchResult) -> Iterator[str]:
    job = result.job
    states = job.trainable * (job.gradient_bytes + job.master_bytes + job.optimizer_bytes) + job.weight_bytes
    node = USABLE_MEMORY * job.cluster.gpu.memory_gib * GIB * job.cluster.gpus_per_node
    least = int(-(-job.shape.parameters * states // node))
    if least > MOST_NODES:
        yield f"Without offloading, the states alone need {least} nodes."
        return
    missed = 0
    for nodes in range(max(job.cluster.nodes + 1, least), MOST_NODES + 1):
        larger = replace(job, cluster=replace(job.cluster, nodes=nodes), global_batch=job.global_batch * nodes)
        if missed == MOST_MISSES:
            return
        if not anything_fits(larger, {"offload": "none"}):
            continue
        plan, missed = _fastest(larger, {}), missed + 1
        if plan is not None:
            split = plan.split
            yield (
                f"Without offloading it needs at least {plural(nodes, 'node')}: tensor {split.tensor} x pipeline "
                f"{split.pipeline} x data {split.data}, ZeRO-{split.zero_stage}, "
                f"{memory_text(plan.worst.total)} per {device_word(job.cluster)}."
            )
            return


def _adapters(job: TrainingJob) -> str:
    """Whether training adapters only would fit."""
    weights = job.shape.parameters * job.weight_bytes
    plan = _fastest(replace(job, trainable=ADAPTERS), {})
    if plan is not None:
        split = plan.split
        return (
            f"Adapters (LoRA, {ADAPTERS:.1%} of the parameters trained) fit: tensor {split.tensor} x pipeline "
            f"{split.pipeline} x data {split.data}, {memory_text(plan.worst.total)} per {device_word(job.cluster)}."
        )
    if weights < USABLE_MEMORY * job.cluster.gpu.memory_gib * GIB * job.cluster.gpus:
        return "Adapters (LoRA) alone do not help: beside the frozen weights too little is left."
    return (
        f"Adapters (LoRA) alone do not help: the frozen weights take {weights / 1e9:.0f} GB in "
        f"{8 * job.weight_bytes:.0f} bit; they would have to be quantized as well."
    )
