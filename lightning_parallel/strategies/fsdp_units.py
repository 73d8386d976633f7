"""Glue: modules that torch's FSDP wrapped, by unit."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

from lightning_parallel.strategies import _compat_fsdp

__all__ = ["casts_left_alone", "is_wrapped", "unwrap"]


def casts_left_alone() -> MixedPrecision:
    """For FSDP under autocast: its own casts would put buffers and sums of gradients into 16 bit, too."""
    return MixedPrecision()


def is_wrapped(module: Any) -> bool:
    """Whether a module is a unit of FSDP."""
    return isinstance(module, FullyShardedDataParallel)


def unwrap(wrapped: Any) -> None:
    """Makes a plain module with whole parameters again of what FSDP wrapped. Collective over its ranks.

    Parameters stay the same objects, without gradients, which were shards.

    Args:
        wrapped: the outermost unit, of those that keep the module's parameters (``use_orig_params``).
    """
    module: nn.Module = wrapped.module
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        whole = {parameter: parameter.detach().clone() for parameter in module.parameters()}
    for owner in [*module.modules()]:
        for name, child in [*owner.named_children()]:
            if isinstance(child, FullyShardedDataParallel):
                setattr(owner, name, child.module)
    for parameter, data in whole.items():
        parameter.grad = None
        parameter.data = data
        _compat_fsdp.forget_units(parameter)
