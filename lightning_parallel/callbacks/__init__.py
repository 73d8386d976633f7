"""Glue: callbacks that size, meter, compare and record training runs under every strategy."""

from __future__ import annotations

from lightning_parallel.callbacks.compute_budget import ComputeBudget
from lightning_parallel.callbacks.counting import count_tokens
from lightning_parallel.callbacks.law_recorder import ScalingLawRecorder
from lightning_parallel.callbacks.micro_batch import MicroBatchSizer
from lightning_parallel.callbacks.reports import MemoryReport, PlanReport
from lightning_parallel.callbacks.scaling_monitor import ScalingMonitor
from lightning_parallel.callbacks.sizer import ChinchillaSizer
from lightning_parallel.callbacks.throughput import ThroughputMonitor

__all__ = [
    "ChinchillaSizer",
    "ComputeBudget",
    "MemoryReport",
    "MicroBatchSizer",
    "PlanReport",
    "ScalingLawRecorder",
    "ScalingMonitor",
    "ThroughputMonitor",
    "count_tokens",
]
