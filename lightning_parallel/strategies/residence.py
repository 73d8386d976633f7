"""Glue: ZeRO stage 3: units of a module, and its whole weights for checkpoints and for the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_parallel.checkpoint.consolidate import ModelShards, on_cpu
from lightning_parallel.mesh import gather_groups, gradient_group
from lightning_parallel.strategies.partition import Partition
from lightning_parallel.strategies.unit_start import draw_shares, leave_meta
from lightning_parallel.zero.gathering import UnitGatherer
from lightning_parallel.zero.sharder import ShardOptions
from lightning_parallel.zero.unit_scopes import plan_model
from lightning_parallel.zero.unit_sharder import UnitSharder
from lightning_parallel.zero.unit_watch import UnitWatch

__all__ = ["UnitWeights", "shard_units"]


def shard_units(
    partition: Partition,
    optimizers: Sequence[torch.optim.Optimizer],
    options: ShardOptions,
    blocks: str | Sequence[str],
    trains: bool,
) -> UnitSharder:
    """Shards the parameters of a module that every rank has whole on the host, or on the meta device.

    Units get to the device one after the other, of which shares stay there. Collective over the world.

    Args:
        partition: the module of one rank; from now on it knows where its weights are.
        optimizers: whose states are sharded.
        options: see `ShardOptions`.
        blocks: modules that are gathered one by one; "auto", or names.
        trains: whether gradients will be asked for.
    """
    plan = plan_model(partition.module, blocks)
    scopes = {number: partition.module.get_submodule(name) for number, name in enumerate(plan.scopes)}
    units = plan.unit_of()
    gatherer = UnitGatherer(scopes, *gather_groups(partition.mesh), options.prefetch)
    waiting = leave_meta(partition.module, partition.mesh.device)
    numbered = {p: units[name] for name, p in partition.originals.items()}
    mesh = partition.mesh
    group = gradient_group(mesh) if trains else mesh.data
    sharder = UnitSharder(numbered, optimizers, group, options, gatherer, trains, mesh.device)
    partition.units = sharder
    partition.shards = UnitWeights(partition.shards, sharder, partition.originals)
    scopes_of = {name: plan.scopes[unit] if unit < plan.root else "the step" for name, unit in units.items()}
    sharder.watch = UnitWatch(partition.module, sharder.is_absent, scopes_of)
    draw_shares(partition.module, sharder, waiting, partition.mesh)
    return sharder


class UnitWeights(ModelShards):
    """The weights of a model whose parameters are sharded over replicas: whole ones are collective over these.

    Args:
        plain: knows names and shapes.
        sharder: knows where the values are.
        parameters: of the model, by name.
    """

    def __init__(self, plain: ModelShards, sharder: UnitSharder, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(plain.module, plain.tags, plain.keys, plain.mesh, plain.plan, plain._join, plain._cut)
        self._sharder = sharder
        self._parameters = parameters

    @property
    def is_whole(self) -> bool:
        """Never."""
        return False

    def full_parameters(self, keep: bool = True) -> dict[str, torch.Tensor]:
        """Every parameter once, on the CPU, one unit at a time."""
        names = {id(p): name for name, p in self._parameters.items()}
        found: dict[str, torch.Tensor] = {}
        self._sharder.full_values(lambda p, full: found.update({names[id(p)]: on_cpu(full, keep)}))
        return {name: found[name] for name in self.tags}

    def outline(self) -> dict[str, Any]:
        """Takes part in `full_state_dict` of the first replica."""
        return self.full_state_dict(keep=False)

    @torch.no_grad()
    def split_copy(self, whole: nn.Module, copy: Callable[[], nn.Module]) -> ModelShards:
        """Leaves this rank's shares in a copy of the plain module."""
        for name, p in whole.named_parameters():
            bucket, place = self._sharder.bucket_of(self._parameters[name])
            share = bucket.cut(place, p.detach().to(bucket.own.device))
            p.data = bucket.own.new_empty(0) if share is None else share
        return _CopyWeights(whole, self)

    def gather_shares(self, shares: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
        """Whole parameters of a copy, on the CPU. Collective over the replicas."""
        found = {}
        for name in self.tags:
            bucket, place = self._sharder.bucket_of(self._parameters[name])
            found[name] = on_cpu(bucket.gather_one(place, shares[name].detach()), keep)
        return found

    def put(self, state: Mapping[str, Any]) -> None:
        """Takes this rank's part of parameters, and everything else."""
        named = {key: name for key, name in self.keys.items() if key in state}
        self._sharder.write_values((self._parameters[name], state[key]) for key, name in named.items())
        self.module.load_state_dict({k: v for k, v in state.items() if k not in named}, strict=False)


class _CopyWeights(ModelShards):
    """The weights of a copy of the module that a callback keeps, of which each rank has its shares.

    Args:
        copy: whose parameters are shares.
        model: knows whose.
    """

    def __init__(self, copy: nn.Module, model: UnitWeights) -> None:
        super().__init__(copy, model.tags, model.keys, model.mesh, model.plan, model._join, model._cut)
        self._model = model

    def full_parameters(self, keep: bool = True) -> dict[str, torch.Tensor]:
        """Every parameter once, on the CPU. Collective over the replicas."""
        return self._model.gather_shares(dict(self.module.named_parameters()), keep)

    def show_whole(self) -> Callable[[], None]:
        """Makes `state_dict()` collective over the replicas; ranks other than the first get meta tensors."""
        return self.module.register_state_dict_post_hook(_WholeCopy(self)).remove


class _WholeCopy:
    """The hook of `_CopyWeights.show_whole`; further copies of the copy are served by the same hook."""

    def __init__(self, weights: _CopyWeights) -> None:
        self.weights = weights

    def __deepcopy__(self, memo: dict[int, Any]) -> _WholeCopy:
        return self

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        weights = self.weights
        whole = weights._model.gather_shares(dict(module.named_parameters()), keep=weights.mesh.rank == 0)
        for key in state:
            if key.startswith(prefix) and key.removeprefix(prefix) in weights.keys:
                state[key] = whole[weights.keys[key.removeprefix(prefix)]]
