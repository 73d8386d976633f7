"""Mechanism: a bucket of parameters of which this rank keeps its share, whole only for as long as they are used."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.zero.buckets import ShardBucket
from lightning_parallel.zero.link import not_a_value, stand_in
from lightning_parallel.zero.shards import BucketLayout
from lightning_parallel.zero.share_home import Loan

if TYPE_CHECKING:
    from lightning_parallel.zero.host_storage import HostStorage
    from lightning_parallel.zero.share_home import DistantHome

__all__ = ["Presence", "UnitBucket"]


class Presence(Enum):
    """Where the values of a bucket are."""

    AWAY = "each rank has its share"
    COMING = "on their way"
    HERE = "whole on this rank"


class UnitBucket(ShardBucket):
    """`own` is this rank's share of the values; `values` are all of them between `gather` and `drop`.

    Each gather fills new memory, and dropping it forgets that memory: what somebody else still refers to stays valid,
    and is never overwritten. While values are not there, parameters have their shape and read as not-a-number.

    Args:
        layout: who owns what.
        parameters: one for each slot.
        group: in which gradients are summed.
        gathers: the same ranks, for values: these travel in an order of their own.
        is_replicated: no optimizer updates these parameters: every rank gets their full gradients.
        storage: has the optimizer's side in host memory; None if it lies beside the parameters.
        sums_wide: see `ShardBucket`.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        group: ProcessGroup | None,
        gathers: ProcessGroup | None,
        is_replicated: bool = False,
        storage: HostStorage | None = None,
        sums_wide: bool = True,
    ) -> None:
        super().__init__(layout, parameters, group, False, is_replicated, storage, sums_wide)
        self.gather_group = gathers
        self.version = 0
        """Grows with every optimizer step."""
        self._device = self.own.device
        self._keep(self.own.clone())
        self.attach(self._between_steps())
        self._nothing = torch.full((), not_a_value(self.own.dtype), dtype=self.own.dtype, device=self.own.device)
        self._hidden = [self._nothing.expand(shape) for shape in self.shapes]
        self.presence = Presence.AWAY
        self.is_showing = False
        """Parameters are being told where their values are."""
        self._arriving: Loan | None = None
        self._landing: Tensor | None = None  # must live until values have arrived
        self._lent = self._nothing  # this rank's share as it was when values came, if it has a home elsewhere
        self._hide()

    def _keep(self, own: Tensor) -> None:
        steps_on_copy = self.has_master
        self.own = own
        if not steps_on_copy:
            self.master = own

    def move_to(self, home: DistantHome) -> None:
        """From now on this rank's share lies away from the device."""
        self.home = home
        self._keep(home.values)

    # -------------------------------------------------------------- presence
    def gather(self) -> None:
        """Begins to bring all values here; if they are here, takes part for the others. Collective over the group."""
        self._wait()
        with torch.inference_mode(False):
            self._landing = torch.empty(self.layout.size, dtype=self.own.dtype, device=self._device)
            self._arriving = self._begin_gathering(self._landing)
        if self.presence is Presence.AWAY:
            self.values = self._landing
            self._lent = self._arriving.share
            self.presence = Presence.COMING

    def _begin_gathering(self, full: Tensor) -> Loan:
        def gather(share: Tensor) -> comm.Work | None:
            return self._gather(full, share, async_op=True)

        return Loan(self.own, gather(self.own)) if self.home is None else self.home.lend(gather)

    def complete(self) -> None:
        """Waits for values that are on their way; parameters are whole."""
        if self.presence is not Presence.COMING:
            return
        self._wait()
        with torch.inference_mode(False):
            self._places = self._views(self.values)
            self._show(self._places)
        self.presence = Presence.HERE

    def _wait(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
        self._arriving = self._landing = None

    def read_ahead(self) -> None:
        """A gather is expected soon."""
        if self.home is not None and self.presence is Presence.AWAY:
            self.home.read_ahead()

    def drop(self) -> None:
        """Frees the values. What was written into the parameters in the meantime stays."""
        self.take_back()
        self.discard()

    def discard(self) -> None:
        """Frees values that are old."""
        self._wait()
        if self.presence is not Presence.AWAY:
            self._hide()
        if self.home is not None:
            self.home.forget()

    def _hide(self) -> None:
        with torch.inference_mode(False):
            self._show(self._hidden)
            self._places = []
            self.values = self._nothing.new_empty(0)
        self._lent = self._nothing
        self.presence = Presence.AWAY

    def _show(self, values: Sequence[Tensor]) -> None:
        self.is_showing = True
        for value, p in zip(values, self.parameters, strict=True):
            p.data = value
        self.is_showing = False

    @torch.no_grad()
    def take_back(self) -> None:
        """Takes over what was written into this rank's share of the values, if they are here."""
        if self.presence is not Presence.HERE:
            return
        self.readmit()
        part = self.values[self._start : self._stop]
        if self.home is None:
            self.own.copy_(part)
        else:
            self.home.take_back(part, self._lent)

    # -------------------------------------------------------------- what a bucket of whole parameters does differently
    def share_values(self) -> comm.Work | None:
        """Nothing travels after a step: values are gathered when they are used."""
        return None

    def full_values(self) -> list[Tensor]:
        """All values of every parameter, in memory of their own. Collective over the group."""
        full = torch.empty(self.layout.size, dtype=self.own.dtype, device=self._device)
        self._begin_gathering(full).wait()
        if self.home is not None and self.presence is Presence.AWAY:
            self.home.forget()
        return self._views(full)

    def gather_one(self, place: int, share: Tensor) -> Tensor:
        """One parameter, or a copy of it, from every rank's share. Collective over the group."""
        shape = self.shapes[place]
        ranges = [self.layout.piece(place, rank) or (0, 0) for rank in range(comm.group_size(self.gather_group))]
        sizes = [stop - start for start, stop in ranges]
        if not any(sizes):
            return torch.empty(shape, dtype=share.dtype, device=self._device)
        return comm.all_gather_dim(share.reshape(-1).to(self._device), self.gather_group, 0, sizes).view(shape)

    def share_of(self, place: int) -> Tensor:
        """This rank's part of a parameter's values, empty if there is none: a view, or a copy if it lies in a file."""
        piece = self.pieces[place]
        if piece is None:
            return self.own.new_empty(0)
        start = self._start_of(place)
        stop = start + piece[1] - piece[0]
        return self._shaped(place, self.own[start:stop] if self.home is None else self.home.read(start, stop))

    def put_share(self, place: int, share: Tensor) -> None:
        """Takes a part of a parameter's values that may be what `share_of` returned, and was written into."""
        if self.pieces[place] is None:
            return
        if self.home is not None:
            self.home.write(self._start_of(place), share)
        elif (part := self.share_of(place)).data_ptr() != share.data_ptr():
            part.copy_(share)

    def write(self, place: int, full: Tensor) -> None:
        """Takes this rank's part of a parameter's new values, and all of them if they are here."""
        new = self.cut(place, full)
        if new is not None:
            self.put_share(place, new)
        if self.presence is not Presence.AWAY:
            self._wait()
            self._views(self.values)[place].copy_(full)

    def release(self) -> None:
        """Forgets gradients; this rank's share stays until `forget_share`."""
        self.drop()
        self.clear()

    def leave_device(self) -> None:
        """Parameters are on the host, without values, which is what moving them there would make whole memory for."""
        self._show([stand_in(p.shape, p.dtype) for p in self.parameters])

    def forget_share(self) -> None:
        """Frees this rank's share; float32 copies stay, for checkpoints of the finished run."""
        self.home = None
        self._keep(self.own.new_empty(0))
        self.shards = [None] * len(self.shards)
