"""Mechanism: one step of an optimizer on shards that are brought in, or widened, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn, optim

from lightning_parallel import comm
from lightning_parallel.zero.buckets import ShardBucket
from lightning_parallel.zero.offload import Turn, double_buffered
from lightning_parallel.zero.placement import needs_whole_parameters, plain_step

__all__ = ["OffloadedStep"]

_FUSED_ON_CPU = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)


class OffloadedStep:
    """Turns one call of `step` into one per bucket, of which the call itself is the first.

    To be entered with `begin` before the body of `step`, whatever else comes before it, and left with `finish` right
    after it: between the two, the optimizer's groups hold shards, with the same options for all of them. Optimizers
    that may look at more than single elements get all buckets at once.

    Gradients in half precision are widened for the bucket that is stepped. On the host, where a class of torch's has a
    fused kernel for CPUs and its user has chosen none, that is used: its results differ from those of the others in the
    last bit, and it takes an eighth of the time.

    Args:
        optimizer: whose groups hold shards.
        buckets: of these shards, the same on every rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: Sequence[ShardBucket]) -> None:
        self._optimizer = optimizer
        whole = needs_whole_parameters(optimizer)
        self._turns = [list(buckets)] if whole and buckets else [[bucket] for bucket in buckets]
        self._groups = [(group, group["params"]) for group in optimizer.param_groups]
        self._works: list[comm.Work] = []
        self._on_host = any(bucket.storage is not None for bucket in buckets)
        self._fused = [group for group, _ in self._groups if self._on_host and _could_be_fused(optimizer, group)]
        self._walk = self._run()

    @torch.no_grad()
    def begin(self) -> None:
        """Leaves the optimizer with the first bucket."""
        for group in self._fused:
            group["fused"] = True
        # A loss scaler leaves them on the device; a fused step would use them before a copy of its own has arrived.
        for name in ("grad_scale", "found_inf"):
            value = getattr(self._optimizer, name, None)
            if self._on_host and isinstance(value, torch.Tensor):
                setattr(self._optimizer, name, value.cpu())
        next(self._walk, None)

    @torch.no_grad()
    def finish(self) -> list[comm.Work]:
        """Steps on the others; returns what to wait for before parameters are used."""
        next(self._walk, None)
        for group in self._fused:
            group["fused"] = None
        for group, shards in self._groups:
            group["params"] = shards
        return self._works

    def _run(self) -> Iterator[None]:
        narrowed = self._narrowed()
        for travel in double_buffered(len(self._turns)):
            buckets = self._turns[travel.bucket]
            if travel.turn is Turn.STEP:
                for bucket in buckets:
                    self._arrive(bucket)
                for (group, _), members in zip(self._groups, narrowed[travel.bucket], strict=True):
                    group["params"] = members
                if travel.bucket == 0:
                    yield
                else:
                    plain_step(self._optimizer)
                continue
            for bucket in buckets:
                self._move(bucket, travel.turn)

    def _arrive(self, bucket: ShardBucket) -> None:
        if bucket.storage is None:
            bucket.accept_changes(bucket.own)
        else:
            bucket.storage.arrive(bucket, self._optimizer)
        bucket.widen()

    def _move(self, bucket: ShardBucket, turn: Turn) -> None:
        """Buckets that no optimizer stepped on when they were made have stayed on the device."""
        storage = bucket.storage
        if turn is Turn.SEND:
            work = bucket.publish() if storage is None else storage.send(bucket, self._optimizer)
            self._works += [] if work is None else [work]
            bucket.narrow()
        elif storage is not None and turn is Turn.FETCH:
            storage.fetch(bucket)
        elif storage is not None:
            storage.settle(bucket)

    def _narrowed(self) -> list[list[list[nn.Parameter]]]:
        """Per turn, of every group the shards that have it."""
        turns = {id(shard): turn for turn, buckets in enumerate(self._turns) for b in buckets for shard in b.shards}
        narrowed: list[list[list[nn.Parameter]]] = [[[] for _ in self._groups] for _ in self._turns]
        for index, (_, shards) in enumerate(self._groups):
            for shard in shards:
                if id(shard) in turns:
                    narrowed[turns[id(shard)]][index].append(shard)
        return narrowed


def _could_be_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    is_known = isinstance(optimizer, _FUSED_ON_CPU) and not needs_whole_parameters(optimizer)
    is_open = group.get("fused", False) is None and group.get("foreach") is None
    return is_known and is_open and all(p.is_floating_point() for p in group["params"])
