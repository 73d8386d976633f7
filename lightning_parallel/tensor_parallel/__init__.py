"""Mechanism: layers, plans and losses split over the tensor group. Names are loaded when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_parallel.lazy_names import lazy_names

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

__getattr__ = lazy_names(
    __name__,
    {
        "ColumnParallelLinear": "modules",
        "RowParallelLinear": "modules",
        "ShardSpec": "sharding",
        "VocabParallelEmbedding": "modules",
        "parallelize_module": "parallelize",
        "resolve_plan": "plan",
        "shard_parameters": "parallelize",
        "vocab_parallel_cross_entropy": "loss",
    },
)
