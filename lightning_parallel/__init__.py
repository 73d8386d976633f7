"""Glue: public names of lightning_parallel. Importing it registers the strategy names with Lightning, if installed.

The planning and scheduling parts work without torch and Lightning; then only they can be imported.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_parallel.layout import ParallelLayout
    from lightning_parallel.strategies import (
        LossConfig,
        PipelineConfig,
        TensorParallelConfig,
        TensorPipelineStrategy,
        ZeroConfig,
        ZeroStrategy,
    )

__version__ = "0.1.0.dev0"

__all__ = [
    "LossConfig",
    "ParallelLayout",
    "PipelineConfig",
    "TensorParallelConfig",
    "TensorPipelineStrategy",
    "ZeroConfig",
    "ZeroStrategy",
    "__version__",
]

_HOMES = {
    "LossConfig": "lightning_parallel.strategies",
    "ParallelLayout": "lightning_parallel.layout",
    "PipelineConfig": "lightning_parallel.strategies",
    "TensorParallelConfig": "lightning_parallel.strategies",
    "TensorPipelineStrategy": "lightning_parallel.strategies",
    "ZeroConfig": "lightning_parallel.strategies",
    "ZeroStrategy": "lightning_parallel.strategies",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


if _is_installed("torch") and _is_installed("lightning"):
    importlib.import_module("lightning_parallel.strategies.registry").register_strategies()
