"""Mechanism: collectives and point-to-point over an explicit group. The only place that calls them raw.

A group of None, or of one rank, communicates nothing and copies nothing. Tensors that a caller passes are left as they
are unless the function's name ends in an underscore. Nothing here is differentiable: see `tensor_parallel.mappings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lightning_parallel import host_comm

__all__ = [
    "ProcessGroup",
    "SendRecv",
    "Work",
    "all_gather_dim",
    "all_gather_into",
    "all_reduce_",
    "broadcast_",
    "broadcast_object",
    "check_sizes",
    "chunk_sizes",
    "exchange",
    "gather_objects",
    "global_rank",
    "group_rank",
    "group_size",
    "reduce_",
    "reduce_scatter_dim",
    "reduce_scatter_into",
]

Op = Literal["sum", "max", "min"]
_NAMELESS = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks; 1 for no group."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """Index of this process in the group; 0 for no group."""
    return 0 if group is None else group.rank()


def chunk_sizes(total: int, ranks: int) -> list[int]:
    """Sizes that ``torch.chunk`` gives ``ranks`` parts of ``total``: equal ones, then a shorter one, then zeros.

    >>> chunk_sizes(5, 4)
    [2, 2, 1, 0]
    """
    step = -(-total // ranks)
    return [max(0, min(step, total - rank * step)) for rank in range(ranks)]


def all_reduce_(tensor: Tensor, group: ProcessGroup | None, op: Op = "sum", async_op: bool = False) -> Work | None:
    """Reduce ``tensor`` in place over the group.

    Returns:
        A handle to wait for when ``async_op`` and there is something to do, else None.

    Raises:
        AssertionError: the tensor is not contiguous; backends would write outside of it.
    """
    if group is None or group.size() == 1:
        return None
    _check_contiguous(tensor)
    reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.MIN
    return dist.all_reduce(tensor, op=reduce_op, group=group, async_op=async_op)


def all_gather_into(output: Tensor, tensor: Tensor, group: ProcessGroup | None, async_op: bool = False) -> Work | None:
    """Write every rank's equally large ``tensor`` behind one another into ``output`` (contiguous, ranks times larger).

    Returns:
        A handle to wait for when ``async_op`` and there is something to do, else None.
    """
    if group is None or group.size() == 1:
        output.copy_(tensor.view_as(output))
        return None
    _check_contiguous(output)
    # Flat, because gloo wants parts of the very shape of the input.
    flat, part = _wire(output.view(-1)), _wire(tensor.reshape(-1))
    if host_comm.is_worth_it(flat):
        return _started(host_comm.gather_slices(flat, part, group), async_op)
    # The newer name exists from torch 2.13 on, where the older one warns on every call.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(flat, part, group=group, async_op=async_op)


def reduce_scatter_into(
    output: Tensor, tensor: Tensor, group: ProcessGroup | None, async_op: bool = False
) -> Work | None:
    """Sum ``tensor`` (contiguous, one equal slice per rank) over the group; ``output`` receives this rank's slice.

    ``output`` may be this rank's slice of ``tensor`` itself. Returns as :func:`all_gather_into` does.
    """
    if group is None or group.size() == 1:
        if output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor.view_as(output))
        return None
    _check_contiguous(output)
    tensor = tensor.contiguous()
    if tensor.device.type == "cpu":
        return _started(host_comm.sum_slices(output.view(-1), tensor.view(-1), group), async_op)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, tensor, group=group, async_op=async_op)


def _started(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


def reduce_(tensor: Tensor, rank: int, group: ProcessGroup | None, async_op: bool = False) -> Work | None:
    """Sum ``tensor`` on the rank with index ``rank`` in the group, in place; the others are left with partial sums."""
    if group is None or group.size() == 1:
        return None
    _check_contiguous(tensor)
    return dist.reduce(tensor, dst=global_rank(group, rank), group=group, async_op=async_op)


def global_rank(group: ProcessGroup | None, rank: int) -> int:
    """Global rank of the process with index ``rank`` in the group."""
    return rank if group is None else dist.get_global_rank(group, rank)


def broadcast_(tensor: Tensor, src_global: int, group: ProcessGroup | None, async_op: bool = False) -> Work | None:
    """Overwrite ``tensor`` with that of the rank whose global rank is ``src_global``."""
    if group is None or group.size() == 1:
        return None
    _check_contiguous(tensor)
    return dist.broadcast(_wire(tensor), src=src_global, group=group, async_op=async_op)


def gather_objects(obj: Any, group: ProcessGroup | None) -> list[Any]:
    """Every rank's (picklable) object, in rank order, on every rank. Waits for the device: not for the step."""
    if group is None or group.size() == 1:
        return [obj]
    objects: list[Any] = [None] * group.size()
    dist.all_gather_object(objects, obj, group=group)
    return objects


def broadcast_object(obj: Any, src: int, group: ProcessGroup | None) -> Any:
    """The (picklable) object of the rank whose global rank is ``src``, on every rank. Waits for the device."""
    if group is None or group.size() == 1:
        return obj
    objects = [obj]
    dist.broadcast_object_list(objects, src=src, group=group)
    return objects[0]


@dataclass(frozen=True)
class SendRecv:
    """One transfer of :func:`exchange`: ``tensor`` is sent to, or overwritten by, the global rank ``peer``."""

    tensor: Tensor
    peer: int
    send: bool


def exchange(ops: Sequence[SendRecv], group: ProcessGroup | None) -> list[Work]:
    """Start all transfers as one batch, in which sends and receives cannot block one another.

    Transfers between the same two ranks in the same direction pair up in the order in which they stand. Tensors must
    live, and sent ones stay unchanged, until every returned handle has been waited for.
    """
    if not ops:
        return []
    batch = []
    for transfer in ops:
        if transfer.send:
            batch.append(dist.P2POp(dist.isend, _wire(transfer.tensor.contiguous()), transfer.peer, group))
        else:
            _check_contiguous(transfer.tensor)
            batch.append(dist.P2POp(dist.irecv, _wire(transfer.tensor), transfer.peer, group))
    return list(dist.batch_isend_irecv(batch))


def all_gather_dim(x: Tensor, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenate every rank's ``x`` along ``dim``; ``sizes`` are the ranks' sizes there if they are not all equal."""
    ranks = group_size(group)
    if ranks == 1:
        return x
    dim %= x.dim()
    largest = x.shape[dim] if sizes is None else max(sizes)
    if sizes is not None:
        check_sizes(sizes, ranks, x.shape[dim], group_rank(group), dim)
    if x.shape[dim] < largest:  # backends gather equal tensors only
        padded = x.new_zeros((*x.shape[:dim], largest, *x.shape[dim + 1 :]))
        padded.narrow(dim, 0, x.shape[dim]).copy_(x)
        x = padded
    uneven = sizes is not None and min(sizes) < largest
    if dim == 0 and not uneven:
        out = x.new_empty((ranks * largest, *x.shape[1:]))
        all_gather_into(out, x, group)
        return out
    parts = x.new_empty((ranks, *x.shape))
    all_gather_into(parts, x, group)
    if sizes is not None and uneven:
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts.unbind(0), sizes, strict=True)], dim)
    return torch.cat(parts.unbind(0), dim)


def reduce_scatter_dim(x: Tensor, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Sum ``x`` over the group and keep this rank's slice of ``dim``; slices are ``sizes`` or torch.chunk's."""
    ranks = group_size(group)
    if ranks == 1:
        return x
    dim %= x.dim()
    parts = chunk_sizes(x.shape[dim], ranks) if sizes is None else list(sizes)
    mine, largest = parts[group_rank(group)], max(parts)
    if min(parts) == largest:
        packed = x if dim == 0 else torch.stack(x.split(largest, dim))
    else:
        packed = x.new_zeros((ranks, *x.shape[:dim], largest, *x.shape[dim + 1 :]))
        for slot, part in zip(packed.unbind(0), x.split(parts, dim), strict=True):
            slot.narrow(dim, 0, part.shape[dim]).copy_(part)
    out = x.new_empty((*x.shape[:dim], largest, *x.shape[dim + 1 :]))
    reduce_scatter_into(out, packed, group)
    return out if mine == largest else out.narrow(dim, 0, mine).clone(memory_format=torch.contiguous_format)


def _wire(tensor: Tensor) -> Tensor:
    """The same memory, as bytes if backends have no name for its dtype: these can be moved, but not added up."""
    return tensor.view(-1).view(torch.uint8) if tensor.dtype in _NAMELESS else tensor


def _check_contiguous(tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise AssertionError(
            f"a tensor that is communicated in place must be contiguous, got shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )


def check_sizes(sizes: Sequence[int], ranks: int, mine: int | None, rank: int, dim: int) -> None:
    """Raises ValueError unless there is one size for each rank, and that of this rank is ``mine`` (if given)."""
    if len(sizes) != ranks:
        raise ValueError(f"sizes must name one size for each of {ranks} ranks, got {len(sizes)}")
    if mine is not None and sizes[rank] != mine:
        raise ValueError(f"sizes says that rank {rank} holds {sizes[rank]} along dimension {dim}, but it holds {mine}")
