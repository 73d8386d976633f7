"""Mechanism: ZeRO stages 1 and 2: sums gradients into shards while the last backward pass runs, steps on shards.

Every trainable parameter gets its place in a bucket when it is first seen to be trainable, and keeps it: freezing and
unfreezing later moves no optimizer state between ranks. Gradients of all backward passes of an optimizer step add up
on each rank, in float32 for half precision, and are reduced once (Rajbhandari et al. 2020, section 5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_parallel import comm
from lightning_parallel.bucket_order import BucketOrder
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.zero.buckets import ShardBucket
from lightning_parallel.zero.disk_storage import DiskStorage
from lightning_parallel.zero.gradient_state import GradientState, wide_dtype
from lightning_parallel.zero.host_storage import HostStorage
from lightning_parallel.zero.offload import Offload
from lightning_parallel.zero.optimizer import ShardedOptimizer
from lightning_parallel.zero.placement import needs_whole_parameters, refuse_on_host, refuse_shared_on_disk
from lightning_parallel.zero.shards import BucketLayout, Item, plan_buckets

__all__ = ["ShardOptions", "ZeroSharder"]

MAX_IN_FLIGHT = 4
"""Buckets that may be travelling at once: bounds the memory of stage 2 during the backward pass."""


@dataclass(frozen=True)
class ShardOptions:
    """How gradients are handled.

    Attributes:
        stage: 1 keeps memory for full gradients between steps, 2 and 3 free it bucket by bucket.
        bucket_bytes: a bucket is closed once its gradients take this many bytes.
        average: divide sums by the number of ranks, for losses that were not weighted before the backward pass.
        shows_gradients: gather full gradients into the parameters after the reduction, because somebody looks at them
            or changes them before the optimizer step.
        zero_clears_all: `zero_grad()` also forgets what has accumulated but was not reduced yet. False if a step's
            gradients are already there when it is called.
        offload: where the optimizer's side lies instead of on the device.
        prefetch: units that stage 3 gathers ahead of their use.
        sums_wide: gradients of half-precision parameters are kept and summed in float32, not as they come.
    """

    stage: int = 2
    bucket_bytes: int = 25 * 2**20
    average: bool = False
    shows_gradients: bool = False
    zero_clears_all: bool = True
    offload: Offload | None = None
    prefetch: int = 1
    sums_wide: bool = True

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ValueError(f"stage={self.stage!r} does not exist; use 1, 2 or 3")


class ZeroSharder:
    """Shards gradients and optimizer states of some parameters over a group.

    In every optimizer step: `prepare()` before each backward pass, `arm()` before the last one, `finish()` after it
    (collective), then `deliver()`. The optimizers themselves are used as ever; their `step()` is collective.

    Args:
        parameters: in the order of the model, the same on every rank.
        optimizers: whose states are sharded. They are changed in place until `close()`.
        group: the data-parallel group.
        options: see `ShardOptions`.
        incomplete: parameters whose gradients `complete` must sum over other ranks before they are reduced.
        complete: completes the `.grad` of those; once per optimizer step.

    Raises:
        ValueError: an optimizer cannot be sharded.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        group: ProcessGroup | None,
        options: ShardOptions,
        incomplete: Collection[nn.Parameter] = (),
        complete: Callable[[], None] | None = None,
    ) -> None:
        self.group = group
        self.options = options
        self.buckets: list[ShardBucket] = []
        self._all = list(parameters)
        self._known = {id(p) for p in self._all}
        self._incomplete = {id(p) for p in incomplete}
        self._complete = complete
        self._places: dict[int, tuple[int, int]] = {}
        self._hooks: list[Any] = []
        self._armed = False
        self._order = BucketOrder([])
        self._seen: set[int] = set()
        self._in_flight: deque[ShardBucket] = deque()
        self._reduced: list[ShardBucket] = []
        self._shown: list[nn.Parameter] = []
        self.max_in_flight = MAX_IN_FLIGHT
        self.graph_communicates = False
        """Backward passes wait for other ranks themselves, so that no bucket may let one wait: those that would have to
        send it might be waiting there for this rank."""
        self._kept: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._whole = [needs_whole_parameters(optimizer) for optimizer in optimizers]
        self.storage = self._make_storage(optimizers)
        self.optimizers = [ShardedOptimizer(optimizer, self) for optimizer in optimizers]
        self.refresh()

    @property
    def _device(self) -> torch.device:
        """Where buckets are."""
        return next((p.device for p in self._all), torch.device("cpu"))

    def _make_storage(self, optimizers: Sequence[torch.optim.Optimizer]) -> HostStorage | None:
        offload = self.options.offload
        if offload is None:
            return None
        for optimizer in optimizers:
            refuse_on_host(optimizer, offload.kind)
        if offload.path is not None:
            refuse_shared_on_disk(optimizers)
        device = self._device
        return HostStorage(device) if offload.path is None else DiskStorage(device, self.group, offload.path)

    # -------------------------------------------------------------- places
    def refresh(self) -> None:
        """Gives a place to parameters that have become trainable."""
        new = [p for p in reversed(self._all) if p.requires_grad and id(p) not in self._places]
        if new:
            self._place(new)

    def _place(self, parameters: list[nn.Parameter]) -> None:
        users = {id(p): i for i, o in reversed(list(enumerate(self.optimizers))) for p in o.parameters()}
        takers = [optimizer for optimizer, is_whole in zip(self.optimizers, self._whole, strict=True) if is_whole]
        stay_whole = {id(p) for optimizer in takers for p in optimizer.parameters()}
        items = []
        for p in parameters:
            user, late = users.get(id(p)), id(p) in self._incomplete
            # Those of no optimizer may be added to any later.
            whole = id(p) in stay_whole or (user is None and bool(takers))
            items.append(Item(p.numel(), (self._unit_of(p), p.dtype, p.device, user, late), whole))
        kinds = {wide_dtype(p.dtype) if self.options.sums_wide else p.dtype for p in parameters}
        itemsize = max(kind.itemsize for kind in kinds)
        limit = max(1, self.options.bucket_bytes // itemsize)
        adopted = []
        for layout in plan_buckets(items, comm.group_size(self.group), limit):
            members = [parameters[slot.index] for slot in layout.slots]
            user = users.get(id(members[0]))
            storage = None if user is None else self.storage
            bucket = self._make_bucket(layout, members, user is None, storage)
            if user is not None:
                adopted.append((bucket, self.optimizers[user].optimizer))
            self._places |= {id(p): (len(self.buckets), place) for place, p in enumerate(members)}
            self.buckets.append(bucket)
            if id(members[0]) not in self._incomplete:
                self._hooks += [p.register_post_accumulate_grad_hook(self._on_gradient) for p in members]
        for optimizer in self.optimizers:
            optimizer.cut_states(parameters)
        if self.storage is not None:
            self.storage.adopt(adopted)

    def _unit_of(self, parameter: nn.Parameter) -> Hashable:
        """Only parameters for which this is equal share a bucket."""
        return None

    def _make_bucket(
        self, layout: BucketLayout, members: list[nn.Parameter], is_replicated: bool, storage: HostStorage | None
    ) -> ShardBucket:
        keeps_buffer, sums_wide = self.options.stage == 1, self.options.sums_wide
        return ShardBucket(layout, members, self.group, keeps_buffer, is_replicated, storage, sums_wide)

    def find(self, parameter: torch.Tensor) -> tuple[ShardBucket, int] | None:
        """Bucket and slot of a parameter; None if it was never trainable."""
        entry = self._places.get(id(parameter))
        return None if entry is None else (self.buckets[entry[0]], entry[1])

    def lacks_sums(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether any parameter has a gradient of this rank alone, which no armed pass has summed."""
        return any(b.state is GradientState.LOCAL and any(b.filled) for b in self.buckets_of(parameters))

    def keeps(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient of this rank alone waits here to be summed."""
        found = self.find(parameter)
        return found is not None and found[0].state is GradientState.LOCAL and found[0].filled[found[1]]

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient of a parameter is summed over the ranks."""
        return id(parameter) in self._known

    # -------------------------------------------------------------- backward passes
    def prepare(self) -> None:
        """To be called before each backward pass: what comes out of it must be told from what is shown now."""
        self.refresh()
        for p in self._shown:
            if p.grad is not None and self._is_final(p):
                self._kept.append((p, p.grad))
            p.grad = None
        self._shown = []

    def _is_final(self, parameter: nn.Parameter) -> bool:
        found = self.find(parameter)
        return found is not None and not found[0].filled[found[1]]

    def arm(self) -> None:
        """The coming backward pass completes the gradients: reduce each bucket as soon as it is full."""
        self.refresh()
        waiting = [sum(p.requires_grad for p in bucket.parameters) for bucket in self.buckets]
        late = [id(bucket.parameters[0]) in self._incomplete for bucket in self.buckets]
        self._order = BucketOrder([n + 1 if is_late else n for n, is_late in zip(waiting, late, strict=True)])
        self._seen, self._reduced, self._armed = set(), [], True

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        index, place = self._places[id(parameter)]
        self.buckets[index].add_gradient(place)
        if self._armed and id(parameter) not in self._seen:
            self._seen.add(id(parameter))
            for ready in self._order.arrived(index):
                self._launch(self.buckets[ready])

    def _launch(self, bucket: ShardBucket) -> None:
        if not bucket.is_active:
            return
        while len(self._in_flight) >= self.max_in_flight:
            if self.graph_communicates and not self._in_flight[0].has_landed:
                break
            self._land(self._in_flight.popleft())
        bucket.launch(self.options.average)
        self._in_flight.append(bucket)
        self._reduced.append(bucket)

    def _land(self, bucket: ShardBucket) -> None:
        bucket.wait()

    def finish(self) -> None:
        """Reduces what is left and waits. Collective over the group. Gradients are handed out by `deliver`.

        A parameter that no rank has a gradient of stays without one. Only ranks that miss a gradient look at what the
        others have (which waits for the device).
        """
        if not self._armed:
            raise RuntimeError("finish() needs arm() before the backward pass")
        self._armed = False
        self._take_incomplete()
        for index in self._order.rest():
            self._launch(self.buckets[index])
        counts = [float(present) for bucket in self._reduced for present in bucket.present]
        present = torch.tensor(counts, device="cpu")
        if self._reduced:
            present = present.to(self._reduced[0].values.device, non_blocking=True)
        counting = comm.all_reduce_(present, self.group, async_op=True) if counts else None
        while self._in_flight:
            self._in_flight.popleft().wait()
        if counting is not None:
            counting.wait()
        if not all(counts):
            found = iter(present.tolist())
            for bucket in self._reduced:
                bucket.present = [next(found) > 0 for _ in bucket.present]
        if self.storage is not None:
            self.storage.wait_for_gradients()

    def _take_incomplete(self) -> None:
        if self._complete is not None:
            self._complete()
        for p in self._all:
            if id(p) in self._incomplete and p.grad is not None and p.requires_grad:
                index, place = self._places[id(p)]
                self.buckets[index].add_gradient(place)

    def deliver(self, is_complete: bool = True) -> None:
        """Hands out gradients: to the optimizers' shards, or in full to the parameters if they are looked at.

        Args:
            is_complete: `finish()` has been called; otherwise what has accumulated here is shown, if anything is.
        """
        for p, gradient in self._kept:
            p.grad = gradient
        self._kept = []
        if is_complete:
            for bucket in self._reduced:
                if self.options.shows_gradients or bucket.is_replicated:
                    bucket.deliver_in_full()
                    self._shown += bucket.parameters
                else:
                    bucket.deliver()
            self._reduced = []
        elif self.options.shows_gradients:
            for bucket in self.buckets:
                bucket.show_local()
                self._shown += bucket.parameters

    def clear(self) -> None:
        """Forgets every gradient, as at the start of an optimizer step whose old gradients are still there."""
        for bucket in self.buckets:
            for shard in bucket.shards:
                if shard is not None:
                    shard.grad = None
            bucket.clear()
        self._kept = []

    # -------------------------------------------------------------- optimizer steps
    def buckets_of(self, parameters: Iterable[nn.Parameter]) -> list[ShardBucket]:
        """The buckets that hold any of some parameters, in the order of all buckets."""
        chosen = {self._places[id(p)][0] for p in parameters if id(p) in self._places}
        return [self.buckets[index] for index in sorted(chosen)]

    def before_step(self, buckets: Sequence[ShardBucket]) -> None:
        """Makes the shards of some buckets ready for an optimizer."""
        for bucket in buckets:
            bucket.readmit()
            if self.storage is None:
                bucket.accept_changes(bucket.own)
            if self.options.shows_gradients or bucket.is_replicated:
                bucket.cut_gradients()

    @torch.no_grad()
    def after_step(self, buckets: Sequence[ShardBucket], works: Sequence[comm.Work] | None = None) -> None:
        """Sends the new values of some buckets to every rank. Collective over the group.

        Args:
            buckets: which.
            works: what is left to wait for, if they have been sent.
        """
        sent = [bucket.publish() for bucket in buckets] if works is None else works
        for work in sent:
            if work is not None:
                work.wait()
        if self.options.shows_gradients:
            for bucket in buckets:
                for shard in bucket.shards:
                    if shard is not None:
                        shard.grad = None

    def zero(self, parameters: Iterable[nn.Parameter], set_to_none: bool) -> None:
        """What `zero_grad()` does to the gradients that are not in the parameters."""
        for p in parameters:
            found = self.find(p)
            if found is None:
                continue
            bucket, place = found
            shard = bucket.shards[place]
            if self.options.zero_clears_all and bucket.state is GradientState.LOCAL:
                bucket.filled[place] = False
            if shard is not None and shard.grad is not None:
                shard.grad = None if set_to_none else shard.grad.zero_()

    def resident(
        self, optimizer: ShardedOptimizer, buckets: Sequence[ShardBucket], changed: bool = False
    ) -> AbstractContextManager[None]:
        """Inside, the states of some buckets are in memory; see `HostStorage.resident`."""
        storage = self.storage
        return nullcontext() if storage is None else storage.resident(optimizer.optimizer, buckets, changed)

    def close(self) -> None:
        """Gives parameters and optimizers back as they were, with the trained values. Not collective."""
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        for optimizer in self.optimizers:
            optimizer.release()
        for bucket in self.buckets:
            bucket.release()
        if self.storage is not None:
            self.storage.rest()
