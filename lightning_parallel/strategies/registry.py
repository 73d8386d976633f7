"""Glue: the strategy names that `Trainer(strategy=...)` understands after `import lightning_parallel`.

Names are registered while Lightning itself may still be importing what comes after `lightning.pytorch`, and before the
strategies are loaded: a name stands for a function that loads its class when a Trainer asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning_parallel.strategies as strategies
from lightning_parallel.strategies.surroundings import note_surroundings

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

__all__ = ["STRATEGY_NAMES", "register_strategies"]

_OFFLOADED = ("zero2_offload", "zero3_offload", "zero3_nvme")
_IN_FILES = {"stage": 3, "offload": "nvme", "offload_parameters": True}
STRATEGY_NAMES = ("tp_pp", "tp", "pp", "zero1", "zero2", "zero3", *_OFFLOADED, "auto_parallel")


def register_strategies() -> None:
    """Registers every name of `STRATEGY_NAMES`; calling it again changes nothing."""
    from lightning.pytorch.strategies import StrategyRegistry  # see surroundings.py

    entries: dict[str, tuple[str, str, dict[str, Any]]] = {
        "tp_pp": ("TensorPipelineStrategy", "tensor x pipeline x data parallel", {}),
        "tp": ("TensorPipelineStrategy", "tensor x data parallel", {"pipeline_parallel_size": 1}),
        "pp": ("TensorPipelineStrategy", "pipeline x data parallel", {"tensor_parallel_size": 1}),
        "zero1": ("ZeroStrategy", "data parallel, optimizer state sharded", {"stage": 1}),
        "zero2": ("ZeroStrategy", "data parallel, optimizer state and gradients sharded", {"stage": 2}),
        "zero3": ("ZeroStrategy", "data parallel, parameters sharded too", {"stage": 3}),
        "zero2_offload": ("ZeroStrategy", "zero2, stepping in host memory", {"stage": 2, "offload": "cpu"}),
        "zero3_offload": ("ZeroStrategy", "zero3, stepping in host memory", {"stage": 3, "offload": "cpu"}),
        "zero3_nvme": ("ZeroStrategy", "zero3, optimizer state and parameters in files", _IN_FILES),
        "auto_parallel": ("AutoStrategy", "what the planner finds fastest", {}),
    }
    for name, (class_name, description, options) in entries.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, _maker(class_name), description=description, **options)
    note_surroundings()


def _maker(class_name: str) -> Callable[..., Strategy]:
    """A function that makes a strategy of the package and loads it only then."""

    def make(**options: Any) -> Strategy:
        made: Strategy = getattr(strategies, class_name)(**options)
        return made

    return make
