"""Pure: the answer of the planner as plain data with fixed keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_parallel.planner.hardware import GIB
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.memory import EXACT_TERMS, StageMemory
from lightning_parallel.planner.precisions import precision_note
from lightning_parallel.planner.search import Beyond, Plan, Rejected, SearchResult
from lightning_parallel.planner.strategy_text import alternatives, recompute_note, strategy_of, trainer_line, yaml_text

__all__ = ["model_flops", "recomputed_flops", "result_data"]

SECONDS_PER_DAY = 86400


def model_flops(job: TrainingJob) -> float:
    """FLOPs of the model per step: ``6 N + 12 L h s`` per token (Chowdhery et al. 2022, both halves of attention)."""
    shape = job.shape
    return job.tokens * (6.0 * shape.parameters + 12.0 * shape.layers * shape.query_width * shape.seq)


def recomputed_flops(job: TrainingJob, split: Candidate) -> float:
    """FLOPs that a step repeats: a forward of every block, or of the attention scores only."""
    shape = job.shape
    attention = 4.0 * shape.query_width * shape.seq
    if split.recompute == "full":
        return job.tokens * shape.layers * (2.0 * shape.matrix_parameters + attention)
    if split.recompute == "selective" and job.attention == "eager":
        return job.tokens * shape.layers * attention
    return 0.0


def result_data(result: SearchResult, *, price: float = 0.0, tokens: float = 0.0) -> dict[str, Any]:
    """The whole answer.

    Args:
        result: what the search found.
        price: of one GPU for one hour, 0 when unknown.
        tokens: tokens of the whole run, 0 when unknown.
    """
    job = result.job
    shape = {name: value for name, value in asdict(job.shape).items() if value or isinstance(value, bool)}
    return {
        "model": {"parameters": job.shape.parameters, **shape},
        "cluster": {
            "gpu": job.cluster.gpu.name,
            "gpus": job.cluster.gpus,
            "gpus_per_node": job.cluster.gpus_per_node,
            "nodes": job.cluster.nodes,
            "network_gbit_per_gpu": job.cluster.network_gbps * 8,
        },
        "job": {
            "sequences_per_step": job.global_batch,
            "precision": job.precision,
            "states": job.states,
            "bytes_per_parameter": {
                "weights": job.weight_bytes,
                "gradients": job.gradient_bytes,
                "master_weights": job.master_bytes,
                "optimizer": job.optimizer_bytes,
            },
            "optimizer": job.optimizer,
            "attention": job.attention,
            "kernels": job.kernels,
            "loss": job.loss,
            "trainable": job.trainable,
        },
        "plans": [_plan_data(job, plan, price, tokens) for plan in result.plans],
        "rejected": [_rejected_data(job, entry) for entry in result.rejected],
        "not_run_here": [_beyond_data(job, entry) for entry in result.beyond],
    }


def _layout_data(job: TrainingJob, split: Candidate) -> dict[str, Any]:
    try:
        micro_batches: int | None = split.micro_batches(job)
    except ValueError:
        micro_batches = None
    return {**asdict(split), "micro_batches": micro_batches}


def _memory_data(memory: StageMemory) -> dict[str, float]:
    return memory.gib()


def _plan_data(job: TrainingJob, plan: Plan, price: float, tokens: float) -> dict[str, Any]:
    split, seconds = plan.split, plan.time.total
    gpus = job.cluster.gpus
    per_second = job.tokens / seconds
    flops = model_flops(job)
    peak = job.cluster.gpu.peak(job.precision) * gpus * seconds
    data: dict[str, Any] = {
        "layout": _layout_data(job, split),
        "sequences_per_step": job.global_batch,
        "memory_gib": _memory_data(plan.worst),
        "memory_exact_terms": list(EXACT_TERMS),
        "memory_by_stage_gib": [_memory_data(stage) for stage in plan.stages],
        "host_memory_gib": {name: size / GIB for name, size in plan.host.items()},
        "step_seconds": {"total": seconds, **asdict(plan.time)},
        "tokens_per_second_per_gpu": per_second / gpus,
        "tokens_per_day": per_second * SECONDS_PER_DAY,
        "model_tflops_per_gpu": flops / seconds / gpus / 1e12,
        "mfu": flops / peak,
        "hfu": (flops + recomputed_flops(job, split)) / peak,
        "gpu_hours_per_billion_tokens": 1e9 / per_second * gpus / 3600,
        "dataloader_batch_size": _loader_batch(job, split),
        "strategy": strategy_of(job, split),
        "trainer": trainer_line(job, split),
        "yaml": yaml_text(job, split),
        "alternatives": alternatives(job, split),
        "recompute_note": recompute_note(split),
        "precision_note": precision_note(job, split),
    }
    if tokens:
        hours = tokens / per_second / 3600
        data["run"] = {"tokens": tokens, "days": hours / 24, "gpu_hours": hours * gpus}
        if price:
            data["run"] |= {"price": price, "cost": hours * gpus * price}
    return data


def _beyond_data(job: TrainingJob, entry: Beyond) -> dict[str, Any]:
    plan = entry.plan
    return {
        "layout": _layout_data(job, plan.split),
        "needs": list(entry.needs),
        "faster_percent": None if entry.faster is None else 100 * entry.faster,
        "memory_gib": _memory_data(plan.worst),
        "memory_by_stage_gib": [_memory_data(stage) for stage in plan.stages],
        "step_seconds": {"total": plan.time.total, **asdict(plan.time)},
        "tokens_per_second_per_gpu": job.tokens / plan.time.total / job.cluster.gpus,
    }


def _loader_batch(job: TrainingJob, split: Candidate) -> int:
    """Sequences that a loader yields: our strategies cut a replica's batch themselves, others accumulate."""
    return split.micro_batch * (split.micro_batches(job) if split.tensor * split.pipeline > 1 else 1)


def _rejected_data(job: TrainingJob, entry: Rejected) -> dict[str, Any]:
    data: dict[str, Any] = {"layout": _layout_data(job, entry.split), "reason": entry.reason}
    if entry.plan is not None:
        data["memory_gib"] = _memory_data(entry.plan.worst)
        data["step_seconds"] = {"total": entry.plan.time.total, **asdict(entry.plan.time)}
    return data
