"""Glue: bytes of model state that a rank holds, whatever the strategy: every memory counted once, in its first role."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_parallel.strategies.base import PartitionedStrategy
from lightning_parallel.strategies.sharding import ReplicaSharding

__all__ = ["HeldBytes", "held_bytes"]


@dataclass(frozen=True)
class HeldBytes:
    """Bytes on one rank's device: of weights, of gradients, and of the optimizer's states and 32-bit weights.

    Attributes:
        host: of all three, what an offload keeps in host memory instead.
    """

    weights: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        """All three on the device."""
        return self.weights + self.gradients + self.optimizer


def held_bytes(trainer: Trainer, module: LightningModule) -> HeldBytes:
    """What this rank holds between two steps, gradients of the last one included."""
    strategy = trainer.strategy
    partition = strategy._partition if isinstance(strategy, PartitionedStrategy) else None
    sharding = strategy._sharding if isinstance(strategy, PartitionedStrategy) else None
    hidden: AbstractContextManager[None] = nullcontext()
    if isinstance(strategy, PartitionedStrategy):
        hidden = strategy._sight.hidden()
    with hidden:
        parameters = list(module.parameters() if partition is None else partition.local_parameters.values())
        steps = [*(p for p in parameters), *_shards(sharding)]
        roles: tuple[Iterable[Tensor], ...] = (
            [*parameters, *_own_weights(sharding)],
            [*(p.grad for p in steps if p.grad is not None), *_full_gradients(sharding)],
            [*_states(trainer.optimizers), *_masters(sharding)],
        )
        away = {tensor.untyped_storage().data_ptr() for tensor in _away(sharding, trainer.optimizers)}
        seen: set[int] = set()
        counts = [list(_new_memory(tensors, seen)) for tensors in roles]
    kind = strategy.root_device.type
    weights, gradients, optimizer = (
        sum(size for address, size, at in role if at == kind and address not in away) for role in counts
    )
    host = sum(size for role in counts for address, size, _ in role if address in away)
    return HeldBytes(weights, gradients, optimizer, host)


def _new_memory(tensors: Iterable[Tensor], seen: set[int]) -> Iterator[tuple[int, int, str]]:
    """Address, bytes and type of device of each memory that was not seen before."""
    for tensor in tensors:
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage.data_ptr(), storage.nbytes(), local.device.type


def _away(sharding: ReplicaSharding | None, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """What an offload keeps in host memory, which on CPUs no device tells from the rest."""
    if sharding is None or sharding.sharder.options.offload is None:
        return
    yield from (shard.grad for shard in _shards(sharding) if shard.grad is not None)
    yield from _states(optimizers)
    for bucket in sharding.sharder.buckets:
        if bucket.has_master:
            yield bucket.master
        if bucket.home is not None:
            yield bucket.own


def _states(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            # Counters of steps are single numbers.
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)


def _shards(sharding: ReplicaSharding | None) -> list[torch.nn.Parameter]:
    buckets = [] if sharding is None else sharding.sharder.buckets
    return [shard for bucket in buckets for shard in bucket.shards if shard is not None]


def _full_gradients(sharding: ReplicaSharding | None) -> list[Tensor]:
    """Of stage 1, whose memory stays between steps."""
    buckets = [] if sharding is None else sharding.sharder.buckets
    return [bucket.gradient_buffer for bucket in buckets if bucket.gradient_buffer is not None]


def _own_weights(sharding: ReplicaSharding | None) -> list[Tensor]:
    return [] if sharding is None else [bucket.own for bucket in sharding.sharder.buckets]


def _masters(sharding: ReplicaSharding | None) -> list[Tensor]:
    return [] if sharding is None else [b.master for b in sharding.sharder.buckets if isinstance(b.master, Tensor)]
