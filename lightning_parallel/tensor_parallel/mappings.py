"""Mechanism: differentiable collectives between activations that ranks hold alike, in slices, or as partial results.

The pairs are those of tensor parallelism (Shoeybi et al. 2019, figure 3: f and g) and of sequence parallelism
(Korthikanti et al. 2022, figure 5: g and g-bar); each function's backward is the forward of its partner, so second
derivatives exist too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.comm import (
    ProcessGroup,
    all_gather_dim,
    all_reduce_,
    check_sizes,
    chunk_sizes,
    group_size,
    reduce_scatter_dim,
)

__all__ = [
    "copy_to_group",
    "gather_from_group",
    "gather_sequence",
    "reduce_from_group",
    "reduce_from_group_",
    "reduce_scatter_sequence",
    "scatter_sequence",
    "split_to_group",
]


def copy_to_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Hand ``x``, equal on every rank, to split computation: forward identity, backward all-reduce."""
    return x if group_size(group) == 1 else _CopyToGroup.apply(x, group)


def reduce_from_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum the ranks' partial results: forward all-reduce, backward identity."""
    return x if group_size(group) == 1 else _ReduceFromGroup.apply(x, group, False)


def reduce_from_group_(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """:func:`reduce_from_group` that overwrites ``x``, for a tensor that nobody else sees."""
    return x if group_size(group) == 1 else _ReduceFromGroup.apply(x, group, x.is_contiguous())


def gather_from_group(x: Tensor, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenate the ranks' slices for computation that is equal on every rank: forward all-gather, backward slice.

    Args:
        x: this rank's slice.
        group: tensor group.
        dim: dimension that is split.
        sizes: every rank's size along ``dim`` when they are not all equal.
    """
    return x if group_size(group) == 1 else _GatherFromGroup.apply(x, group, dim, sizes)


def split_to_group(x: Tensor, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's slice of ``x``, which is equal on every rank: forward slice, backward all-gather.

    Slices are ``sizes`` or those of ``torch.chunk``.
    """
    if group_size(group) == 1:
        return x
    return _SplitToGroup.apply(x, group, dim, sizes or chunk_sizes(x.shape[dim], group_size(group)))


def scatter_sequence(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """Enter a sequence-parallel region with ``x`` equal on every rank: forward slice, backward all-gather."""
    return split_to_group(x, group, dim)


def gather_sequence(x: Tensor, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """From a sequence-parallel region to split computation: forward all-gather, backward reduce-scatter."""
    return x if group_size(group) == 1 else _GatherSequence.apply(x, group, dim, sizes)


def reduce_scatter_sequence(
    x: Tensor, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """From partial results to a sequence-parallel region: forward reduce-scatter, backward all-gather."""
    if group_size(group) == 1:
        return x
    return _ReduceScatterSequence.apply(x, group, dim, sizes or chunk_sizes(x.shape[dim], group_size(group)))


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Not in place: autograd may hand the same gradient to other nodes, or an expanded one.
        return _ReduceFromGroup.apply(grad, ctx.group, False), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, inplace: bool) -> Tensor:
        ctx.group = group
        if inplace:
            ctx.mark_dirty(x)
        else:
            x = x.clone(memory_format=torch.contiguous_format)
        all_reduce_(x, group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _CopyToGroup.apply(grad, ctx.group), None, None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.group, ctx.dim = group, dim
        ctx.sizes = [x.shape[dim]] * group.size() if sizes is None else sizes
        return all_gather_dim(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _SplitToGroup.apply(grad, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _SplitToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int]) -> Tensor:
        check_sizes(sizes, group.size(), None, group.rank(), dim)
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        # A copy, so that the caller may change it in place.
        return x.split(list(sizes), dim)[group.rank()].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _GatherFromGroup.apply(grad, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _GatherSequence(_GatherFromGroup):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _ReduceScatterSequence.apply(grad, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return reduce_scatter_dim(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _GatherSequence.apply(grad, ctx.group, ctx.dim, ctx.sizes), None, None, None
