"""Glue: what the planner has to know of a trainer: devices, precision, what its module recomputes, what runs here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_parallel.planner.hardware import GIB, Cluster, Gpu, cpu_process, recognise
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.planner.runnable import unrunnable
from lightning_parallel.strategies.config import PipelineConfig, ZeroConfig

__all__ = [
    "PlannedPipeline",
    "device_memory",
    "device_name",
    "host_memory",
    "planned_gpu",
    "planned_states",
    "planned_zero",
    "recomputation",
    "why_not",
    "zero_cases",
]

_PRECISIONS = {"32-true": "fp32", "16-mixed": "fp16", "bf16-mixed": "bf16", "16-true": "fp16", "bf16-true": "bf16"}


@dataclass(frozen=True)
class PlannedPipeline(PipelineConfig):
    """A pipeline whose micro-batches the user left open, with the number that was planned for them.

    Attributes:
        planned: stands in for "auto", so that callbacks that measure may still divide batches otherwise.
    """

    planned: int = 1

    @classmethod
    def of(cls, config: PipelineConfig, size: int, planned: int) -> PlannedPipeline:
        """The user's options with the size and the micro-batches of a plan."""
        return cls(**{**vars(config), "size": size, "planned": planned})

    def micro_batches_for(self, stages: int) -> int:
        """Number of parts of a training batch."""
        return self.planned if self.micro_batches == "auto" else super().micro_batches_for(stages)


def planned_states(precision: str, zero_stage: int, gradient_dtype: str = "float32") -> tuple[str, str]:
    """The planner's names of a Trainer's precision: of the products, and of what is kept beside them.

    Args:
        precision: as a Trainer names it.
        zero_stage: 0 to 3.
        gradient_dtype: see `ZeroConfig`.

    Raises:
        ValueError: a precision that the planner does not know.
    """
    if precision not in _PRECISIONS:
        raise ValueError(f"precision={precision!r} is not planned; use {' or '.join(map(repr, _PRECISIONS))}")
    kept = "autocast"
    if precision in ("16-true", "bf16-true"):
        # ZeRO steps in 32 bit, and sums gradients in it unless it is told not to.
        sharded = "fp32-gradients" if gradient_dtype == "float32" else "mixed"
        kept = sharded if zero_stage else "true"
    return _PRECISIONS[precision], kept


def zero_cases(
    shape: ModelShape,
    cluster: Cluster,
    batch_size: int,
    precision: str,
    fixed: dict[str, Any],
    gradient_dtype: str = "float32",
) -> Iterator[tuple[TrainingJob, dict[str, Any]]]:
    """A job for each ZeRO stage: the bytes of its states depend on it. What is offloaded has to be sharded."""
    for stage in (0, 1, 2, 3) if fixed.get("offload", "none") == "none" else (1, 2, 3):
        if fixed.get("zero_stage", stage) == stage:
            products, kept = planned_states(precision, stage, gradient_dtype)
            job = TrainingJob(shape, cluster, batch_size, precision=products, states=kept)
            yield job, {**fixed, "zero_stage": stage}


def why_not(job: TrainingJob, split: Candidate) -> str:
    """Why a strategy here does not run a split; empty if one does."""
    if split.zero_stage and split.data == 1 and split.offload == "none":
        return "there is one replica only, nothing to shard over; use ZeRO stage 0"
    try:
        ZeroConfig(split.zero_stage)
    except ValueError as error:
        return str(error)
    return unrunnable(job, split)


def recomputation(module: nn.Module) -> str:
    """Says "full" for a transformers model with gradient checkpointing switched on, else "none"."""
    checkpoints = any(getattr(child, "is_gradient_checkpointing", False) is True for child in module.modules())
    return "full" if checkpoints else "none"


def device_name(device: torch.device) -> str:
    """As the driver calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def planned_zero(config: ZeroConfig, split: Candidate) -> ZeroConfig:
    """The user's options with the stage and the offload of a plan."""
    offload = None if split.offload == "none" else split.offload
    moves_parameters = offload is not None and split.zero_stage == 3
    return replace(config, stage=split.zero_stage, offload=offload, offload_parameters=moves_parameters)


def host_memory(root: Path = Path("/")) -> float:
    """GiB of memory that processes of this machine may use, containers and jobs bounded; 0 where the system is silent.

    Args:
        root: where the system's own files are.
    """
    names = getattr(os, "sysconf_names", {})
    if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
        return 0.0
    machine = max(0, os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_memory_limits(root)]) / GIB


def _memory_limits(root: Path) -> Iterator[int]:
    """Bytes that the control groups of this process are bounded to, of both versions (cgroups(7))."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for group in groups:
        _, controllers, path = group.split(":", 2)
        mount, name = root / "sys/fs/cgroup", "memory.max"
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            mount, name = mount / "memory", "memory.limit_in_bytes"
        inner = Path(path.lstrip("/"))
        # A group inside another is bounded by both; of a container, only its own groups are there.
        for folder in (mount / inner, *(mount / outer for outer in inner.parents), mount):
            with suppress(OSError, ValueError):
                yield int((folder / name).read_text())


def device_memory(device: torch.device) -> float | None:
    """GiB of a GPU; None for a device that does not say how much a process may use."""
    return float(torch.cuda.get_device_properties(device).total_memory / GIB) if device.type == "cuda" else None


def planned_gpu(device: torch.device, memory_gib: float) -> Gpu:
    """The planner's numbers of a device.

    Raises:
        ValueError: a GPU that is not in the catalogue.
    """
    return recognise(device_name(device), memory_gib) if device.type == "cuda" else cpu_process(memory_gib)
