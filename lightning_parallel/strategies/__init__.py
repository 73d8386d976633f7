"""Glue: the strategies. Names are loaded when they are first used, so that the checked options load without torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

_HOMES = {
    "AutoStrategy": "auto",
    "LossConfig": "config",
    "PipelineConfig": "config",
    "TensorParallelConfig": "config",
    "TensorPipelineStrategy": "tensor_pipeline",
    "ZeroConfig": "config",
    "ZeroStrategy": "zero",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
