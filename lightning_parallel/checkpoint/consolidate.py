"""Mechanism: between the shards of one rank and the tensors of the plain model, in both directions.

Names, shapes and order are always those of the user's plain model, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lightning_parallel import comm
from lightning_parallel.mesh import Mesh
from lightning_parallel.parameters import ParameterTag, describe_difference, name_difference
from lightning_parallel.pipeline.trace import CutPlan
from lightning_parallel.tensor_parallel.sharding import ShardSpec

__all__ = ["ModelShards"]

Join = Callable[[torch.Tensor, ShardSpec, tuple[int, ...], Any], torch.Tensor]
Cut = Callable[[torch.Tensor, ShardSpec, int], torch.Tensor]


class ModelShards:
    """The local part of a model, and how it relates to the plain one.

    Args:
        module: the model in its parallel form (shards and placeholders), or before it takes that form.
        tags: tag of every parameter of the plain model, in the order of `named_parameters()`.
        keys: every name in the plain model, also aliases of tied parameters -> the parameter's first name.
        mesh: groups of this rank.
        plan: how the pipeline was cut; None for one stage.
        join: (local, spec, full shape, tensor group) -> full tensor on every rank of the group.
        cut: (full, spec, tensor rank) -> what the rank holds of it, as a copy.
    """

    def __init__(
        self,
        module: nn.Module,
        tags: Mapping[str, ParameterTag],
        keys: Mapping[str, str],
        mesh: Mesh,
        plan: CutPlan | None,
        join: Join,
        cut: Cut,
    ) -> None:
        self.module = module
        self.tags = tags
        self.keys = keys
        self.mesh = mesh
        self.plan = plan
        self._join = join
        self._cut = cut

    def of(self, module: nn.Module) -> ModelShards:
        """The same for a copy of the parallel module."""
        return ModelShards(module, self.tags, self.keys, self.mesh, self.plan, self._join, self._cut)

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of the model."""
        return self.mesh.tensor is None and self.mesh.pipeline is None

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
                full = self._join(full, tag.shard, tag.shape, mesh.tensor)
        if mesh.pipeline is not None and len(tag.stages) < mesh.layout.pipeline:
            full = full.contiguous()
            comm.broadcast_(full, mesh.rank_of_stage(tag.stages[0]), mesh.pipeline)
        return full

    def slice(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a full tensor."""
        spec = self.tags[name].shard
        return full if spec is None else self._cut(full, spec, self.mesh.tensor_rank)

    # -------------------------------------------------------------- whole models
    def full_parameters(self, keep: bool = True) -> dict[str, torch.Tensor]:
        """Every parameter of the plain model once, on the CPU. Collective over the replica.

        Args:
            keep: False returns meta tensors (shapes without data) and saves the memory; the rank still takes part.
        """
        found = dict(self.module.named_parameters())
        return {
            name: on_cpu(self.gather(name, found[name] if self.holds(name) else None, found[name].dtype), keep)
            for name in self.tags
        }

    def full_buffers(self, keep: bool = True) -> dict[str, torch.Tensor]:
        """Every buffer as the stage has it that owns it, on the CPU. Collective over the replica."""
        return {name: on_cpu(self.gather_buffer(name, b), keep) for name, b in self.module.named_buffers()}

    def gather_buffer(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """A buffer as the stage has it that owns it. Collective over the replica."""
        value = local.detach()
        if self.mesh.pipeline is not None:
            value = value.to(self.mesh.device).contiguous().clone()
            comm.broadcast_(value, self.mesh.rank_of_stage(self._stage_of(name)), self.mesh.pipeline)
        return value

    def full_extra_states(self) -> dict[str, Any]:
        """What `get_extra_state` returns on the stage that runs the module, for modules of other stages.

        Collective over the replica. Values are moved to the CPU.
        """
        stages = {
            name: self._stage_of(f"{name}.")
            for name, module in self.module.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        if self.mesh.control is None or not stages:
            return {}
        own = {
            name: _tree_to_cpu(self.module.get_submodule(name).get_extra_state())
            for name, stage in stages.items()
            if stage == self.mesh.stage
        }
        others: dict[str, Any] = {}
        for part in comm.gather_objects(own, self.mesh.control):
            others.update({name: value for name, value in part.items() if name not in own})
        return others

    def full_state_dict(self, keep: bool = True) -> dict[str, Any]:
        """What `state_dict()` of the plain model would return, on the CPU. Collective over the replica.

        The module's own `state_dict`, with all hooks and overrides of the user, runs over full tensors.

        Args:
            keep: False returns meta tensors (shapes without data) and saves the memory; the rank still takes part.
        """
        with self._whole(self.full_parameters(keep), self.full_buffers(keep), self.full_extra_states()):
            state: dict[str, Any] = self.module.state_dict()
        return state

    def outline(self) -> dict[str, Any]:
        """Like `full_state_dict(keep=False)`, from what this rank knows alone."""
        found = dict(self.module.named_parameters())
        parameters = {
            name: torch.empty(tag.shape, dtype=found[name].dtype, device="meta") for name, tag in self.tags.items()
        }
        buffers = {name: torch.empty_like(b, device="meta") for name, b in self.module.named_buffers()}
        with self._whole(parameters, buffers, {}):
            state: dict[str, Any] = self.module.state_dict()
        return state

    @contextmanager
    def _whole(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        extra_states: Mapping[str, Any],
    ) -> Iterator[None]:
        """Puts whole values where the module keeps its parameters, buffers and extra states; ties stay ties."""
        tensors: list[tuple[dict[str, Any], str, Any]] = []
        local = dict(self.module.named_parameters())
        added = [name for name in local if name not in self.keys]
        if added:
            raise RuntimeError(
                f"{len(added)} parameters ({added[0]}, ...) were added to the module after it was split; add them in "
                "__init__ or configure_model, or keep the module they belong to outside of the LightningModule"
            )
        stand_ins: dict[int, torch.Tensor] = {}
        for name, p in local.items():
            full = parameters[self.keys[name]]
            stand_ins[id(p)] = nn.Parameter(full, requires_grad=p.requires_grad and _can_require_grad(full))
        stand_ins |= {id(b): buffers[name] for name, b in self.module.named_buffers()}
        others = {self.module.get_submodule(name): value for name, value in extra_states.items()}
        try:
            for module, value in others.items():
                module.__dict__["get_extra_state"] = partial(_itself, value)
            for module in self.module.modules():
                registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for registry in registries:
                    for leaf, tensor in registry.items():
                        if tensor is not None:
                            tensors.append((registry, leaf, tensor))
                            registry[leaf] = stand_ins[id(tensor)]
            yield
        finally:
            for registry, leaf, tensor in tensors:
                registry[leaf] = tensor
            for module in others:
                module.__dict__.pop("get_extra_state", None)

    def _stage_of(self, key: str) -> int:
        """The stage whose buffer or extra state counts: where its block, or the parameters of its module, live."""
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
            chosen[key] = value
        self.put(chosen)

    def put(self, state: Mapping[str, Any]) -> None:
        """Loads local shards and everything else that `load_full_state_dict` has chosen."""
        self.module.load_state_dict(state, strict=False)

    # -------------------------------------------------------------- copies that callbacks keep
    def split_copy(self, whole: nn.Module, copy: Callable[[], nn.Module]) -> ModelShards:
        """The local part of a copy of the plain module.

        Args:
            whole: the copy.
            copy: makes a copy of the parallel module, which takes over the values.
        """
        shards = self.of(copy())
        shards.load_full_state_dict(whole.state_dict(), False)
        return shards

    def show_whole(self) -> Callable[[], None]:
        """Makes `state_dict()` of the module return full tensors, also as a part of another module.

        For copies that callbacks keep (weight averages) and save from every rank at once: `state_dict()` becomes
        collective over the replica. Ranks other than the first get meta tensors.

        Returns:
            A function that undoes it.
        """
        return self.module.register_state_dict_post_hook(_WholeView(self)).remove


class _WholeView:
    """The hook of `ModelShards.show_whole`; further copies of the module are served by the same hook."""

    def __init__(self, shards: ModelShards) -> None:
        self.shards = shards

    def __deepcopy__(self, memo: dict[int, Any]) -> _WholeView:
        return self

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        shards = self.shards.of(module)
        if shards.mesh.data_rank == 0:
            keep = shards.mesh.rank == 0
            parameters, buffers = shards.full_parameters(keep), shards.full_buffers(keep)
        else:
            parameters, buffers = {}, {}
        for key, value in state.items():
            name = key.removeprefix(prefix)
            if not key.startswith(prefix) or not isinstance(value, torch.Tensor):
                continue
            if shards.mesh.data_rank != 0:
                shape = shards.tags[shards.keys[name]].shape if name in shards.keys else tuple(value.shape)
                state[key] = torch.empty(shape, dtype=value.dtype, device="meta")
            elif name in shards.keys:
                state[key] = parameters[shards.keys[name]]
            elif name in buffers:
                state[key] = buffers[name]


def on_cpu(tensor: torch.Tensor, keep: bool) -> torch.Tensor:
    """The tensor on the CPU, or its shape alone."""
    if not keep:
        return torch.empty_like(tensor, device="meta")
    # A view would take all the memory that it is a part of into a file.
    is_part = tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.clone() if is_part else tensor.cpu()


def _itself(value: Any) -> Any:
    return value


def _tree_to_cpu(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), value)


def _can_require_grad(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
