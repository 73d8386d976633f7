"""Mechanism: a bucket of parameters of which this rank keeps its share, whole only for as long as they are used."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.zero.buckets import ShardBucket
from lightning_parallel.zero.shards import BucketLayout

if TYPE_CHECKING:
    from lightning_parallel.zero.host_storage import HostStorage

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
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        group: ProcessGroup | None,
        gathers: ProcessGroup | None,
        is_replicated: bool = False,
        storage: HostStorage | None = None,
    ) -> None:
        super().__init__(layout, parameters, group, False, is_replicated, storage)
        steps_on_copy = self.has_master
        self.gather_group = gathers
        self.version = 0
        """Grows with every optimizer step."""
        self.own = self.own.clone()
        if not steps_on_copy:
            self.master = self.own
            if storage is None:
                self.attach(self.own)
        fill = float("nan") if self.own.is_floating_point() else 0
        self._nothing = torch.full((), fill, dtype=self.own.dtype, device=self.own.device)
        self.presence = Presence.AWAY
        self._arriving: Any = None
        self._landing: Tensor | None = None  # must live until values have arrived
        self._hide()

    # -------------------------------------------------------------- presence
    def gather(self) -> None:
        """Begins to bring all values here; if they are here, takes part for the others. Collective over the group."""
        self._wait()
        with torch.inference_mode(False):
            self._landing = torch.empty(self.layout.size, dtype=self.own.dtype, device=self.own.device)
        if self.presence is Presence.AWAY:
            self.values = self._landing
            self.presence = Presence.COMING
        self._arriving = self._gather(self._landing, self.own, async_op=True)

    def complete(self) -> None:
        """Waits for values that are on their way; parameters are whole."""
        if self.presence is not Presence.COMING:
            return
        self._wait()
        with torch.inference_mode(False):
            for view, p in zip(self._views(self.values), self.parameters, strict=True):
                p.data = view
        self.presence = Presence.HERE

    def _wait(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
        self._arriving = self._landing = None

    def drop(self) -> None:
        """Frees the values. What was written into the parameters in the meantime stays."""
        self.take_back()
        self.discard()

    def discard(self) -> None:
        """Frees values that are old."""
        self._wait()
        if self.presence is not Presence.AWAY:
            self._hide()

    def _hide(self) -> None:
        with torch.inference_mode(False):
            for p in self.parameters:
                p.data = self._nothing.expand(p.shape)
            self.values = self.own.new_empty(0)
        self.presence = Presence.AWAY

    @torch.no_grad()
    def take_back(self) -> None:
        """Takes over what was written into this rank's share of the values, if they are here."""
        if self.presence is Presence.HERE:
            self.own.copy_(self.values[self._start : self._stop])

    # -------------------------------------------------------------- what a bucket of whole parameters does differently
    def share_values(self) -> comm.Work | None:
        """Nothing travels after a step: values are gathered when they are used."""
        return None

    def full_values(self) -> list[Tensor]:
        """All values of every parameter, in memory of their own. Collective over the group."""
        full = torch.empty(self.layout.size, dtype=self.own.dtype, device=self.own.device)
        self._gather(full, self.own)
        return self._views(full)

    @property
    def is_summed(self) -> bool:
        """Whether the host would not have to wait for the sum of gradients that is on its way."""
        return self._work is None or self.own.device.type == "cuda" or self._work.is_completed()

    def gather_one(self, place: int, share: Tensor) -> Tensor:
        """One parameter, or a copy of it, from every rank's share. Collective over the group."""
        shape = self.parameters[place].shape
        ranges = [self.layout.piece(place, rank) or (0, 0) for rank in range(comm.group_size(self.gather_group))]
        sizes = [stop - start for start, stop in ranges]
        if not any(sizes):
            return share.new_empty(shape)
        return comm.all_gather_dim(share.reshape(-1), self.gather_group, 0, sizes).view(shape)

    def write(self, place: int, full: Tensor) -> None:
        """Takes this rank's part of a parameter's new values, and all of them if they are here."""
        part, new = self.own_part(place, self.own), self.cut(place, full)
        if part is not None and new is not None:
            part.copy_(new)
        if self.presence is not Presence.AWAY:
            self._wait()
            self._views(self.values)[place].copy_(full)

    def release(self) -> None:
        """Forgets gradients; this rank's share stays until `forget_share`."""
        self.drop()
        self.clear()

    def forget_share(self) -> None:
        """Frees this rank's share; float32 copies stay, for checkpoints of the finished run."""
        steps_on_copy = self.has_master
        self.own = self.own.new_empty(0)
        if not steps_on_copy:
            self.master = self.own
        self.shards = [None] * len(self.shards)
