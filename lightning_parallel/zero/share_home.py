"""Mechanism: where this rank's share of some values lies, and how it gets to the device and to the optimizer.

Shares of parameters that stay on the device are brought to the host for a step alone (Ren et al. 2021). Those of stage
3 may lie in host memory or in a file for good (Rajbhandari et al. 2021): then each gather borrows them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.zero.homecoming import Homecoming, Postponed, same_bits
from lightning_parallel.zero.link import Awaited, HostBuffers, HostLink, Transfer, bytes_of, stand_in
from lightning_parallel.zero.offload import Extent
from lightning_parallel.zero.state_file import Pending, StateFile

__all__ = ["DeviceHome", "DistantHome", "FileHome", "HostHome", "Loan", "ShareHome", "Shelf"]


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


@dataclass(frozen=True)
class Loan:
    """A gather that has begun.

    Attributes:
        share: what this rank gives; it must live, and on CPUs must not change, until the loan was waited for.
        work: the collective, if there is one.
        begun: what the device was given for it.
    """

    share: Tensor
    work: comm.Work | None
    begun: Transfer = Transfer()

    def wait(self) -> None:
        """What the device is given from now on comes after it; on CPUs the host waits."""
        self.begun.order()
        if self.work is not None:
            self.work.wait()


class DistantHome(ShareHome):
    """Away from the device, which borrows the share for each gather.

    The copy to the device and the gather run beside what the device computes: only what uses the gathered values
    waits, see `Loan.wait`. Nothing comes back that nobody has written into.

    Args:
        share: on the device; it can be freed there afterwards.
        link: to the device.
        values: stand for the share: itself, or something of its size without memory.
        postponed: see `take_back`.
    """

    def __init__(self, share: Tensor, link: HostLink, values: Tensor, postponed: Postponed) -> None:
        self._device = share.device
        self._link = link
        self._sent = self._taken = Transfer()
        self.values = values
        self._postponed = postponed
        self._compares_at_once = share.device.type == "cpu"
        self._homecoming: Homecoming | None = None

    def read_ahead(self) -> None:
        """A gather is expected soon."""

    @abstractmethod
    def _readied(self) -> Tensor:
        """The share on the host. On CPUs it must not change until `forget`."""

    @abstractmethod
    def _accept(self, values: Tensor) -> None:
        """Takes over the share, into which somebody may have written."""

    def lend(self, gather: Callable[[Tensor], comm.Work | None]) -> Loan:
        """Begins a gather of the share, which is copied to the device for it."""
        self.resolve()
        source = self._readied()
        if source.device.type == self._device.type:
            return Loan(source, gather(source))
        share = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        with self._link.ahead():
            self._taken.order()
            share.copy_(source, non_blocking=True)
            self._sent = self._link.mark()
            return Loan(share, gather(share), self._link.mark())

    def take_back(self, values: Tensor, lent: Tensor) -> None:
        """Takes over the share as it is on the device, if somebody has written into it.

        On a device the host would have to wait for the answer, so that it looks later: when the share is used again, or
        when others have come back after it.

        Args:
            values: as they are now.
            lent: as they were.
        """
        if self._compares_at_once:
            self._accept(values)
            return
        self.resolve()
        self._homecoming = Homecoming(self._link, values, lent)
        self._postponed.add(self)

    def resolve(self) -> None:
        """Finishes what `take_back` has postponed."""
        if self._homecoming is not None:
            homecoming, self._homecoming = self._homecoming, None
            changed = homecoming.changed()
            if changed is not None:
                self._accept(changed)

    def forget(self) -> None:
        """What was lent is not used any more."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Some elements, on the host."""

    @abstractmethod
    def write(self, start: int, values: Tensor) -> None:
        """Replaces some elements."""


class HostHome(DistantHome):
    """In host memory: pinned for GPUs; on CPUs it stays where it is, and nothing is copied.

    Args:
        share: on the device.
        link: to the device.
        postponed: of all homes of one rank.
    """

    def __init__(self, share: Tensor, link: HostLink, postponed: Postponed) -> None:
        values = share
        if share.device.type != "cpu":
            values = torch.empty(share.shape, dtype=share.dtype, pin_memory=link.pins)
            link.down(share, values).wait()
        super().__init__(share, link, values, postponed)

    def _readied(self) -> Tensor:
        return self.values

    def _accept(self, values: Tensor) -> None:
        """On CPUs copying costs less than comparing."""
        self._taken = self._link.down(values, self.values)

    def _quiet(self) -> Tensor:
        self.resolve()
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
        postponed: homes whose shares may have changed on the device.
    """

    file: StateFile
    buffers: HostBuffers
    loans: HostBuffers
    postponed: Postponed = field(default_factory=Postponed)


class FileHome(DistantHome):
    """In a file. What is read for a gather stays in memory until `forget`, to be compared with what comes back.

    Args:
        share: on the device.
        link: to the device.
        shelf: has the file.
        extent: place in the file, for which there is space.
    """

    def __init__(self, share: Tensor, link: HostLink, shelf: Shelf, extent: Extent) -> None:
        super().__init__(share, link, stand_in(share.shape, share.dtype), shelf.postponed)
        self._shelf = shelf
        self._extent = extent
        self._lent: Tensor | None = None
        self._reading = Pending([])
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

    def _readied(self) -> Tensor:
        """What was read ahead; otherwise it is read now."""
        self.read_ahead()
        self._reading.wait()
        assert self._lent is not None, "it was read"
        return self._lent

    def resolve(self) -> None:
        """Finishes what `take_back` and `forget` have postponed."""
        super().resolve()
        if self._leaves:
            self._release()

    def _accept(self, values: Tensor) -> None:
        """Writes what has changed."""
        assert self._lent is not None, "values come back while what was lent is kept"
        if values.device.type == "cpu" and same_bits(values, self._lent):
            return
        self._sent.wait()
        self._link.down(values, self._lent).wait()
        self._shelf.file.write(self._extent, bytes_of(self._lent)).wait()

    def forget(self) -> None:
        """Gives the memory back."""
        self._leaves = self._lent is not None
        if self._homecoming is None:
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
