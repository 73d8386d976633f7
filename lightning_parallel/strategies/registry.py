"""Glue: the strategy names that `Trainer(strategy=...)` understands after `import lightning_parallel`."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

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
    warn_about_second_package()


def warn_about_second_package() -> None:
    """`pytorch_lightning` has classes and a registry of its own: a Trainer from there knows none of these names."""
    if "pytorch_lightning" in sys.modules:
        warnings.warn(
            "both lightning.pytorch and pytorch_lightning are imported; lightning_parallel works with "
            "lightning.pytorch only. Import Trainer, LightningModule and callbacks from lightning.pytorch",
            stacklevel=3,
        )
