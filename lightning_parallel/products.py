"""Mechanism: what custom autograd functions of linear layers share: products as torch would make them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["as_rows", "autocast_dtype", "cast_operand", "product"]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast wants for matrix products on the device of ``x``; None outside of autocast."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def cast_operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast does to an operand: every floating dtype is cast, except double."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """``x W^T + b`` as a custom function may return it; `transposed`: the weight is ``(inputs, outputs)``."""
    y = F.linear(x, weight.t() if transposed else weight, bias)
    # Users may change an activation in place, but not a view that a custom function returned: make it no view.
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def as_rows(tensor: Tensor) -> Tensor:
    """As a matrix of one row per token, also for one token or for empty rows."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)
