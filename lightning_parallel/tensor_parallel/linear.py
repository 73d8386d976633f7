"""Mechanism: products with a split weight matrix, forward and backward (Shoeybi et al. 2019, section 3).

Backward starts the sum of the input gradient over the ranks first and computes the weight gradients while it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.products import as_rows, autocast_dtype, cast_operand, product
from lightning_parallel.tensor_parallel import mappings
from lightning_parallel.weight_gradients import PutOff, WeightGradients, refuse_second_derivatives

__all__ = ["column_linears", "row_linear"]


def column_linears(
    x: Tensor,
    group: ProcessGroup,
    *parameters: Tensor | None,
    transposed: bool = False,
    store: WeightGradients | None = None,
) -> tuple[Tensor, ...]:
    """Outputs of several column-parallel linears of the same input; backward reduces the input gradient once.

    Args:
        x: ``(..., in_features)``, equal on every rank.
        group: tensor group of at least two ranks.
        parameters: weight and bias (or None) of each linear in turn; a weight is ``(local out_features, in_features)``.
        transposed: the weights are ``(in_features, local out_features)``.
        store: may put the weights' gradients off.

    Returns:
        One ``(..., local out_features)`` per linear, in the dtype that ``nn.Linear`` would return.
    """
    put_off = None if store is None else store.put_off(*parameters[::2], transposed=transposed)
    if put_off is not None:
        parameters = tuple(p if p is None or i % 2 else p.detach() for i, p in enumerate(parameters))
    dtype = autocast_dtype(x)
    if dtype is not None:
        # Cast out here, where autograd records it: the cache of autocast must not see casts made without gradients.
        x = cast_operand(x, dtype)
        parameters = tuple(None if p is None else cast_operand(p, dtype) for p in parameters)
    return _ColumnLinears.apply(x, group, transposed, put_off, _anchor(put_off), *parameters)


def row_linear(
    x: Tensor,
    group: ProcessGroup,
    weight: Tensor,
    bias: Tensor | None,
    scatter_dim: int | None = None,
    *,
    transposed: bool = False,
    store: WeightGradients | None = None,
) -> Tensor:
    """Output of a row-parallel linear.

    Args:
        x: ``(..., local in_features)``.
        group: tensor group of at least two ranks.
        weight: ``(out_features, local in_features)``.
        bias: ``(out_features,)``, equal on every rank; its gradient is too.
        scatter_dim: return only this rank's torch.chunk slice along that dimension (sequence parallel).
        transposed: the weight is ``(local in_features, out_features)``.
        store: may put the weight's gradient off.

    Returns:
        ``(..., out_features)`` in the dtype that ``nn.Linear`` would return.
    """
    put_off = None if store is None else store.put_off(weight, transposed=transposed)
    if put_off is not None:
        weight = weight.detach()
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = cast_operand(x, dtype), cast_operand(weight, dtype)
        bias = None if bias is None else cast_operand(bias, dtype)
    return _RowLinear.apply(x, group, weight, bias, scatter_dim, transposed, put_off, _anchor(put_off))


def _anchor(put_off: tuple[PutOff, ...] | None) -> Tensor | None:
    """What makes outputs require gradients in place of the weights."""
    return None if put_off is None else put_off[0].store.anchor


class _ColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: ProcessGroup,
        transposed: bool,
        put_off: tuple[PutOff, ...] | None,
        anchor: Tensor | None,
        *parameters: Any,
    ) -> Any:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.group, ctx.transposed, ctx.put_off, ctx.shape = group, transposed, put_off, x.shape
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad
        keeps_input = put_off is not None or any(needs[_FIRST::2])
        ctx.save_for_backward(x if keeps_input else None, *(weights if needs[0] else ()))
        return tuple(product(x, w, b, transposed) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group, transposed, needs = ctx.group, ctx.transposed, ctx.needs_input_grad
        differentiable = torch.is_grad_enabled()  # only under create_graph
        if ctx.put_off is not None:
            refuse_second_derivatives()
        flat = [None if grad is None else as_rows(grad) for grad in grads]
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
        out: list[Tensor | None] = [None if dx is None else dx.view(ctx.shape), None, None, None, None]
        if x is not None:
            x = as_rows(mappings.copy_to_group(x, group) if differentiable else x)
        for i, grad in enumerate(flat):
            weight_grad, bias_grad = None, None
            if grad is not None and ctx.put_off is not None:
                ctx.put_off[i].keep(grad, x)
            elif grad is not None and needs[_FIRST + 2 * i]:
                weight_grad = x.t().mm(grad) if transposed else grad.t().mm(x)
            if grad is not None and needs[_FIRST + 1 + 2 * i]:
                bias_grad = grad.sum(0)
            out += [weight_grad, bias_grad]
        if work is not None:
            work.wait()
        return tuple(out)


_FIRST = 5
"""Place of the first weight among the arguments of `_ColumnLinears`."""


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - autograd functions have no other way in
        ctx: Any,
        x: Tensor,
        group: ProcessGroup,
        weight: Tensor,
        bias: Tensor | None,
        scatter_dim: int | None,
        transposed: bool,
        put_off: tuple[PutOff, ...] | None,
        anchor: Tensor | None,
    ) -> Tensor:
        ctx.group, ctx.transposed, ctx.scatter_dim, ctx.shape = group, transposed, scatter_dim, x.shape
        ctx.put_off = put_off
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[2] or put_off is not None else None, weight if needs[0] else None)
        # The bias enters the sum over the ranks once, inside the first rank's product.
        y = product(x, weight, bias if group.rank() == 0 else None, transposed).contiguous()
        if scatter_dim is None:
            comm.all_reduce_(y, group)
            return y
        ctx.sizes = comm.chunk_sizes(y.shape[scatter_dim], group.size())
        return comm.reduce_scatter_dim(y, group, scatter_dim, ctx.sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs, differentiable = ctx.needs_input_grad, torch.is_grad_enabled()
        if ctx.put_off is not None:
            refuse_second_derivatives()
        if ctx.scatter_dim is not None:
            if differentiable:
                raise RuntimeError("second derivatives through a sequence-parallel linear are not supported")
            grad = comm.all_gather_dim(grad, ctx.group, ctx.scatter_dim, ctx.sizes)
        dbias = as_rows(grad).sum(0) if needs[3] else None
        if differentiable:  # under create_graph: what follows differs between the ranks
            grad = mappings.copy_to_group(grad, ctx.group)
        grad = as_rows(grad)
        dx = dweight = None
        if weight is not None:
            dx = grad.mm(weight.t() if ctx.transposed else weight).view(ctx.shape)
        if x is not None:
            x = as_rows(x)
            if ctx.put_off is not None:
                ctx.put_off[0].keep(grad, x)
            else:
                dweight = x.t().mm(grad) if ctx.transposed else grad.t().mm(x)
        return dx, None, dweight, dbias, None, None, None, None
