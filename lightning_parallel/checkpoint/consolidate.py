"""Mechanism: between the shards of one rank and the tensors of the plain model, in both directions.

Names, shapes and order are always those of the user's plain model, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_parallel import comm
from lightning_parallel.mesh import Mesh
from lightning_parallel.parameters import ParameterTag, describe_difference, name_difference
from lightning_parallel.pipeline.placeholder import Placeholder
from lightning_parallel.pipeline.trace import CutPlan
from lightning_parallel.tensor_parallel.shards import all_gather_full, shard_tensor

__all__ = ["ModelShards"]


class ModelShards:
    """The local part of a model, and how it relates to the plain one.

    Args:
        module: the model in its parallel form (shards and placeholders).
        tags: tag of every parameter of the plain model, in the order of `named_parameters()`.
        keys: every name in the plain model, also aliases of tied parameters -> the parameter's first name.
        mesh: groups of this rank.
        plan: how the pipeline was cut; None for one stage.
    """

    def __init__(
        self,
        module: nn.Module,
        tags: Mapping[str, ParameterTag],
        keys: Mapping[str, str],
        mesh: Mesh,
        plan: CutPlan | None,
    ) -> None:
        self.module = module
        self.tags = tags
        self.keys = keys
        self.mesh = mesh
        self.plan = plan

    # -------------------------------------------------------------- single tensors
    def holds(self, name: str) -> bool:
        """Whether this stage holds a parameter."""
        return self.mesh.stage in self.tags[name].stages

    def gather(self, name: str, local: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """The full tensor of a parameter, or of an optimizer state of the same shape, on every rank of the replica.

        Collective over the replica. `local` is this rank's shard, None on stages that do not hold the parameter.
        """
        tag, mesh = self.tags[name], self.mesh
        if local is None:
            full = torch.empty(tag.shape, dtype=dtype, device=mesh.device)
        else:
            full = local.detach().to(mesh.device)
            if tag.shard is not None and mesh.tensor is not None:
                full = all_gather_full(full, tag.shard, tag.shape, mesh.tensor)
        if mesh.pipeline is not None and len(tag.stages) < mesh.layout.pipeline:
            full = full.contiguous()
            comm.broadcast_(full, mesh.rank_of_stage(tag.stages[0]), mesh.pipeline)
        return full

    def slice(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a full tensor."""
        spec = self.tags[name].shard
        return full if spec is None else shard_tensor(full, spec, self.mesh.tensor_rank)

    def _broadcast_from_stage(self, value: torch.Tensor, stage: int) -> torch.Tensor:
        if self.mesh.pipeline is None:
            return value
        if isinstance(value, Placeholder):
            value = torch.empty(value.shape, dtype=value.dtype, device=self.mesh.device)
        value = value.detach().to(self.mesh.device).contiguous().clone()
        comm.broadcast_(value, self.mesh.rank_of_stage(stage), self.mesh.pipeline)
        return value

    # -------------------------------------------------------------- whole models
    def full_state_dict(self, local: Mapping[str, Any] | None = None, keep: bool = True) -> dict[str, Any]:
        """What `state_dict()` of the plain model would hold, on the CPU. Collective over the replica.

        Args:
            local: a state dict of the parallel module (or of a copy of it); by default of the module itself.
            keep: False returns meta tensors (shapes without data) and saves the memory; the rank still takes part.
        """
        local = self.module.state_dict() if local is None else local
        gathered: dict[str, torch.Tensor] = {}
        full: dict[str, Any] = {}
        for key, value in local.items():
            name = self.keys.get(key)
            if not isinstance(value, torch.Tensor):
                full[key] = value
            elif name is None:
                full[key] = _to_cpu(self._broadcast_from_stage(value, self._stage_of_buffer(key)), keep)
            else:
                if name not in gathered:
                    held = value if self.holds(name) and not isinstance(value, Placeholder) else None
                    gathered[name] = _to_cpu(self.gather(name, held, value.dtype), keep)
                full[key] = gathered[name]
        return full

    def _stage_of_buffer(self, key: str) -> int:
        """The stage whose copy of a buffer counts: where its block, or the parameters of its module, live."""
        if self.plan is None:
            return 0
        for index, block in enumerate(self.plan.blocks):
            if key.startswith(f"{block}."):
                return self.plan.stage_of_block(index)
        prefix = key.rpartition(".")[0]
        for name, stages in self.plan.owners.items():
            if name.rpartition(".")[0] == prefix and prefix:
                return stages[0]
        return len(self.plan.bounds) - 1

    def load_full_state_dict(self, full: Mapping[str, Any], strict: bool) -> None:
        """Loads a state dict of the plain model into the local shards.

        Raises:
            RuntimeError: with `strict`, names are missing or unexpected; always, a shape differs.
        """
        local = self.module.state_dict()
        missing, unexpected = name_difference(local, full)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"cannot load the checkpoint into {type(self.module).__name__}: "
                f"{describe_difference(missing, unexpected)}; use strict_loading=False to load what matches"
            )
        chosen = {}
        for key in local:
            if key not in full:
                continue
            name = self.keys.get(key)
            value = full[key]
            if name is not None:
                if tuple(value.shape) != self.tags[name].shape:
                    raise RuntimeError(
                        f"cannot load {key}: the checkpoint has shape {tuple(value.shape)}, the model "
                        f"{self.tags[name].shape}"
                    )
                if not self.holds(name):
                    continue
                value = self.slice(name, value)
            elif isinstance(local[key], Placeholder):
                continue
            chosen[key] = value
        self.module.load_state_dict(chosen, strict=False)

    # -------------------------------------------------------------- optimizers
    def full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], keep: bool = True
    ) -> dict[str, Any]:
        """What `optimizer.state_dict()` of the plain run would hold, on the CPU. Collective over the replica.

        Args:
            optimizer: its groups hold every parameter of the plain run in order (placeholders for foreign ones).
            names: id of a parameter object in the groups -> name in the plain model.
            keep: False returns no state and saves the memory; the rank still takes part.
        """
        packed = optimizer.state_dict()
        ordered = [p for group in optimizer.param_groups for p in group["params"]]
        layout = self._state_layout(optimizer, ordered, names)
        state: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(ordered):
            name = names[id(parameter)]
            if name not in layout:
                continue
            entry: dict[str, Any] = {}
            local_state = optimizer.state.get(parameter, {})
            for key, (kind, value) in layout[name].items():
                if kind == "shard":
                    local = local_state.get(key) if self.holds(name) else None
                    entry[key] = _to_cpu(self.gather(name, local, value), keep)
                else:
                    entry[key] = value
            state[index] = entry
        return {"state": state if keep else {}, "param_groups": packed["param_groups"]}

    def _state_layout(
        self, optimizer: torch.optim.Optimizer, ordered: Iterable[nn.Parameter], names: Mapping[int, str]
    ) -> dict[str, dict[str, tuple[str, Any]]]:
        """For every parameter with state, as seen by its first owner: ("shard", dtype) or ("value", value) per key."""
        mine: dict[str, dict[str, tuple[str, Any]]] = {}
        for parameter in ordered:
            name = names[id(parameter)]
            if self.tags[name].stages[0] != self.mesh.stage or parameter not in optimizer.state:
                continue
            shape = self.tags[name].local_shape(self.mesh.tensor_rank)
            mine[name] = {
                key: ("shard", value.dtype)
                if isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) == shape
                else ("value", value.detach().cpu() if isinstance(value, torch.Tensor) else value)
                for key, value in optimizer.state[parameter].items()
            }
        if self.mesh.control is None:
            return mine
        merged: dict[str, dict[str, tuple[str, Any]]] = {}
        for part in comm.gather_objects(mine, self.mesh.control):
            merged.update(part)
        return merged

    def local_optimizer_state(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], full: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The part of a plain optimizer state dict that belongs to this rank, in the same format."""
        ordered = [p for group in optimizer.param_groups for p in group["params"]]
        state = {}
        for index, parameter in enumerate(ordered):
            name = names[id(parameter)]
            entry = full["state"].get(index)
            if entry is None or not self.holds(name):
                continue
            shape = self.tags[name].shape
            state[index] = {
                key: self.slice(name, value)
                if isinstance(value, torch.Tensor) and tuple(value.shape) == shape and value.dim() > 0
                else value
                for key, value in entry.items()
            }
        return {"state": state, "param_groups": full["param_groups"]}


def _to_cpu(tensor: torch.Tensor, keep: bool) -> torch.Tensor:
    return tensor.cpu() if keep else torch.empty_like(tensor, device="meta")
