"""Glue: ZeRO stage 3: units of a module, and its whole weights for checkpoints and for the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_parallel.checkpoint.consolidate import ModelShards, on_cpu
from lightning_parallel.mesh import gather_groups
from lightning_parallel.strategies.partition import Partition
from lightning_parallel.zero.gathering import UnitGatherer
from lightning_parallel.zero.sharder import ShardOptions
from lightning_parallel.zero.unit_scopes import plan_model
from lightning_parallel.zero.unit_sharder import UnitSharder

__all__ = ["UnitWeights", "shard_units"]


def shard_units(
    partition: Partition,
    optimizers: Sequence[torch.optim.Optimizer],
    options: ShardOptions,
    blocks: str | Sequence[str],
    trains: bool,
) -> UnitSharder:
    """Shards the parameters of a module that every rank has whole now. Collective over the replicas.

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
    gatherer = UnitGatherer(scopes, *gather_groups(partition.mesh))
    numbered = {p: units[name] for name, p in partition.originals.items()}
    sharder = UnitSharder(numbered, optimizers, partition.mesh.data, options, gatherer, trains)
    partition.units = sharder
    partition.shards = UnitWeights(partition.shards, sharder)
    return sharder


class UnitWeights(ModelShards):
    """The weights of a model whose parameters are sharded over replicas: whole ones are collective over these.

    Args:
        plain: knows names and shapes.
        sharder: knows where the values are.
    """

    def __init__(self, plain: ModelShards, sharder: UnitSharder) -> None:
        super().__init__(plain.module, plain.tags, plain.keys, plain.mesh, plain.plan, plain._join, plain._cut)
        self._sharder = sharder

    @property
    def is_whole(self) -> bool:
        """Never."""
        return False

    def full_parameters(self, keep: bool = True) -> dict[str, torch.Tensor]:
        """Every parameter once, on the CPU, one unit at a time."""
        names = {id(p): name for name, p in self.module.named_parameters()}
        found: dict[str, torch.Tensor] = {}
        self._sharder.full_values(lambda p, full: found.update({names[id(p)]: on_cpu(full, keep)}))
        return {name: found[name] for name in self.tags}

    def outline(self) -> dict[str, Any]:
        """Takes part in `full_state_dict` of the first replica."""
        return self.full_state_dict(keep=False)

    def put(self, state: Mapping[str, Any]) -> None:
        """Takes this rank's part of parameters, and everything else."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        self._sharder.write_values((parameters[key], value) for key, value in state.items() if key in parameters)
        self.module.load_state_dict({k: v for k, v in state.items() if k not in parameters}, strict=False)
