"""Glue: what a run asks for that Lightning's own strategies do not do, or do otherwise than a plain process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_parallel.blocks import find_blocks
from lightning_parallel.strategies import _compat

__all__ = ["block_classes", "what_lacks"]

_AFTER_BACKWARD = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")


def what_lacks(runtime: str, trainer: Trainer) -> str:
    """Why a strategy of Lightning's should not run what is asked for; empty if it may.

    Args:
        runtime: "ddp", "fsdp" or "deepspeed".
        trainer: with its module connected, before anything is set up.
    """
    module, callbacks = trainer.lightning_module, _compat.callbacks_of(trainer)
    if not module.automatic_optimization:
        return "steps by hand may leave parameters out, which DDP takes for an error"
    if any(isinstance(callback, BaseFinetuning) for callback in callbacks) or not _trains_all(module):
        return "parameters are frozen, whose gradients DDP would not reduce once they are trained"
    if any(type(callback).__name__ == "MicroBatchSizer" for callback in callbacks):  # it builds on the strategies
        return "MicroBatchSizer cuts batches, which the others take as they come"
    if runtime == "ddp":
        return ""
    return _what_sharding_lacks(module, callbacks) or _SHARDERS[runtime](trainer, module)


def block_classes(module: nn.Module) -> frozenset[type[nn.Module]]:
    """Classes of the repeated blocks, of which FSDP makes its units; empty if there are none that could be."""
    try:
        names = find_blocks(module)
    except ValueError:
        return frozenset()
    blocks = [module.get_submodule(name) for name in names]
    inside = {parameter for block in blocks for parameter in block.parameters()}
    uses = [parameter for child in module.modules() for parameter in child.parameters(recurse=False)]
    if sum(parameter in inside for parameter in uses) > len(inside):
        return frozenset()  # tied: no unit owns it alone
    return frozenset(type(block) for block in blocks)


def _trains_all(module: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in module.parameters())


def _what_sharding_lacks(module: LightningModule, callbacks: Iterable[Callback]) -> str:
    for hook in _AFTER_BACKWARD:
        if is_overridden(hook, module, LightningModule):
            return f"{hook} would see gradients in shards"
    averages = [c for c in callbacks if isinstance(c, StochasticWeightAveraging | WeightAveraging)]
    return f"{type(averages[0]).__name__} would average shards" if averages else ""


def _what_fsdp_lacks(trainer: Trainer, module: LightningModule) -> str:
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
        return "Lightning's FSDP does not clip by norm"
    if not block_classes(module):
        return "no repeated blocks were found, of which FSDP could make units"
    return ""


def _what_deepspeed_lacks(trainer: Trainer, module: LightningModule) -> str:
    clips_by_value = trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value"
    return "DeepSpeed does not clip by value" if clips_by_value else ""


_SHARDERS: dict[str, Any] = {"fsdp": _what_fsdp_lacks, "deepspeed": _what_deepspeed_lacks}
