"""Glue: the strategies."""

from lightning_parallel.strategies.config import LossConfig, PipelineConfig, TensorParallelConfig
from lightning_parallel.strategies.registry import register_strategies
from lightning_parallel.strategies.tensor_pipeline import TensorPipelineStrategy

__all__ = [
    "LossConfig",
    "PipelineConfig",
    "TensorParallelConfig",
    "TensorPipelineStrategy",
    "register_strategies",
]
