"""Glue: ZeRO over the replicas of a split module: what is sharded, norms over shards, whole states for checkpoints."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_parallel.gradient_sync import GradientCompleter
from lightning_parallel.mesh import Mesh, gradient_group
from lightning_parallel.strategies.config import ZeroConfig
from lightning_parallel.strategies.gradient_readers import looks_at_gradients
from lightning_parallel.strategies.partition import Partition
from lightning_parallel.strategies.residence import shard_units
from lightning_parallel.strategies.span import ModelSpan
from lightning_parallel.zero.buckets import ShardBucket
from lightning_parallel.zero.optimizer import ShardedOptimizer
from lightning_parallel.zero.sharder import ShardOptions, ZeroSharder
from lightning_parallel.zero.states import load_full_state, whole_state

__all__ = ["ReplicaSharding"]


class ReplicaSharding:
    """ZeRO over the data replicas of one split module.

    Args:
        partition: the split module.
        optimizers: whose groups hold its parameters.
        trainer: asked who looks at gradients.
        zero: what is sharded, and where it lies.
        bucket_bytes: size of the buckets in which gradients are reduced.
        is_direct: whether Lightning itself starts the backward pass; otherwise a step's gradients exist before it
            zeroes the old ones.
        blocks: of stage 3: modules that are gathered one by one; "auto", or names.
    """

    def __init__(
        self,
        partition: Partition,
        optimizers: list[torch.optim.Optimizer],
        trainer: Trainer,
        zero: ZeroConfig,
        bucket_bytes: int,
        is_direct: bool,
        blocks: str | Sequence[str] = "auto",
    ) -> None:
        self.mesh = partition.mesh
        module = partition.module
        local = partition.local_parameters
        completer = GradientCompleter(local, partition.tags, self.mesh)
        # Under manual optimization hooks complete the gradient of each backward pass as it arrives.
        completes = module.automatic_optimization and not completer.is_empty
        shared = [p for parameters in completer.shared.values() for p in parameters]
        options = ShardOptions(
            stage=zero.stage,
            bucket_bytes=bucket_bytes,
            average=not module.automatic_optimization,
            shows_gradients=looks_at_gradients(trainer),
            zero_clears_all=is_direct,
            offload=zero.host_side(trainer.default_root_dir),
            prefetch=zero.prefetch,
            sums_wide=zero.gradient_dtype == "float32",
        )
        self.sharder: ZeroSharder
        if zero.stage == 3:
            self.sharder = shard_units(
                partition, optimizers, options, blocks, trains=trainer.state.fn == TrainerFn.FITTING
            )
        else:
            self.sharder = ZeroSharder(
                local.values(),
                optimizers,
                gradient_group(self.mesh),
                options,
                incomplete=[*completer.partial, *(p for p, _ in completer.replicated), *shared] if completes else (),
                complete=completer.complete if completes else None,
            )
        self.sharder.graph_communicates = any(isinstance(child, nn.SyncBatchNorm) for child in module.modules())

    def redirect_zero_grad(self, module: LightningModule) -> None:
        """Lightning's wrappers call the class's `zero_grad`, past the one that also clears shards.

        To be called once these wrappers are final.
        """
        wrappers: Any = module.optimizers()
        for wrapper in wrappers if isinstance(wrappers, list) else [wrappers]:
            wrapper.zero_grad = wrapper.optimizer.zero_grad

    def find(self, optimizer: Any) -> ShardedOptimizer | None:
        """What steps an optimizer, or Lightning's wrapper of it, on shards; None if it is not the trainer's."""
        plain = getattr(optimizer, "_optimizer", optimizer)
        return next((sharded for sharded in self.sharder.optimizers if sharded.optimizer is plain), None)

    def _of(self, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
        sharded = self.find(optimizer)
        assert sharded is not None, "the strategy saves and loads only its own optimizers"
        return sharded

    def whole_state(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Inside, an optimizer of replica 0 holds the states of all replicas. Collective over the replicas."""
        return whole_state(self._of(optimizer), self.mesh.data_control, keep=self.mesh.data_rank == 0)

    def load(self, optimizer: torch.optim.Optimizer, full: Mapping[str, Any]) -> None:
        """Loads a state dict for all replicas, of which this one keeps its part."""
        load_full_state(self._of(optimizer), full)

    def discard(self) -> None:
        """Nobody will ask for the optimizers' states any more: removes what is in files."""
        if self.sharder.storage is not None:
            self.sharder.storage.remove()

    def span(self, mesh: Mesh, partition: Partition, non_finite: str) -> ModelSpan:
        """Norms and votes over gradients where they are: in shards, or in full if somebody looks at them."""
        if self.sharder.options.shows_gradients:
            return ModelSpan(mesh, partition.tags, partition.names, non_finite)
        return _ShardSpan(mesh, partition, non_finite, self)


class _ShardSpan(ModelSpan):
    """Norms and votes over shards: padding lies outside of every one of them, so that each element counts once."""

    def __init__(self, mesh: Mesh, partition: Partition, non_finite: str, sharding: ReplicaSharding) -> None:
        super().__init__(mesh, partition.tags, partition.names, non_finite)
        self.norm_group = mesh.world
        self._sharding = sharding

    def trained(self, optimizer: Any) -> Iterator[nn.Parameter]:
        """What holds the gradients of an optimizer: this rank's shards."""
        sharded = self._sharding.find(optimizer)
        for p in super().trained(optimizer) if sharded is None else sharded.parameters():
            found = self._sharding.sharder.find(p)
            shard = p if found is None else found[0].shards[found[1]]
            if shard is not None:
                yield shard

    @contextmanager
    def holding_gradients(self, optimizer: Any) -> Generator[None, None, None]:
        """Inside, the groups of an optimizer hold this rank's shards."""
        sharded = self._sharding.find(optimizer)
        with nullcontext() if sharded is None else sharded.on_shards():
            yield

    def _counted_parts(self, parameter: nn.Parameter) -> list[torch.Tensor]:
        found = self._shards().get(id(parameter))
        if found is None:
            return super()._counted_parts(parameter)
        bucket, place = found
        whole, piece, gradient = bucket.parameters[place], bucket.pieces[place], parameter.grad
        assert gradient is not None, "only shards with a gradient are counted"
        assert piece is not None, "a shard is a piece of its parameter"
        tag = self.tags[self.names[id(whole)]]
        ranges = tag.counted_ranges(self.mesh.stage, self.mesh.tensor_rank)
        if ranges is None:
            return [gradient]
        if not ranges or tag.shard is None:
            return []
        full = gradient.new_zeros(whole.numel())  # what counts may begin and end within the piece
        full[piece[0] : piece[1]] = gradient.reshape(-1)
        full = full.view(whole.shape)
        return [full.narrow(tag.shard.dim, start, stop - start) for start, stop in ranges]

    def _shards(self) -> dict[int, tuple[ShardBucket, int]]:
        buckets: Iterable[ShardBucket] = self._sharding.sharder.buckets
        return {id(s): (b, place) for b in buckets for place, s in enumerate(b.shards) if s is not None}
