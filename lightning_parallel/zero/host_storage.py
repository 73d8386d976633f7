"""Mechanism: the optimizer's side of shards in host memory: what it is, and how it travels (Ren et al. 2021).

The values of parameters stay on the device, sharded or not, and are the truth: a step copies this rank's share of them
to the host, changes it there and copies it back, so that whatever somebody wrote into a parameter counts. In host
memory lie the gradients of the shards, the optimizer's states, and float32 copies of values in half precision. Shares
of stage 3 may lie there as well (`house`): then a step has nothing to copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.zero.homecoming import Postponed
from lightning_parallel.zero.link import Awaited, HostBuffers, HostLink, Transfer, stand_in
from lightning_parallel.zero.share_home import DeviceHome, HostHome, ShareHome

if TYPE_CHECKING:
    from lightning_parallel.zero.buckets import ShardBucket
    from lightning_parallel.zero.unit_bucket import UnitBucket

__all__ = ["HostStorage"]


class HostStorage:
    """Of all buckets that an optimizer steps on.

    For a step, each bucket goes through `fetch`, `arrive`, `send` and `settle`. Between steps the shards of buckets in
    full precision are without values.

    Args:
        device: where the parameters are.
    """

    def __init__(self, device: torch.device) -> None:
        self.link = HostLink(device)
        self.buffers = HostBuffers(self.link.pins)
        self.postponed = Postponed()
        self._gradients: list[Transfer] = []
        self._staged: dict[ShardBucket, tuple[Tensor, Awaited]] = {}

    def adopt(self, buckets: Sequence[tuple[ShardBucket, torch.optim.Optimizer]]) -> None:
        """New buckets, each with the optimizer that steps on it. Collective over the group."""
        for bucket, _ in buckets:
            if bucket.has_master:
                master = torch.empty(bucket.own_size, dtype=bucket.wide, pin_memory=self.link.pins)
                bucket.master = master.copy_(bucket.held_share())
            if bucket.has_master and not bucket.is_narrow:
                bucket.attach(bucket.master)
            else:
                self._detach(bucket)

    def house(self, bucket: UnitBucket) -> None:
        """Lets this rank's share of a unit's parameters lie in host memory. Collective over the group."""
        bucket.move_to(HostHome(bucket.own, self.link, self.postponed))

    def _home(self, bucket: ShardBucket) -> ShareHome:
        return bucket.home or DeviceHome(bucket.own, self.link, self.buffers)

    @staticmethod
    def _detach(bucket: ShardBucket) -> None:
        bucket.attach(stand_in((bucket.own_size,), bucket.gradient_dtype))

    # -------------------------------------------------------------- gradients
    def keep_gradient(self, reduced: Tensor) -> Tensor:
        """A copy in host memory, which is complete after `wait_for_gradients`."""
        kept = torch.empty(reduced.shape, dtype=reduced.dtype, pin_memory=self.link.pins)
        self._gradients.append(self.link.down(reduced, kept))
        return kept

    def wait_for_gradients(self) -> None:
        """Lets the host wait for what `keep_gradient` began."""
        for transfer in self._gradients:
            transfer.wait()
        self._gradients = []

    # -------------------------------------------------------------- steps
    def fetch(self, bucket: ShardBucket) -> None:
        """Begins to bring in what a step on a bucket needs."""
        self._staged[bucket] = self._home(bucket).bring()

    def arrive(self, bucket: ShardBucket, optimizer: torch.optim.Optimizer) -> None:
        """Waits for it; the shards and their states can be used."""
        values, transfer = self._staged[bucket]
        transfer.wait()
        if bucket.has_master:
            bucket.accept_changes(values)
        else:
            bucket.attach(values)

    def send(self, bucket: ShardBucket, optimizer: torch.optim.Optimizer) -> comm.Work | None:
        """Begins to put back what the step changed, on this rank and on the others. Collective over the group.

        Returns:
            A handle to wait for before the parameters are used, if there is one.
        """
        values, _ = self._staged[bucket]
        if bucket.has_master:
            values.copy_(bucket.master)
        else:
            self._detach(bucket)
        self._staged[bucket] = values, self._home(bucket).put(values)
        return bucket.share_values()

    def settle(self, bucket: ShardBucket) -> None:
        """Waits until the bucket needs no memory on the host any more but what stays there between steps."""
        values, transfer = self._staged.pop(bucket)
        transfer.wait()
        self._home(bucket).settle(values)

    # -------------------------------------------------------------- checkpoints and the end
    @contextmanager
    def resident(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[ShardBucket], changed: bool
    ) -> Iterator[None]:
        """Inside, between two steps, the states of some buckets and their float32 copies are in memory.

        Args:
            optimizer: that steps on them.
            buckets: which.
            changed: they are other ones afterwards.
        """
        yield

    def rest(self) -> None:
        """The run is over; what the optimizer has remains."""
        self.buffers.clear()

    def remove(self) -> None:
        """Nothing is needed any more."""
        self.rest()
