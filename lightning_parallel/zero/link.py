"""Mechanism: copies between a device and host memory that run beside everything else, and the host's buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Awaited", "HostBuffers", "HostLink", "Transfer", "bytes_of", "not_a_value", "stand_in"]


class Awaited(Protocol):
    """Something that has begun."""

    def wait(self) -> None:
        """Lets the host wait until it is done."""


@dataclass(frozen=True)
class Transfer:
    """A copy that has begun; on a device without streams it is done."""

    event: Any = None

    def wait(self) -> None:
        """Lets the host wait until it is done."""
        if self.event is not None:
            self.event.synchronize()

    def order(self) -> None:
        """Lets what is given to the device from now on wait for it, and not the host."""
        if self.event is not None:
            self.event.wait()


class HostLink:
    """Both directions between a device and the host, which do not wait for each other.

    Args:
        device: where the model is. A CPU is a device like any other: what lies on its host side are copies.
        streams: makes and knows streams as `torch.cuda` does, which it is for GPUs; others have none.
    """

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self._device = device
        self._api = torch.cuda if device.type == "cuda" else streams
        self._streams = [] if self._api is None else [self._api.Stream(device) for _ in range(2)]

    @property
    def pins(self) -> bool:
        """Whether host memory should be pinned, without which copies would not run beside the rest."""
        return bool(self._streams)

    def down(self, source: Tensor, target: Tensor) -> Transfer:
        """Begins a copy from the device to the host, after what was given to the device before."""
        return self._copy(source, target, 0)

    def up(self, source: Tensor, target: Tensor) -> Transfer:
        """Begins a copy from the host to the device. The source must not change until it is done."""
        return self._copy(source, target, 1)

    def _copy(self, source: Tensor, target: Tensor, direction: int) -> Transfer:
        if not self._streams:
            target.copy_(source)
            return Transfer()
        with self._beside(direction):
            target.copy_(source, non_blocking=True)
            (target if source.device.type == "cpu" else source).record_stream(self._streams[direction])
            return self.mark()

    @contextmanager
    def _beside(self, direction: int) -> Iterator[None]:
        stream = self._streams[direction]
        stream.wait_stream(self._api.current_stream(self._device))
        with self._api.stream(stream):
            yield

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Inside, what the device is given begins after what it was given before, and nothing later waits for it.

        Memory that is used inside may be freed by whoever has waited for it; it does not need `record_stream`, with
        which the allocator would keep it for as long as the host is ahead of the device.
        """
        if not self._streams:
            yield
            return
        with self._beside(1):
            yield

    def mark(self) -> Transfer:
        """All that the device was given at this place up to now."""
        return Transfer(self._api.current_stream(self._device).record_event()) if self._streams else Transfer()


class HostBuffers:
    """Host memory that is used again: taking and giving back costs nothing after the first buckets.

    Args:
        pinned: whether the memory is pinned.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[Tensor] = []
        self.nbytes = 0
        """Bytes of all buffers, in use or not."""

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor with whatever was in it."""
        size = count * dtype.itemsize
        fitting = [buffer for buffer in self._free if buffer.numel() == size]
        if fitting:
            self._free = [buffer for buffer in self._free if buffer is not fitting[0]]
            return fitting[0].view(dtype)
        if self._free:  # of another size: buckets of that one are over
            self.nbytes -= self._free.pop(0).numel()
        self.nbytes += size
        with torch.inference_mode(False):  # steps of every kind use it again
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned).view(dtype)

    def give(self, tensor: Tensor) -> None:
        """Gives back what `take` returned, or a view of all of it."""
        self._free.append(tensor.view(torch.uint8))

    def clear(self) -> None:
        """Frees what is not in use."""
        self.nbytes -= sum(buffer.numel() for buffer in self._free)
        self._free = []


def stand_in(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on the host without memory of its own, full of what is not a number, for values that are elsewhere."""
    return torch.full((), not_a_value(dtype), dtype=dtype).expand(shape)


def not_a_value(dtype: torch.dtype) -> float:
    """What values that are elsewhere read as; whole numbers have nothing for it but 0."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a flat tensor on the host, for a file."""
    return tensor.view(torch.uint8).numpy().data
