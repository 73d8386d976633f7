"""Mechanism: products with a split weight matrix, forward and backward (Shoeybi et al. 2019, section 3).

Backward starts the sum of the input gradient over the ranks first and computes the weight gradients while it runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.tensor_parallel import mappings

__all__ = ["autocast_dtype", "column_linears", "row_linear"]


def column_linears(
    x: Tensor, group: ProcessGroup, *parameters: Tensor | None, transposed: bool = False
) -> tuple[Tensor, ...]:
    """Outputs of several column-parallel linears of the same input; backward reduces the input gradient once.

    Args:
        x: ``(..., in_features)``, equal on every rank.
        group: tensor group of at least two ranks.
        parameters: weight and bias (or None) of each linear in turn; a weight is ``(local out_features, in_features)``.
        transposed: the weights are ``(in_features, local out_features)``.

    Returns:
        One ``(..., local out_features)`` per linear, in the dtype that ``nn.Linear`` would return.
    """
    dtype = autocast_dtype(x)
    if dtype is not None:
        # Cast out here, where autograd records it: the cache of autocast must not see casts made without gradients.
        x = _cast_operand(x, dtype)
        parameters = tuple(None if p is None else _cast_operand(p, dtype) for p in parameters)
    return _ColumnLinears.apply(x, group, transposed, *parameters)


def row_linear(
    x: Tensor,
    group: ProcessGroup,
    weight: Tensor,
    bias: Tensor | None,
    scatter_dim: int | None = None,
    *,
    transposed: bool = False,
) -> Tensor:
    """Output of a row-parallel linear.

    Args:
        x: ``(..., local in_features)``.
        group: tensor group of at least two ranks.
        weight: ``(out_features, local in_features)``.
        bias: ``(out_features,)``, equal on every rank; its gradient is too.
        scatter_dim: return only this rank's torch.chunk slice along that dimension (sequence parallel).
        transposed: the weight is ``(local in_features, out_features)``.

    Returns:
        ``(..., out_features)`` in the dtype that ``nn.Linear`` would return.
    """
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = _cast_operand(x, dtype), _cast_operand(weight, dtype)
        bias = None if bias is None else _cast_operand(bias, dtype)
    return _RowLinear.apply(x, group, weight, bias, scatter_dim, transposed)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast wants for matrix products on the device of ``x``; None outside of autocast."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast_operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast does to an operand: every floating dtype is cast, except double."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    y = F.linear(x, weight.t() if transposed else weight, bias)
    # Users may change an activation in place, but not a view that a custom function returned: make it no view.
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def _rows(tensor: Tensor) -> Tensor:
    """As a matrix of one row per token, also for one token or for empty rows."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


class _ColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, transposed: bool, *parameters: Any) -> Any:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.group, ctx.transposed, ctx.shape = group, transposed, x.shape
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if any(needs[3::2]) else None, *(weights if needs[0] else ()))
        return tuple(_product(x, w, b, transposed) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group, transposed, needs = ctx.group, ctx.transposed, ctx.needs_input_grad
        differentiable = torch.is_grad_enabled()  # only under create_graph
        flat = [None if grad is None else _rows(grad) for grad in grads]
        dx, work = None, None
        if needs[0]:
            for grad, weight in zip(flat, weights, strict=True):
                if grad is not None:
                    weight = weight.t() if transposed else weight
                    dx = grad.mm(weight) if dx is None else dx.addmm_(grad, weight)
        if dx is not None and differentiable:
            dx = mappings.reduce_from_group(dx, group)
        elif dx is not None:
            work = comm.all_reduce_(dx, group, async_op=True)
        out: list[Tensor | None] = [None if dx is None else dx.view(ctx.shape), None, None]
        if x is not None:
            x = _rows(mappings.copy_to_group(x, group) if differentiable else x)
        for i, grad in enumerate(flat):
            weight_grad, bias_grad = None, None
            if grad is not None and needs[3 + 2 * i]:
                weight_grad = x.t().mm(grad) if transposed else grad.t().mm(x)
            if grad is not None and needs[4 + 2 * i]:
                bias_grad = grad.sum(0)
            out += [weight_grad, bias_grad]
        if work is not None:
            work.wait()
        return tuple(out)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: ProcessGroup,
        weight: Tensor,
        bias: Tensor | None,
        scatter_dim: int | None,
        transposed: bool,
    ) -> Tensor:
        ctx.group, ctx.transposed, ctx.scatter_dim, ctx.shape = group, transposed, scatter_dim, x.shape
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[2] else None, weight if needs[0] else None)
        # The bias enters the sum over the ranks once, inside the first rank's product.
        y = _product(x, weight, bias if group.rank() == 0 else None, transposed).contiguous()
        if scatter_dim is None:
            comm.all_reduce_(y, group)
            return y
        ctx.sizes = comm.chunk_sizes(y.shape[scatter_dim], group.size())
        return comm.reduce_scatter_dim(y, group, scatter_dim, ctx.sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs, differentiable = ctx.needs_input_grad, torch.is_grad_enabled()
        if ctx.scatter_dim is not None:
            if differentiable:
                raise RuntimeError("second derivatives through a sequence-parallel linear are not supported")
            grad = comm.all_gather_dim(grad, ctx.group, ctx.scatter_dim, ctx.sizes)
        dbias = _rows(grad).sum(0) if needs[3] else None
        if differentiable:  # under create_graph: what follows differs between the ranks
            grad = mappings.copy_to_group(grad, ctx.group)
        grad = _rows(grad)
        dx = dweight = None
        if weight is not None:
            dx = grad.mm(weight.t() if ctx.transposed else weight).view(ctx.shape)
        if x is not None:
            x = _rows(x)
            dweight = x.t().mm(grad) if ctx.transposed else grad.t().mm(x)
        return dx, None, dweight, dbias, None, None
