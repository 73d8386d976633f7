"""Pure: the ways to split a job over all its GPUs, and the variants of each.

A layout is the sizes of tensor, pipeline, context and data groups with a ZeRO stage; what else a split decides
(micro-batch, sequence parallelism, schedule, recomputation) makes its variants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_parallel.layout import divisors
from lightning_parallel.pipeline.schedules import SCHEDULE_NAMES
from lightning_parallel.planner.job import ON_REQUEST, RECOMPUTES, SCHEDULES, Candidate, Recompute, TrainingJob

__all__ = [
    "group_sizes",
    "micro_batches",
    "only_pipelines",
    "orders",
    "recomputes",
    "sequence_parallelism",
    "wide_tensors",
    "zero_stages",
]

Fixed = Mapping[str, Any]


def group_sizes(job: TrainingJob, fixed: Fixed, *, every: bool = False) -> Iterator[Candidate]:
    """Sizes of the groups of every layout that fills the GPUs, as candidates without a ZeRO stage.

    Args:
        job: what is trained, and where.
        fixed: fields that are given.
        every: also those with context groups, which no strategy here runs.
    """
    gpus = job.cluster.gpus
    whole = divisors(gpus)
    tensors = (
        [fixed["tensor"]]
        if "tensor" in fixed
        else [t for t in whole if t <= min(job.shape.heads, job.cluster.link_domain)]
    )
    pipelines = [fixed["pipeline"]] if "pipeline" in fixed else [p for p in whole if p <= job.shape.layers]
    contexts = [c for c in whole if job.shape.seq % c == 0] if every else [1]
    for tensor in tensors:
        for pipeline in pipelines:
            for context in [fixed["context"]] if "context" in fixed else contexts:
                data, rest = divmod(gpus, tensor * pipeline * context)
                if rest or not data or fixed.get("data", data) != data:
                    continue
                virtual = fixed.get("virtual_stages", 1)
                yield Candidate(
                    tensor=tensor,
                    pipeline=pipeline,
                    data=data,
                    context=context,
                    offload=fixed["offload"],
                    schedule=fixed.get("schedule", "interleaved" if virtual > 1 else "1f1b"),
                    virtual_stages=virtual,
                    sequence_parallel=fixed.get("sequence_parallel", False),
                    balance=fixed.get("balance", "parameters"),
                )


def wide_tensors(job: TrainingJob) -> list[int]:
    """Sizes of tensor groups that reach beyond the fast links: `group_sizes` leaves them out unless they are given."""
    return [t for t in divisors(job.cluster.gpus) if job.cluster.link_domain < t <= job.shape.heads]


def zero_stages(base: Candidate, fixed: Fixed, *, every: bool = False) -> tuple[int, ...]:
    """ZeRO stages worth a look: none without replicas, and stage 3 only where a strategy runs it.

    Every one includes stage 3 beside tensor ranks. Beside stages of a pipeline its weights stay gathered and its
    gradients whole through the step, so that it holds more than stage 2.
    """
    if "zero_stage" in fixed:
        return (fixed["zero_stage"],)
    whole = base.pipeline == 1 if every else base.pipeline * base.tensor == 1
    if base.offload != "none":
        # A single replica shards over itself.
        return (2, 3) if whole else (2,)
    if base.data * base.context == 1:
        return (0,)
    return (0, 1, 2, 3) if whole else (0, 1, 2)


def only_pipelines(fixed: Fixed) -> bool:
    """Whether a schedule is given, which is one of a pipeline, and not the number of stages."""
    return "pipeline" not in fixed and bool(fixed.keys() & {"schedule", "virtual_stages"})


def micro_batches(job: TrainingJob, base: Candidate, fixed: Fixed) -> Sequence[int]:
    """Sequences of a micro-batch, ascending; none when the batch does not split over the replicas."""
    if "micro_batch" in fixed:
        return [fixed["micro_batch"]]
    per_replica, rest = divmod(job.global_batch, base.data)
    return [] if rest or not per_replica else divisors(per_replica)


def sequence_parallelism(job: TrainingJob, base: Candidate, fixed: Fixed) -> tuple[bool, ...]:
    """Whether tensor ranks also share the sequence between their layers, which then has to split."""
    if "sequence_parallel" in fixed:
        return (fixed["sequence_parallel"],)
    return (True, False) if base.tensor > 1 and job.shape.seq // base.context % base.tensor == 0 else (False,)


def orders(job: TrainingJob, base: Candidate, fixed: Fixed, *, every: bool = False) -> Iterator[Candidate]:
    """The schedules of a layout, with the numbers of model chunks; every one includes those that nothing here runs."""
    if base.pipeline == 1:
        yield base
        return
    names: tuple[str, ...] = SCHEDULES if every else tuple(n for n in SCHEDULE_NAMES if n not in ON_REQUEST)
    if "schedule" in fixed:
        names = (fixed["schedule"],)
    elif fixed.get("virtual_stages", 1) > 1:
        names = ("interleaved",)
    # The usual one first: another has to be faster.
    for name in sorted(names, key=lambda name: name != "1f1b"):
        chunks: Sequence[int] = (1,)
        if "virtual_stages" in fixed:
            chunks = (fixed["virtual_stages"],)
        elif name == "interleaved":
            # One chunk is 1F1B, which counts only where it is asked for.
            chunks = _equal_chunks(job, base) or ((1,) if "schedule" in fixed else ())
        elif "schedule" not in fixed and _starves(job, base, name):
            continue
        for virtual in chunks:
            yield replace(base, schedule=name, virtual_stages=virtual)


def _starves(job: TrainingJob, base: Candidate, schedule: str) -> bool:
    """Whether a schedule with split backwards lacks what it fills its bubble with (Qi et al. 2024).

    ZB-H1 needs a micro-batch per stage, ZB-H2 and ZB-V nearly two; the V is made of two chunks per rank.
    """
    least = {"zero-bubble": base.pipeline, "zb-h2": 2 * base.pipeline - 1, "zb-v": 2 * base.pipeline - 1}
    few_blocks = schedule == "zb-v" and job.shape.layers < 2 * base.pipeline
    return few_blocks or base.micro_batches(job) < least.get(schedule, 1)


def _equal_chunks(job: TrainingJob, base: Candidate) -> list[int]:
    """Numbers of model chunks per rank that Megatron runs: equal ones, or with embedding and head counted as blocks.

    Micro-batches pass in groups of as many as there are stages.
    """
    if base.micro_batches(job) % base.pipeline:
        return []
    layers, stages = job.shape.layers, base.pipeline
    found = {v for whole in (layers, layers + 2) if whole % stages == 0 for v in divisors(whole // stages)}
    return sorted(v for v in found if 1 < v <= layers // stages)


def recomputes(fixed: Fixed) -> tuple[Recompute, ...]:
    """What is recomputed, the least first."""
    return (fixed["recompute"],) if "recompute" in fixed else RECOMPUTES
