"""Mechanism: moves between full tensors and the local tensors that a ``ShardSpec`` describes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.tensor_parallel import mappings
from lightning_parallel.tensor_parallel.sharding import ShardSpec

__all__ = ["all_gather_full", "contiguous_sizes", "gather_shards", "shard_tensor", "take_shard", "write_shard"]


def shard_tensor(full: Tensor, spec: ShardSpec, rank: int) -> Tensor:
    """A contiguous copy of what tensor rank ``rank`` holds of ``full``; padding is zero.

    Raises:
        ValueError: the shape of ``full`` does not fit ``spec``.
    """
    spec.local_shape(tuple(full.shape), rank)
    return _cut(full.detach(), spec, rank, spec.dim)


@torch.no_grad()
def write_shard(full: Tensor, local: Tensor, spec: ShardSpec, rank: int) -> None:
    """Write every segment that tensor rank ``rank`` holds from ``local`` to its place in ``full``.

    Raises:
        ValueError: the shape of ``full`` or of ``local`` does not fit ``spec``.
    """
    expected = spec.local_shape(tuple(full.shape), rank)
    if tuple(local.shape) != expected:
        raise ValueError(f"tensor rank {rank} holds shape {expected} of {tuple(full.shape)}, got {tuple(local.shape)}")
    _paste(full, local, spec, rank, spec.dim)


@torch.no_grad()
def all_gather_full(local: Tensor, spec: ShardSpec, full_shape: tuple[int, ...], group: ProcessGroup | None) -> Tensor:
    """The full tensor, on every rank of the group, from every rank's ``local``.

    Raises:
        ValueError: ``full_shape`` or the shape of ``local`` does not fit ``spec``.
    """
    rank = comm.group_rank(group)
    expected = spec.local_shape(tuple(full_shape), rank)
    if tuple(local.shape) != expected:
        raise ValueError(f"tensor rank {rank} holds shape {expected} of {tuple(full_shape)}, got {tuple(local.shape)}")
    return _assemble(local.detach(), spec, group, spec.dim)


def contiguous_sizes(spec: ShardSpec) -> list[int] | None:
    """Every rank's local size when the local tensors in rank order, one behind another, are the full tensor."""
    position = 0
    for rank, segments in enumerate(spec.parts):
        for segment in segments:
            if segment.start != position:
                return None
            position = segment.stop
        if spec.padding and spec.padding[rank]:
            return None
    return [spec.local_size(rank) for rank in range(spec.ranks)]


def gather_shards(x: Tensor, spec: ShardSpec, group: ProcessGroup | None) -> Tensor:
    """Full activations from the ranks' shares along the last dimension, for computation that is equal on every rank.

    Backward gives each rank its slice of the gradient. A range that several ranks hold gets it on its owner alone, so
    that sums over the holders, and over the group, count it once.

    Args:
        x: ``(..., local size)``.
        spec: how the last dimension is split; ``spec.dim`` is not used.
        group: tensor group.
    """
    sizes = contiguous_sizes(spec)
    return _GatherShards.apply(x, spec, group) if sizes is None else mappings.gather_from_group(x, group, -1, sizes)


def take_shard(x: Tensor, spec: ShardSpec, group: ProcessGroup | None) -> Tensor:
    """This rank's share along the last dimension of activations equal on every rank; backward gathers the gradient."""
    sizes = contiguous_sizes(spec)
    return _TakeShard.apply(x, spec, group) if sizes is None else mappings.split_to_group(x, group, -1, sizes)


class _GatherShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: ShardSpec, group: ProcessGroup | None) -> Tensor:
        ctx.spec, ctx.rank = spec, comm.group_rank(group)
        return _assemble(x, spec, group, x.dim() - 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        dim = grad.dim() - 1
        local = _cut(grad, ctx.spec, ctx.rank, dim)
        for segment, where in ctx.spec.local_slices(ctx.rank):
            if segment.owner != ctx.rank:
                local[..., where].zero_()
        return local, None, None


class _TakeShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: ShardSpec, group: ProcessGroup | None) -> Tensor:
        ctx.spec, ctx.group = spec, group
        return _cut(x, spec, comm.group_rank(group), x.dim() - 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _assemble(grad, ctx.spec, ctx.group, grad.dim() - 1), None, None


def _cut(full: Tensor, spec: ShardSpec, rank: int, dim: int) -> Tensor:
    """Copy of the segments of ``rank`` along ``dim``, zeros for its padding."""
    held = [full.narrow(dim, segment.start, segment.size) for segment in spec.parts[rank]]
    missing = spec.local_size(rank) - sum(segment.size for segment in spec.parts[rank])
    if missing or not held:
        held.append(full.new_zeros((*full.shape[:dim], missing, *full.shape[dim + 1 :])))
    return torch.cat(held, dim).contiguous()


def _paste(full: Tensor, local: Tensor, spec: ShardSpec, rank: int, dim: int) -> None:
    for segment, where in spec.local_slices(rank):
        full.narrow(dim, segment.start, segment.size).copy_(local.narrow(dim, where.start, segment.size))


def _assemble(local: Tensor, spec: ShardSpec, group: ProcessGroup | None, dim: int) -> Tensor:
    """The full tensor along ``dim``; what several ranks hold is taken from the first of them."""
    sizes = [spec.local_size(rank) for rank in range(spec.ranks)]
    gathered = comm.all_gather_dim(local, group, dim, sizes)
    if contiguous_sizes(spec) is not None:
        return gathered.clone() if gathered is local else gathered
    full = local.new_empty((*local.shape[:dim], spec.size, *local.shape[dim + 1 :]))
    for rank, part in reversed(list(enumerate(gathered.split(sizes, dim)))):
        _paste(full, part, spec, rank, dim)
    return full
