"""Mechanism: collectives around modules whose own forward runs on split parameters: experts, latent attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.comm import ProcessGroup
from lightning_parallel.tensor_parallel import mappings
from lightning_parallel.tensor_parallel.layers import derive_class

__all__ = ["convert_experts", "reduce_output", "sum_rotary_gradient"]

_GROUP = "_experts_group"


def convert_experts(module: nn.Module, group: ProcessGroup) -> Callable[[], None]:
    """Make a module of stacked experts compute with a slice of every expert's hidden units; returns what undoes it.

    Its forward gets ``(hidden, expert index, expert weight, ...)``: the gradients of hidden states and weights, and the
    output, are summed over the group.
    """
    original: Any = type(module)
    vars(module)[_GROUP] = group
    module.__class__ = derive_class(original, _SplitExperts)

    def undo() -> None:
        module.__class__ = original
        del vars(module)[_GROUP]

    return undo


class _SplitExperts(nn.Module):
    """Forward of stacked experts of which every rank holds some hidden units."""

    prefix = "Split"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        group: ProcessGroup = getattr(self, _GROUP)

        def copied(value: Any) -> Any:
            wants = isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad
            return mappings.copy_to_group(value, group) if wants else value

        args = tuple(copied(value) for value in args)
        output: Tensor = super().forward(*args, **{name: copied(value) for name, value in kwargs.items()})
        return mappings.reduce_from_group(output, group)


def reduce_output(module: nn.Module, group: ProcessGroup) -> Callable[[], None]:
    """Sum a module's output over the group; returns what undoes it."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return mappings.reduce_from_group(output, group)

    return module.register_forward_hook(hook).remove


def sum_rotary_gradient(name: str, module: nn.Module, rotary: int, group: ProcessGroup) -> Callable[[], None]:
    """For latent attention (DeepSeek-V2): the last ``rotary`` outputs go to every rank's heads without a column layer.

    Each rank sees its heads' part of their gradient, so it is summed over the group. Returns what undoes it.

    Raises:
        ValueError: ``rotary`` is no number between 1 and the output size.
    """
    size = int(getattr(module, "out_features", 0))
    if not 0 < rotary < size:
        raise ValueError(f"{name} (mla_kv): needs 0 < qk_rope_head_dim < {size}, got {rotary}")

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        latent, turned = output.split([size - rotary, rotary], dim=-1)
        return torch.cat([latent, mappings.copy_to_group(turned, group)], dim=-1)

    return module.register_forward_hook(hook).remove
