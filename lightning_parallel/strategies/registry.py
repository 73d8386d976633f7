"""Glue: the strategy names that `Trainer(strategy=...)` understands after `import lightning_parallel`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_parallel.strategies.refusals import note_surroundings
from lightning_parallel.strategies.tensor_pipeline import TensorPipelineStrategy

__all__ = ["STRATEGY_NAMES", "register_strategies"]

STRATEGY_NAMES = ("tp_pp", "tp", "pp")


def register_strategies() -> None:
    """Registers `tp_pp`, `tp` and `pp`; calling it again changes nothing."""
    entries: dict[str, tuple[str, dict[str, Any]]] = {
        "tp_pp": ("tensor x pipeline x data parallel", {}),
        "tp": ("tensor x data parallel", {"pipeline_parallel_size": 1}),
        "pp": ("pipeline x data parallel", {"tensor_parallel_size": 1}),
    }
    for name, (description, options) in entries.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, TensorPipelineStrategy, description=description, **options)
    note_surroundings()
