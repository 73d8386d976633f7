"""Mechanism: layers, plans and losses split over the tensor group. Names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_parallel.tensor_parallel.loss import vocab_parallel_cross_entropy
    from lightning_parallel.tensor_parallel.modules import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
    )
    from lightning_parallel.tensor_parallel.parallelize import parallelize_module, shard_parameters
    from lightning_parallel.tensor_parallel.plan import resolve_plan
    from lightning_parallel.tensor_parallel.sharding import ShardSpec

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "ShardSpec",
    "VocabParallelEmbedding",
    "parallelize_module",
    "resolve_plan",
    "shard_parameters",
    "vocab_parallel_cross_entropy",
]

_HOMES = {
    "ColumnParallelLinear": "modules",
    "RowParallelLinear": "modules",
    "ShardSpec": "sharding",
    "VocabParallelEmbedding": "modules",
    "parallelize_module": "parallelize",
    "resolve_plan": "plan",
    "shard_parameters": "parallelize",
    "vocab_parallel_cross_entropy": "loss",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
