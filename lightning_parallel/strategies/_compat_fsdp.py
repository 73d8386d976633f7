"""Glue: private names of torch's FSDP, by which a module that it wrapped once can be wrapped again."""

from __future__ import annotations

from torch import nn

__all__ = ["forget_units"]


def forget_units(parameter: nn.Parameter) -> None:
    """Lets a parameter that left its unit be put into another: what FSDP takes to be in one is not sharded again."""
    from torch.distributed.fsdp._common_utils import FSDP_FLATTENED  # if it moves, only a second run misses it

    if hasattr(parameter, FSDP_FLATTENED):
        delattr(parameter, FSDP_FLATTENED)
