"""Glue: the strategies. Names are loaded when they are first used, so that the checked options load without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_parallel.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_parallel.strategies.auto import AutoStrategy
    from lightning_parallel.strategies.config import LossConfig, PipelineConfig, TensorParallelConfig, ZeroConfig
    from lightning_parallel.strategies.tensor_pipeline import TensorPipelineStrategy
    from lightning_parallel.strategies.zero import ZeroStrategy

__all__ = [
    "AutoStrategy",
    "LossConfig",
    "PipelineConfig",
    "TensorParallelConfig",
    "TensorPipelineStrategy",
    "ZeroConfig",
    "ZeroStrategy",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AutoStrategy": "auto",
        "LossConfig": "config",
        "PipelineConfig": "config",
        "TensorParallelConfig": "config",
        "TensorPipelineStrategy": "tensor_pipeline",
        "ZeroConfig": "config",
        "ZeroStrategy": "zero",
    },
)
