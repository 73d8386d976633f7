"""An accelerator without hardware: tensors on it have no data, and what would make the host wait for it fails.

On a GPU a copy between host and device waits for all that the device has to do before, unless it says that it need not.
Nothing of that shows on CPUs, where everything is done at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from lightning_parallel.alone import Alone

__all__ = ["DEVICE", "HostWait", "Traffic", "UnfinishedCopy", "accelerator", "lone_rank"]

DEVICE = torch.device("lazy:0")
"""The only device besides CPUs whose tensors a build for CPUs can pretend to have."""


class HostWait(AssertionError):
    """The host would have waited for the device."""


class UnfinishedCopy(AssertionError):
    """The host would not have waited, and could have read a copy before it arrived."""


@dataclass
class Traffic:
    """Name of a group -> kinds of devices of the tensors that travelled in it."""

    devices: dict[str, set[str]] = field(default_factory=dict)


class _Watch(Alone):
    """Refuses copies that wait, and lets every collective end at once."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self._note(args)
        elif func is torch.ops.aten._to_copy.default:
            self._check(args[0].device, torch.device(kwargs.get("device") or args[0].device), kwargs)
        elif func is torch.ops.aten.copy_.default:
            positional = {"non_blocking": args[2]} if len(args) > 2 else {}
            self._check(args[1].device, args[0].device, {**positional, **kwargs})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, args: Sequence[Any]) -> None:
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        found = {leaf.device.type for leaf in tree_leaves(list(args)) if isinstance(leaf, torch.Tensor)}
        self.traffic.devices.setdefault(group.group_name, set()).update(found)

    @staticmethod
    def _check(source: torch.device, target: torch.device, options: Mapping[str, Any]) -> None:
        if source.type == target.type or {source.type, target.type} == {"cpu", "meta"}:
            return
        if not options.get("non_blocking"):
            raise HostWait(f"a copy from {source.type} to {target.type} waits for the device")
        if target.type == "cpu":
            raise UnfinishedCopy(f"a copy from {source.type} arrives some time later, but nothing waits for it")


@contextmanager
def accelerator() -> Iterator[Traffic]:
    """Inside, tensors have no data and may be on `DEVICE`; to read a value is an error of torch's."""
    traffic = Traffic()
    with FakeTensorMode(allow_non_fake_inputs=True), _Watch(traffic):
        yield traffic


@contextmanager
def lone_rank(world_size: int, rank: int = 0) -> Iterator[None]:
    """A world of several ranks of which there is one, for what asks for sizes and ranks of groups."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
