"""Glue: public names of lightning_parallel. Importing it makes the strategy names known to Lightning.

Neither torch nor Lightning is imported by it: the planning and scheduling parts work without both.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from lightning_parallel.lazy_names import lazy_names
from lightning_parallel.when_imported import when_imported

if TYPE_CHECKING:
    from lightning_parallel.layout import ParallelLayout
    from lightning_parallel.strategies import (
        AutoStrategy,
        LossConfig,
        PipelineConfig,
        TensorParallelConfig,
        TensorPipelineStrategy,
        ZeroConfig,
        ZeroStrategy,
    )

__version__ = "0.1.0.dev0"

__all__ = [
    "AutoStrategy",
    "LossConfig",
    "ParallelLayout",
    "PipelineConfig",
    "TensorParallelConfig",
    "TensorPipelineStrategy",
    "ZeroConfig",
    "ZeroStrategy",
    "__version__",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AutoStrategy": "strategies",
        "LossConfig": "strategies",
        "ParallelLayout": "layout",
        "PipelineConfig": "strategies",
        "TensorParallelConfig": "strategies",
        "TensorPipelineStrategy": "strategies",
        "ZeroConfig": "strategies",
        "ZeroStrategy": "strategies",
    },
)


def _register_strategies() -> None:
    importlib.import_module("lightning_parallel.strategies.registry").register_strategies()


# Lightning has no entry point for strategies, and takes seconds to import: names are registered when it is there.
when_imported("lightning.pytorch", _register_strategies)
if "pytorch_lightning" in sys.modules:
    _register_strategies()  # which tells of the mix
