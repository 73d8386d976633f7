"""Mechanism: computes on one rank alone: collectives end at once, and no rank waits for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Alone"]


class Alone(TorchDispatchMode):
    """Inside, also in backward passes, every collective ends at once, with this rank's own values where others' arrive.

    Shapes and memory are those of the real thing, the results mean nothing. Since nobody takes part, a rank may fail
    anywhere inside, for want of memory above all, without leaving the others in a collective.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        _fill(func._schema.name.rpartition("::")[2], args)
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)


def _fill(name: str, args: Sequence[Any]) -> None:
    """Writes where the others' tensors would have arrived: what comes from memory at random could be no valid index."""
    if name.startswith("recv"):
        for tensor in args[0]:
            tensor.zero_()
    elif name in ("_allgather_base_", "alltoall_base_", "_reduce_scatter_base_"):
        _repeat(args[0], args[1])
    elif name == "allgather_":
        for outputs, own in zip(args[0], args[1], strict=True):
            for output in outputs:
                _repeat(output, own)
    elif name == "alltoall_":
        for output, own in zip(args[0], args[1], strict=True):
            _repeat(output, own)


def _repeat(output: Tensor, own: Tensor) -> None:
    """Fills a tensor with another, over and over."""
    if own.numel() == 0:
        output.zero_()
        return
    times = -(-output.numel() // own.numel())
    values = own.reshape(-1)
    filled = values[: output.numel()] if times == 1 else values.repeat(times)[: output.numel()]
    output.copy_(filled.view_as(output))
