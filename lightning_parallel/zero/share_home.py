"""Mechanism: where this rank's share of some values lies, and how it gets to the device and to the optimizer.

Shares of parameters that stay on the device are brought to the host for a step alone (Ren et al. 2021). Those of stage
3 may lie in host memory or in a file for good (Rajbhandari et al. 2021): then each gather borrows them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_parallel.zero.link import Awaited, HostBuffers, HostLink, Transfer, bytes_of, stand_in
from lightning_parallel.zero.offload import Extent
from lightning_parallel.zero.state_file import Pending, StateFile

__all__ = ["DeviceHome", "DistantHome", "FileHome", "HostHome", "ShareHome", "Shelf"]

POSTPONED = 2
"""Units whose values are on their way back from the device, at most."""


class ShareHome(ABC):
    """Where a share lies between steps."""

    @abstractmethod
    def bring(self) -> tuple[Tensor, Awaited]:
        """Begins to bring the share to host memory, where a step changes it."""

    @abstractmethod
    def put(self, values: Tensor) -> Awaited:
        """Begins to put what `bring` returned back, changed."""

    @abstractmethod
    def settle(self, values: Tensor) -> None:
        """That is done, and the memory is not needed any more."""


class DeviceHome(ShareHome):
    """On the device.

    Args:
        share: which stays there.
        link: to the device.
        buffers: memory on the host.
    """

    def __init__(self, share: Tensor, link: HostLink, buffers: HostBuffers) -> None:
        self._share = share
        self._link = link
        self._buffers = buffers

    def bring(self) -> tuple[Tensor, Awaited]:
        """A copy."""
        values = self._buffers.take(self._share.numel(), self._share.dtype)
        return values, self._link.down(self._share, values)

    def put(self, values: Tensor) -> Awaited:
        """What is given to the device from now on sees the new values."""
        transfer = self._link.up(values, self._share)
        transfer.order()
        return transfer

    def settle(self, values: Tensor) -> None:
        """Others may use the memory."""
        self._buffers.give(values)


class DistantHome(ShareHome):
    """Away from the device, which borrows the share for each gather.

    Args:
        share: on the device; it can be freed there afterwards.
        link: to the device.
        values: stand for the share: itself, or something of its size without memory.
    """

    def __init__(self, share: Tensor, link: HostLink, values: Tensor) -> None:
        self._device = share.device
        self._link = link
        self._sent = Transfer()
        self.values = values

    def read_ahead(self) -> None:
        """A gather is expected soon."""

    @abstractmethod
    def lend(self) -> Tensor:
        """The share on the device, for a gather. On CPUs it must not change until `forget`."""

    @abstractmethod
    def take_back(self, values: Tensor) -> None:
        """Takes over the share as it is on the device, where somebody may have written into it."""

    def forget(self) -> None:
        """What was lent is not used any more."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Some elements, on the host."""

    @abstractmethod
    def write(self, start: int, values: Tensor) -> None:
        """Replaces some elements."""

    def _send(self, values: Tensor) -> Tensor:
        if values.device.type == self._device.type:
            return values
        sent = torch.empty(values.shape, dtype=values.dtype, device=self._device)
        self._sent = self._link.up(values, sent)
        self._sent.order()
        return sent


class HostHome(DistantHome):
    """In host memory: pinned for GPUs; on CPUs it stays where it is, and nothing is copied.

    Args:
        share: on the device.
        link: to the device.
    """

    def __init__(self, share: Tensor, link: HostLink) -> None:
        values = share
        if share.device.type != "cpu":
            values = torch.empty(share.shape, dtype=share.dtype, pin_memory=link.pins).copy_(share)
        super().__init__(share, link, values)
        self._taken = Transfer()

    def lend(self) -> Tensor:
        """A copy, except on CPUs."""
        self._taken.wait()
        return self._send(self.values)

    def take_back(self, values: Tensor) -> None:
        """Begins a copy."""
        self._taken = self._link.down(values, self.values)

    def _quiet(self) -> Tensor:
        self._sent.wait()
        self._taken.wait()
        return self.values

    def bring(self) -> tuple[Tensor, Awaited]:
        """It is there."""
        return self._quiet(), Transfer()

    def put(self, values: Tensor) -> Awaited:
        """It is there."""
        return Transfer()

    def settle(self, values: Tensor) -> None:
        """It stays."""

    def read(self, start: int, stop: int) -> Tensor:
        """A view."""
        return self._quiet()[start:stop]

    def write(self, start: int, values: Tensor) -> None:
        """Replaces some elements, unless they are what `read` returned."""
        part = self._quiet()[start : start + values.numel()]
        if part.data_ptr() != values.data_ptr():
            part.copy_(values.reshape(-1))


@dataclass(eq=False)
class Shelf:
    """What all shares in one file have in common.

    Attributes:
        file: of this rank.
        buffers: memory for steps.
        loans: memory for what is lent, and read ahead of that.
        postponed: shares that are on their way back from the device.
    """

    file: StateFile
    buffers: HostBuffers
    loans: HostBuffers
    postponed: deque[FileHome] = field(default_factory=deque)

    def postpone(self, home: FileHome) -> None:
        """Lets a share come back while the host goes on, and waits for those that came long before it."""
        self.postponed.append(home)
        while len(self.postponed) > POSTPONED:
            self.postponed.popleft().resolve()


class FileHome(DistantHome):
    """In a file. What is read for a gather stays in memory until `forget`, to be compared with what comes back.

    Args:
        share: on the device.
        link: to the device.
        shelf: has the file.
        extent: place in the file, for which there is space.
    """

    def __init__(self, share: Tensor, link: HostLink, shelf: Shelf, extent: Extent) -> None:
        super().__init__(share, link, stand_in(share.shape, share.dtype))
        self._shelf = shelf
        self._extent = extent
        self._compares_at_once = share.device.type == "cpu"
        self._lent: Tensor | None = None
        self._reading = Pending([])
        self._returned: tuple[Tensor, Transfer] | None = None
        self._leaves = False
        self.write(0, share)

    def _part(self, start: int, count: int) -> Extent:
        size = self.values.dtype.itemsize
        return Extent(self._extent.offset + start * size, count * size)

    # -------------------------------------------------------------- to the device and back
    def read_ahead(self) -> None:
        """Begins to read."""
        self.resolve()
        if self._lent is None:
            self._lent = self._shelf.loans.take(self.values.numel(), self.values.dtype)
            self._reading = self._shelf.file.read(self._extent, bytes_of(self._lent))

    def lend(self) -> Tensor:
        """What was read ahead; otherwise it is read now."""
        self.read_ahead()
        self._reading.wait()
        assert self._lent is not None, "it was read"
        return self._send(self._lent)

    def take_back(self, values: Tensor) -> None:
        """Writes what has changed; on GPUs later, because the host would have to wait for the device."""
        if self._compares_at_once:
            self._compare(values)
            return
        self.resolve()
        returned = self._shelf.loans.take(values.numel(), values.dtype)
        self._returned = returned, self._link.down(values, returned)
        self._shelf.postpone(self)

    def resolve(self) -> None:
        """Finishes what `take_back` and `forget` have postponed."""
        if self._returned is not None:
            (returned, transfer), self._returned = self._returned, None
            transfer.wait()
            self._compare(returned)
            self._shelf.loans.give(returned)
        if self._leaves:
            self._release()

    def _compare(self, values: Tensor) -> None:
        assert self._lent is not None, "values come back while what was lent is kept"
        if not _same_bits(values, self._lent):
            self._sent.wait()
            self._lent.copy_(values)
            self._shelf.file.write(self._extent, bytes_of(self._lent)).wait()

    def forget(self) -> None:
        """Gives the memory back."""
        self._leaves = self._lent is not None
        if self._returned is None:
            self.resolve()

    def _release(self) -> None:
        assert self._lent is not None, "only what is kept leaves"
        self._reading.wait()
        self._sent.wait()
        self._shelf.loans.give(self._lent)
        self._lent, self._leaves = None, False

    # -------------------------------------------------------------- to the optimizer, and at any time
    def bring(self) -> tuple[Tensor, Awaited]:
        """Begins to read."""
        self.resolve()
        values = self._shelf.buffers.take(self.values.numel(), self.values.dtype)
        return values, self._shelf.file.read(self._extent, bytes_of(values))

    def put(self, values: Tensor) -> Awaited:
        """Begins to write."""
        return self._shelf.file.write(self._extent, bytes_of(values))

    def settle(self, values: Tensor) -> None:
        """Others may use the memory."""
        self._shelf.buffers.give(values)

    def read(self, start: int, stop: int) -> Tensor:
        """A copy."""
        self.resolve()
        with torch.inference_mode(False):
            values = torch.empty(stop - start, dtype=self.values.dtype)
        self._shelf.file.read(self._part(start, stop - start), bytes_of(values)).wait()
        return values

    def write(self, start: int, values: Tensor) -> None:
        """Writes some elements, also into what is lent."""
        self.resolve()
        values = values.detach().to("cpu", self.values.dtype).reshape(-1).contiguous()
        self._shelf.file.write(self._part(start, values.numel()), bytes_of(values)).wait()
        if self._lent is not None:
            self._reading.wait()
            self._sent.wait()
            self._lent[start : start + values.numel()].copy_(values)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bit by bit, so that what is not a number equals itself."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.dtype.itemsize, torch.uint8)
    return torch.equal(one.view(kind), other.view(kind))
