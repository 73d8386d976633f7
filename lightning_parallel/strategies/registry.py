"""Glue: the strategy names that `Trainer(strategy=...)` understands after `import lightning_parallel`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_parallel.strategies.refusals import note_surroundings
from lightning_parallel.strategies.tensor_pipeline import TensorPipelineStrategy
from lightning_parallel.strategies.zero import ZeroStrategy

__all__ = ["STRATEGY_NAMES", "register_strategies"]

STRATEGY_NAMES = ("tp_pp", "tp", "pp", "zero1", "zero2")


def register_strategies() -> None:
    """Registers every name of `STRATEGY_NAMES`; calling it again changes nothing."""
    entries: dict[str, tuple[type[TensorPipelineStrategy], str, dict[str, Any]]] = {
        "tp_pp": (TensorPipelineStrategy, "tensor x pipeline x data parallel", {}),
        "tp": (TensorPipelineStrategy, "tensor x data parallel", {"pipeline_parallel_size": 1}),
        "pp": (TensorPipelineStrategy, "pipeline x data parallel", {"tensor_parallel_size": 1}),
        "zero1": (ZeroStrategy, "data parallel, optimizer state sharded", {"stage": 1}),
        "zero2": (ZeroStrategy, "data parallel, optimizer state and gradients sharded", {"stage": 2}),
    }
    for name, (strategy, description, options) in entries.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, strategy, description=description, **options)
    note_surroundings()
