"""Glue: the engines that DeepSpeed makes of modules. It is imported by those who use it only."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["end_engine", "is_engine"]


def is_engine(model: Any) -> bool:
    """Whether a model is an engine of DeepSpeed's."""
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)


def end_engine(engine: Any) -> None:
    """Takes an engine's hooks off its module, which can be given to another engine afterwards."""
    engine.destroy()
    for parameter in engine.module.parameters():
        parameter.grad = None
