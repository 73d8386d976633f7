"""Mechanism: collectives of large tensors in host memory, where gloo's own would copy everything into fresh memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

__all__ = ["gather_slices", "is_worth_it", "sum_slices"]

_LARGE = 2**18
"""Bytes from which copies cost more than the messages of several collectives."""


def is_worth_it(tensor: Tensor) -> bool:
    """Whether a gathered tensor should come from `gather_slices`; the same on every rank."""
    return tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() >= _LARGE


class _Several(Work):
    """Transfers that have begun, as one."""

    def __init__(self, works: Sequence[Work | None]) -> None:
        super().__init__()
        self._works = [work for work in works if work is not None]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for all of them, for each as long as its group allows if there is no other time."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def gather_slices(output: Tensor, tensor: Tensor, group: ProcessGroup) -> Work:
    """Begins to write every rank's ``tensor`` behind one another into ``output``: each rank sends its own to all.

    Args:
        output: flat, ranks times as large as ``tensor``, which may be this rank's slice of it.
        tensor: flat. It must not change until the transfers are over.
        group: of gloo.
    """
    slices = output.view(group.size(), -1).unbind(0)
    own = slices[group.rank()]
    if own.data_ptr() != tensor.data_ptr():
        own.copy_(tensor)
    sources = [dist.get_global_rank(group, rank) for rank in range(group.size())]
    return _Several([dist.broadcast(s, src, group, async_op=True) for s, src in zip(slices, sources, strict=True)])


class _SumOfSlices(_Several):
    """A reduce-scatter that has begun: adds up what the ranks have sent, once it is there."""

    def __init__(self, works: Sequence[Work | None], slices: Sequence[Tensor] | Tensor, output: Tensor) -> None:
        super().__init__(works)
        self._slices, self._output = slices, output

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits, and adds up."""
        is_there = super().wait(timeout)
        if isinstance(self._slices, Tensor):
            torch.sum(self._slices, 0, out=self._output)
        else:
            torch.add(*self._slices, out=self._output)
        return is_there


def sum_slices(output: Tensor, tensor: Tensor, group: ProcessGroup) -> Work:
    """Begins to sum ``tensor`` over the group; ``output`` has this rank's slice of the sum once it was waited for.

    Gloo reduce-scatters by a whole all-reduce, or not at all: here ranks exchange slices.

    Args:
        output: flat; may be this rank's slice of ``tensor``.
        tensor: flat, one equal slice per rank. It must not change until the sum is there.
        group: two ranks or more, of gloo.
    """
    if group.size() > 2:
        received = torch.empty_like(tensor)
        work = dist.all_to_all_single(received, tensor, group=group, async_op=True)
        return _SumOfSlices([work], received.view(group.size(), -1), output)
    # Two ranks need not send anything to themselves, and half the memory.
    own, other = tensor.chunk(2) if group.rank() == 0 else tensor.chunk(2)[::-1]
    received = torch.empty_like(own) if own.data_ptr() == output.data_ptr() else output
    sizes = [0 if rank == group.rank() else own.numel() for rank in range(2)]
    work = dist.all_to_all_single(received, other, sizes, sizes, group=group, async_op=True)
    return _SumOfSlices([work], (own, received), output)
