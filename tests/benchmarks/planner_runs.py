"""Published training runs as jobs and splits of the planner, and what the planner says about them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_parallel.planner.cost import hop_seconds, idle_share, step_time
from lightning_parallel.planner.hardware import GIB, Cluster, find_gpu
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.memory import memory_by_stage, worst_stage
from lightning_parallel.planner.model_shape import ModelShape

__all__ = ["BUBBLES", "RUNS", "Outcome", "Run", "bubble_errors", "predict", "read_runs"]

RUNS = Path(__file__).resolve().parents[1] / "data" / "training_runs.csv"
BUBBLES = RUNS.with_name("bubble_rates.csv")

Row = Mapping[str, str]

# Runtimes with hand-written layers and fused gradient sums; DeepSpeed's engine adds gradients up by itself.
_FUSED = ("Megatron", "NeMo", "SC21", "Korthikanti", "Llama3", "ZeroBubble", "dgxc")
_UNFUSED = ("DeepSpeed", "PaxML", "MaxText", "BigScience", "MT-NLG")
_MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Run:
    """One printed run; seconds and GiB are None where they were not printed."""

    row: Row
    job: TrainingJob
    split: Candidate
    seconds: float | None
    memory_gib: float | None

    @property
    def source(self) -> str:
        """The table or page that printed it."""
        return self.row["source"]

    @property
    def out_of_memory(self) -> bool:
        """Whether it was printed as not fitting."""
        return self.row["status"] == "oom"

    @property
    def odd(self) -> bool:
        """Whether the printed row contradicts itself."""
        return self.row["anomaly"] == "yes"


@dataclass(frozen=True)
class Outcome:
    """What the planner says about a run."""

    run: Run
    seconds: float
    gib: float

    @property
    def time_error(self) -> float:
        """Predicted over printed seconds, less one."""
        return self.seconds / (self.run.seconds or 1.0) - 1

    @property
    def memory_error(self) -> float:
        """Predicted over printed memory, less one."""
        return self.gib / (self.run.memory_gib or 1.0) - 1


def read_runs(path: Path = RUNS) -> list[Run]:
    """Every run of a file whose layout tiles its batch."""
    with path.open() as file:
        runs = [_run(row) for row in csv.DictReader(file)]
    return [run for run in runs if run.job.global_batch % run.split.data == 0]


def predict(runs: Iterable[Run]) -> list[Outcome]:
    """The planner's figures for each run; the fastest micro-batch where none was printed."""
    return [_outcome(run) for run in runs]


def bubble_errors(runs: Iterable[Run], path: Path = BUBBLES) -> list[float]:
    """Predicted less printed idle share of pipelines with equal stages, on the jobs of the runs that they belong to."""
    jobs = {(r.job.shape.hidden, r.split.micro_batches(r.job)): r for r in runs if r.source.startswith("ZeroBubble")}
    errors = []
    with path.open() as file:
        for row in csv.DictReader(file):
            micro_batches = int(row["micro_batches"])
            run = jobs[int(row["hidden"]), micro_batches]
            kind = {"schedule": row["schedule"], "virtual_stages": int(row["virtual_stages"])}
            split = replace(run.split, pipeline=int(row["stages"]), **kind)
            time = step_time(run.job, split)
            send = hop_seconds(run.job, split) * micro_batches / (time.compute + time.tensor)
            errors.append(idle_share(split, micro_batches, send) - float(row["rate"]))
    return errors


def _outcome(run: Run) -> Outcome:
    splits = [run.split]
    if not run.row["micro_batch"]:
        # Sequences of 8192 tokens and more are run one by one.
        sizes = _MICRO_BATCHES if run.job.shape.seq < 8192 else _MICRO_BATCHES[:1]
        per_replica = run.job.global_batch // run.split.data
        splits = [replace(run.split, micro_batch=size) for size in sizes if per_replica % size == 0]
    seconds, best = min(((step_time(run.job, split).total, split) for split in splits), key=lambda pair: pair[0])
    return Outcome(run, seconds, worst_stage(memory_by_stage(run.job, best)).total / GIB)


def _run(row: Row) -> Run:
    gpus = int(row["gpus"])
    per_node = min(gpus, int(row["gpus_per_node"]))
    cluster = Cluster(find_gpu(row["gpu"]), per_node, -(-gpus // per_node), float(row["network_gbit"]))
    fused = any(name in row["source"] for name in _FUSED) and not any(
        name in row["source"] + row["model"] + row["runtime"] for name in _UNFUSED
    )
    sums_in_32_bit = fused or "nanotron" in row["source"]
    states = "fp32-gradients" if sums_in_32_bit else "mixed"
    if "DeepSpeed" in row["runtime"]:
        # DeepSpeed's optimizers: that for bf16 keeps the 16-bit gradients beside their 32-bit sum.
        states = "both-gradients" if row["precision"] == "bf16" else "flat-gradients"
    job = TrainingJob(
        _shape(row),
        cluster,
        int(row["global_batch"]),
        precision=row["precision"],
        attention=row["attention"],
        kernels="fused" if fused else "plain",
        states=states,
        # By default its models have no dropout and flash-attn's loss (`loss_fn: fused_crossentropy`).
        dropout=row["source"] != "llm-foundry",
        loss="fused" if row["source"] == "llm-foundry" else "plain",
        scatters_sends=True,
    )
    # Printed memory is in GiB, also where it says GB: nvidia-smi and torch both count in powers of two.
    seconds, memory = (float(row[name]) if row[name] else None for name in ("seconds", "memory"))
    return Run(row, job, _split(row), seconds, memory)


def _shape(row: Row) -> ModelShape:
    gated = row["gated"] == "yes"
    hidden, heads = int(row["hidden"]), int(row["heads"])
    return ModelShape(
        layers=int(row["layers"]),
        hidden=hidden,
        heads=heads,
        ffn=int(row["ffn"]),
        vocab=int(row["vocab"]),
        seq=int(row["seq"]),
        kv_heads=int(row["kv_heads"]),
        head_dim=0 if hidden % heads == 0 else hidden // heads,
        gated=gated,
        tied=row["tied"] == "yes",
        norm="rms" if gated else "layer",
        qkv_bias=not gated,
        output_bias=not gated,
        mlp_bias=not gated,
    )


def _split(row: Row) -> Candidate:
    interleaved = row["schedule"] == "interleaved"
    return Candidate(
        tensor=int(row["tensor"]),
        pipeline=int(row["pipeline"]),
        data=int(row["data"]),
        context=int(row["context"]),
        micro_batch=int(row["micro_batch"] or 1),
        zero_stage=int(row["zero"]),
        schedule="zero-bubble" if row["schedule"] == "zb-h1" else row["schedule"],
        virtual_stages=int(row["virtual_stages"]) if interleaved else 1,
        recompute=row["recompute"].removesuffix("-layer"),  # type: ignore[arg-type]
        sequence_parallel=row["sequence_parallel"] == "yes",
        balance="even",
    )
