"""Mechanism: ZeRO stage 3: parameters in shards too, whole for as long as a unit of the model computes with them.

Every parameter has a place from the start, frozen ones too, and each unit's gradients are reduced in every backward
pass: the sum over an accumulation is kept in shards, because in full it would take as much memory as the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.zero.buckets import ShardBucket
from lightning_parallel.zero.gathering import UnitGatherer
from lightning_parallel.zero.host_storage import HostStorage
from lightning_parallel.zero.sharder import ShardOptions, ZeroSharder
from lightning_parallel.zero.shards import BucketLayout, Item, plan_buckets
from lightning_parallel.zero.unit_bucket import Presence, UnitBucket
from lightning_parallel.zero.unit_watch import UnitWatch

__all__ = ["UnitSharder"]

WITHOUT_LIMIT = 2**62
"""Bytes of a bucket: a unit has one of each kind, however large."""


class UnitSharder(ZeroSharder):
    """Shards parameters, gradients and optimizer states over a group.

    Used as `ZeroSharder`, with every step inside of `step()`.

    Args:
        units: number of the unit of every parameter, in the order of the model.
        optimizers: whose states are sharded.
        group: the data-parallel group.
        options: see `ShardOptions`.
        gatherer: gathers the units, of which it knows the modules.
        trains: whether gradients will be asked for at all.
        device: where units are computed with; None: where the parameters are.

    Raises:
        ValueError: an optimizer cannot be sharded.
    """

    def __init__(
        self,
        units: Mapping[nn.Parameter, int],
        optimizers: Sequence[torch.optim.Optimizer],
        group: ProcessGroup | None,
        options: ShardOptions,
        gatherer: UnitGatherer,
        trains: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self._target = device
        self.gatherer = gatherer
        self.trains = trains
        self._units = {id(p): unit for p, unit in units.items()}
        self._asleep: dict[int, UnitBucket] = {}
        self._is_placing = False
        self.watch: UnitWatch | None = None
        super().__init__(units, optimizers, group, replace(options, bucket_bytes=WITHOUT_LIMIT))
        self.max_in_flight = 1
        self.sums_hold_host = self._device.type != "cuda"
        """Whether the host has to wait for sums; else the device's stream does."""

    # -------------------------------------------------------------- places
    def refresh(self) -> None:
        """Gives a place to every parameter, and another one to those that have become trainable."""
        self._is_placing = True
        waking = [p for p in self._all if self._is_trained(p) and id(p) in self._asleep]
        if waking:
            self._wake(waking)
        if self.trains:
            super().refresh()
        rest = [p for p in self._all if id(p) not in self._places and id(p) not in self._asleep]
        if rest:
            self._lay_asleep(rest)
        self._is_placing = False

    def _is_trained(self, parameter: nn.Parameter) -> bool:
        return self.trains and parameter.requires_grad

    @property
    def _device(self) -> torch.device:
        """Where units are computed with, whose parameters get there when they are sharded."""
        return super()._device if self._target is None else self._target

    def _unit_of(self, parameter: nn.Parameter) -> int:
        return self._units[id(parameter)]

    def _make_bucket(
        self, layout: BucketLayout, members: list[nn.Parameter], is_replicated: bool, storage: HostStorage | None
    ) -> UnitBucket:
        for p in members:
            p.data = p.data.to(self._device)
        bucket = UnitBucket(
            layout, members, self.group, self.gatherer.group, is_replicated, storage, self.options.sums_wide
        )
        self.gatherer.units[self._unit_of(members[0])].buckets.append(bucket)
        if storage is not None:
            self._house(bucket)
        return bucket

    def _house(self, bucket: UnitBucket) -> None:
        offload = self.options.offload
        if self.storage is not None and offload is not None and offload.parameters:
            self.storage.house(bucket)

    def _lay_asleep(self, parameters: list[nn.Parameter]) -> None:
        """Shards frozen parameters, which have no gradient and no float32 copy."""
        items = [Item(p.numel(), (self._unit_of(p), p.dtype, p.device)) for p in parameters]
        for layout in plan_buckets(items, comm.group_size(self.group), WITHOUT_LIMIT):
            members = [parameters[slot.index] for slot in layout.slots]
            bucket = self._make_bucket(layout, members, True, None)
            self._house(bucket)
            bucket.master = bucket.own
            bucket.shards = [None] * len(members)
            self._asleep |= {id(p): bucket for p in members}

    @torch.no_grad()
    def _wake(self, parameters: list[nn.Parameter]) -> None:
        """Makes all parameters of some buckets whole, so that each can get the place that it needs now. Collective."""
        for bucket in {id(b): b for b in (self._asleep[id(p)] for p in parameters)}.values():
            bucket.drop()
            for p, full in zip(bucket.parameters, bucket.full_values(), strict=True):
                p.data = full
                del self._asleep[id(p)]
            self.gatherer.units[self._unit_of(bucket.parameters[0])].buckets.remove(bucket)

    @property
    def unit_buckets(self) -> Iterator[UnitBucket]:
        """Every bucket, also those of frozen parameters, in the same order on every rank."""
        return (bucket for unit in self.gatherer.units for bucket in unit.buckets)

    # -------------------------------------------------------------- steps
    @contextmanager
    def step(self, kind: str, lockstep: bool = True) -> Iterator[None]:
        """Around everything that computes with parameters; see `UnitGatherer.step`."""
        if lockstep:
            self.refresh()
        with self.gatherer.step(kind, lockstep), nullcontext() if self.watch is None else self.watch.watching(kind):
            yield

    def prepare(self) -> None:
        """As in every stage; modules may run again from now on, until `finish`."""
        super().prepare()
        self.gatherer.begin_backward()

    def refuse_kept(self, loss: Tensor) -> None:
        """Raises AbsentParameterError if a function in the graph of a loss keeps parameters past autograd."""
        if self.watch is not None:
            self.watch.refuse_kept(loss)

    def finish(self) -> None:
        """As in every stage; frees what the backward pass has gathered."""
        self.gatherer.end_backward()
        super().finish()

    def _land(self, bucket: ShardBucket) -> None:
        """The others may need a unit before they get to this reduction.

        A device that waits for the sum in its stream would not send them that unit either. Hence the host waits, and
        serves them, unless all go through the same units. Once nobody asks any more, nobody would answer either.
        """
        if self.gatherer.is_asked and (self.sums_hold_host or self.gatherer.may_part):
            self.gatherer.serve_until(lambda: bucket.has_landed)
        bucket.wait()

    def before_step(self, buckets: Sequence[ShardBucket]) -> None:
        """What was written into parameters that are here counts in the step."""
        for bucket in cast(Sequence[UnitBucket], buckets):
            bucket.take_back()
        super().before_step(buckets)

    @torch.no_grad()
    def after_step(self, buckets: Sequence[ShardBucket], works: Sequence[comm.Work] | None = None) -> None:
        """Nothing is sent: parameters are gathered when they are used."""
        super().after_step(buckets, works)
        self.gatherer.forget(cast(Sequence[UnitBucket], buckets))

    def close(self) -> None:
        """As in every stage, but parameters are not whole; their shares stay. May be called again."""
        self.gatherer.close()
        super().close()
        for bucket in self.unit_buckets:
            bucket.release()

    def leave_device(self) -> None:
        """Parameters are on the host from now on, still without values: moving the module there takes no memory."""
        for bucket in self.unit_buckets:
            bucket.leave_device()

    def forget_values(self) -> None:
        """The run is over, and what is wanted of its parameters is somewhere else."""
        for bucket in self.unit_buckets:
            bucket.forget_share()
        if not self.trains:
            self.discard()

    def discard(self) -> None:
        """Nobody will ask for anything that is in files: removes them."""
        if self.storage is not None:
            self.storage.remove()

    # -------------------------------------------------------------- whole parameters
    def full_values(self, take: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Hands out every whole parameter, one bucket at a time. Collective over the group."""
        for bucket in self.unit_buckets:
            for p, full in zip(bucket.parameters, bucket.full_values(), strict=True):
                take(p, full)

    @torch.no_grad()
    def write_values(self, values: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Replaces the values of some parameters, of which this rank takes its parts."""
        for p, full in values:
            bucket, place = self.bucket_of(p)
            bucket.write(place, full)

    def bucket_of(self, parameter: Tensor) -> tuple[UnitBucket, int]:
        """Bucket and slot of a parameter, frozen or not."""
        buckets = self.gatherer.units[self._units[id(parameter)]].buckets
        places = ((b, place) for b in buckets for place, p in enumerate(b.parameters) if p is parameter)
        return next(places)

    def is_absent(self, parameter: Tensor) -> bool:
        """Whether a parameter's values are not whole on this rank, so that a step would not find them."""
        if self._is_placing:
            return False
        bucket, _ = self.bucket_of(parameter)
        return bucket.presence is not Presence.HERE and not bucket.is_showing

    def share_of(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter's values; empty if it owns nothing of it. See `UnitBucket.share_of`."""
        bucket, place = self.bucket_of(parameter)
        return bucket.share_of(place)

    @torch.no_grad()
    def put_share(self, parameter: Tensor, share: Tensor) -> None:
        """Takes what was written into this rank's part."""
        bucket, place = self.bucket_of(parameter)
        bucket.put_share(place, share)
