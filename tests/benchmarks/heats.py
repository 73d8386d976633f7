"""Which jobs run against one another, and what is asked of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from tests.benchmarks.referee import Job, Result

Measure = Literal["faster", "cpu", "overhead", "bubble", "at best"]

# Share of a step that each of 2 equal stages waits with 8 micro-batches: (p - 1) / (m + p - 1).
BUBBLE = 1 / 9


@dataclass(frozen=True)
class Target:
    """A comparison of `ours` with `other`.

    Attributes:
        measure: "faster": time of the other over ours, at least `limit`. "cpu": our CPU seconds over the other's, at
            most `limit`. "overhead": our time over the other's minus 1, at most `limit`. "bubble": share of our time
            in which the two stages do not do the work that the other does on one process, at most `limit`. "at best":
            `ours` is one process, and the other's time is divided by that of two equal stages that share its work at
            no cost: no pipeline with 1F1B can be so many times faster than the other.
        limit: by name of the configuration; one without a limit is only reported.
    """

    ours: str
    other: str
    measure: Measure
    limit: Mapping[str, float]

    def by_median(self, results: Mapping[str, Result]) -> float:
        """From the steps of the two jobs that ran one after the other."""
        ours, other = results[self.ours], results[self.other]
        if self.measure == "cpu":
            return median(ours.cpu_seconds) / median(other.cpu_seconds)
        return self._from_ratio(median(b / a for a, b in zip(ours.seconds, other.seconds, strict=False)))

    def by_minimum(self, results: Mapping[str, Result]) -> float:
        """From the fastest step of each job: what is left when nobody else uses the machine."""
        ours, other = results[self.ours], results[self.other]
        if self.measure == "cpu":
            return min(ours.cpu_seconds) / min(other.cpu_seconds)
        return self._from_ratio(min(other.seconds) / min(ours.seconds))

    def _from_ratio(self, faster: float) -> float:
        if self.measure == "overhead":
            return 1 / faster - 1
        if self.measure == "at best":
            return faster * 2 * (1 - BUBBLE)
        return 1 - faster / 2 if self.measure == "bubble" else faster

    def holds(self, value: float, config: str) -> bool | None:
        """Whether a value is good enough; None without a limit."""
        limit = self.limit.get(config)
        if limit is None or math.isnan(value):
            return None
        return value >= limit if self.measure == "faster" else value <= limit


@dataclass(frozen=True)
class Heat:
    """Jobs that take turns. The first is the reference of all losses."""

    title: str
    jobs: tuple[Job, ...]
    targets: tuple[Target, ...]


ONE = Job("one process", "bare_jobs.one_process", ranks=1)
ONE_LIGHTNING = Job("Lightning, one process", "lightning_jobs.one_process", ranks=1)
OUR_TENSOR = Job("tp_pp, tensor 2", "lightning_jobs.our_tensor_parallel")
OUR_LAYERS = Job("our layers, plain loop", "bare_jobs.our_layers")
DTENSOR = Job("ModelParallelStrategy", "lightning_jobs.model_parallel_strategy")
MEGATRON = Job("Megatron-Core layers, plain loop", "bare_jobs.megatron_layers", needs="megatron.core")
OUR_DATA = Job("tp_pp, data 2", "lightning_jobs.our_data_parallel")
DDP = Job("Lightning DDP", "lightning_jobs.ddp")
ACCUMULATING = Job("one process, micro-batches", "bare_jobs.one_process_accumulating", ranks=1)
OUR_PIPELINE = Job("tp_pp, pipeline 2", "lightning_jobs.our_pipeline", last_rank_loss=True)
OUR_ZERO_BUBBLE = Job("tp_pp, pipeline 2, zero bubble", "lightning_jobs.our_zero_bubble", last_rank_loss=True)
PLAIN_1F1B = Job("1F1B, plain loop", "pipeline_loops.plain_1f1b", last_rank_loss=True)
NO_WAIT = Job("stages that never wait", "pipeline_loops.never_waiting", last_rank_loss=True)
NO_WAIT_SPLIT = Job("never wait, weights apart", "pipeline_loops.never_waiting_split", last_rank_loss=True)
TORCH_1F1B = Job("torch Schedule1F1B, plain loop", "bare_jobs.torch_1f1b", last_rank_loss=True)

REDUNDANCY = Job("Lightning DDP, ZeroRedundancyOptimizer", "lightning_jobs.ddp_zero_redundancy")
ZERO1 = Job("zero1", "lightning_jobs.our_zero1")
ZERO2 = Job("zero2", "lightning_jobs.our_zero2")
FSDP2 = Job("ModelParallelStrategy, fully_shard", "lightning_jobs.fully_sharded")
ZERO3 = Job("zero3", "lightning_jobs.our_zero3")
NO_TALK = Job("no communication, plain loop", "bare_jobs.without_communication")
LEAST_TALK = Job("least transfers of ZeRO 2", "bare_jobs.least_transfers")
LEAST_TALK3 = Job("least transfers of ZeRO 3", "bare_jobs.least_transfers_of_parameters")
PLAIN_ZERO2 = Job("ZeRO 2, plain loop", "sharded_loops.optimizer_and_gradients")
PLAIN_ZERO3 = Job("ZeRO 3, plain loop", "sharded_loops.parameters_too")
DEEPSPEED1 = Job("DeepSpeed stage 1, plain loop", "deepspeed_jobs.stage1", needs="deepspeed")
DEEPSPEED2 = Job("DeepSpeed stage 2, plain loop", "deepspeed_jobs.stage2", needs="deepspeed")
DEEPSPEED3 = Job("DeepSpeed stage 3, plain loop", "deepspeed_jobs.stage3", needs="deepspeed")
DEEPSPEED2_OFFLOAD = Job("DeepSpeed stage 2, offload, plain loop", "deepspeed_jobs.stage2_offload", needs="deepspeed")
ZERO2_OFFLOAD = Job("zero2_offload", "lightning_jobs.our_zero2_offload")
ZERO2_NVME = Job("zero2, nvme", "lightning_jobs.our_zero2_nvme")


def _beats(ours: Job, other: Job, times: float) -> tuple[Target, ...]:
    """So many times faster with *mid*, and with no more CPU seconds."""
    return (
        Target(ours.name, other.name, "faster", {"mid": times}),
        Target(ours.name, other.name, "cpu", {"mid": 1.0}),
    )


HEATS = {
    "tp": Heat(
        "tensor parallel, 2 processes",
        (ONE_LIGHTNING, DTENSOR, MEGATRON, OUR_TENSOR),
        (
            *_beats(OUR_TENSOR, DTENSOR, 1.25),
            *_beats(OUR_TENSOR, MEGATRON, 1.05),
        ),
    ),
    "dp": Heat(
        "data parallel, 2 processes",
        (ONE_LIGHTNING, DDP, OUR_DATA),
        _beats(OUR_DATA, DDP, 1.0),
    ),
    "zero": Heat(
        "sharded optimizer state, gradients and parameters, 2 processes",
        (
            *(OUR_DATA, NO_TALK, LEAST_TALK, PLAIN_ZERO2, REDUNDANCY, DEEPSPEED1, ZERO1, DEEPSPEED2, ZERO2),
            *(FSDP2, DEEPSPEED3, ZERO3, PLAIN_ZERO3, LEAST_TALK3),
        ),
        (
            *(
                target
                for job, deepspeed in ((ZERO1, DEEPSPEED1), (ZERO2, DEEPSPEED2))
                for target in (
                    Target(job.name, OUR_DATA.name, "overhead", {"mid": 0.03}),
                    Target(job.name, REDUNDANCY.name, "faster", {"mid": 1.1}),
                    Target(job.name, deepspeed.name, "faster", {"mid": 1.35}),
                )
            ),
            *(
                Target(bound.name, other.name, "faster", {})
                for bound in (NO_TALK, LEAST_TALK, PLAIN_ZERO2)
                for other in (REDUNDANCY, DEEPSPEED1, DEEPSPEED2)
            ),
            *_beats(ZERO3, FSDP2, 1.3),
            *(
                Target(bound.name, other.name, "faster", {})
                for bound in (NO_TALK, LEAST_TALK3, PLAIN_ZERO3)
                for other in (FSDP2, DEEPSPEED3)
            ),
            *_beats(ZERO3, DEEPSPEED3, 1.4),
        ),
    ),
    "zero2": Heat(
        "sharded optimizer state and gradients against what can be had, 2 processes",
        (REDUNDANCY, ZERO2, ZERO1, LEAST_TALK, NO_TALK),
        tuple(
            Target(job.name, REDUNDANCY.name, "faster", {"mid": 1.1} if job in (ZERO1, ZERO2) else {})
            for job in (ZERO1, ZERO2, LEAST_TALK, NO_TALK)
        ),
    ),
    "zero3": Heat(
        "sharded parameters alone, 2 processes",
        (FSDP2, DEEPSPEED3, ZERO3, PLAIN_ZERO3, LEAST_TALK3, NO_TALK),
        (
            *_beats(ZERO3, FSDP2, 1.3),
            *_beats(ZERO3, DEEPSPEED3, 1.4),
            *(
                Target(bound.name, other.name, "faster", {})
                for bound in (NO_TALK, LEAST_TALK3, PLAIN_ZERO3)
                for other in (FSDP2, DEEPSPEED3)
            ),
        ),
    ),
    "offload": Heat(
        "steps in host memory and from files, 2 processes",
        (ZERO2, DEEPSPEED2_OFFLOAD, ZERO2_OFFLOAD, ZERO2_NVME),
        (
            Target(ZERO2_OFFLOAD.name, ZERO2.name, "overhead", {"mid": 0.15}),
            Target(ZERO2_OFFLOAD.name, ZERO2.name, "cpu", {}),
            Target(ZERO2_NVME.name, ZERO2.name, "overhead", {}),
            Target(ZERO2_OFFLOAD.name, DEEPSPEED2_OFFLOAD.name, "faster", {}),
        ),
    ),
    "pp": Heat(
        "pipeline parallel, 2 processes",
        (ACCUMULATING, PLAIN_1F1B, NO_WAIT, OUR_ZERO_BUBBLE, TORCH_1F1B, OUR_PIPELINE, NO_WAIT_SPLIT),
        (
            *_beats(OUR_PIPELINE, TORCH_1F1B, 1.15),
            *_beats(OUR_ZERO_BUBBLE, TORCH_1F1B, 1.15),
            Target(ACCUMULATING.name, TORCH_1F1B.name, "at best", {}),
            Target(OUR_PIPELINE.name, ACCUMULATING.name, "bubble", {"mid": BUBBLE + 0.05, "paced": BUBBLE + 0.05}),
            Target(OUR_ZERO_BUBBLE.name, ACCUMULATING.name, "bubble", {}),
            Target(TORCH_1F1B.name, ACCUMULATING.name, "bubble", {}),
            Target(PLAIN_1F1B.name, ACCUMULATING.name, "bubble", {}),
            Target(PLAIN_1F1B.name, TORCH_1F1B.name, "faster", {}),
            Target(PLAIN_1F1B.name, TORCH_1F1B.name, "cpu", {}),
            Target(NO_WAIT.name, TORCH_1F1B.name, "faster", {}),
            Target(NO_WAIT_SPLIT.name, TORCH_1F1B.name, "faster", {}),
        ),
    ),
    "overhead": Heat(
        "strategy over a plain loop with the same layers",
        (ONE, ONE_LIGHTNING, OUR_LAYERS, OUR_TENSOR),
        (
            Target(OUR_TENSOR.name, OUR_LAYERS.name, "overhead", {"mid": 0.03, "tiny": 0.10}),
            Target(ONE_LIGHTNING.name, ONE.name, "overhead", {}),
        ),
    ),
}
