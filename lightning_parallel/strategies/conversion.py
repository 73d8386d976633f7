"""Glue: turns the plain module into the part of one rank, in place: on every rank, or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_parallel import comm
from lightning_parallel.checkpoint.consolidate import ModelShards
from lightning_parallel.pipeline.cut import StageCut
from lightning_parallel.pipeline.trace import CutPlan
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.left_apart import AFTER_AN_EXCEPTION, mark_left_apart
from lightning_parallel.tensor_parallel.parallelize import Undo, parallelize_module, shard_parameters, split_parameters
from lightning_parallel.tensor_parallel.rules import TensorPlan
from lightning_parallel.tensor_parallel.shards import all_gather_full, shard_tensor
from lightning_parallel.tensor_parallel.snapshot import ModuleSnapshot

__all__ = ["agree", "agree_on_first", "convert_module"]


def agree(mesh_group: Any, work: Callable[[], Any], take_back: Callable[[], None] = lambda: None) -> Any:
    """Runs something that may fail on some ranks only, and lets every rank fail with the first message.

    Args:
        mesh_group: the ranks that agree.
        work: what each of them does.
        take_back: what every rank does if some rank failed; may be collective.

    Raises:
        ValueError or RuntimeError: what the failing rank raised, with its rank if it was another one.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    messages = comm.gather_objects(None if error is None else f"{type(error).__name__}: {error}", mesh_group)
    failed = [(rank, text) for rank, text in enumerate(messages) if text is not None]
    if failed:
        take_back()
    if error is not None:
        raise error
    if failed:
        rank, text = failed[0]
        kind = ValueError if text.startswith("ValueError") else RuntimeError
        raise kind(f"set-up failed on rank {rank} of this run: {text}")
    return result


def agree_on_first(mesh_group: Any, work: Callable[[bool], Any], mine: bool) -> Any:
    """What all ranks would find out alike, as the first of them does. Collective.

    Args:
        mesh_group: the ranks that agree.
        work: called with whether other ranks do it as well: if not, it must not wait for them. Where it fails, all
            ranks do it, so that they find another way, or fail, together.
        mine: whether this rank does it before any has failed; the first one must.

    Raises:
        ValueError or RuntimeError: as `agree`.
    """
    result, failed = None, False
    if mine:
        try:
            result = work(False)
        except Exception:  # raised below by all ranks, unless doing it together helps
            failed = True
    if any(comm.gather_objects(failed, mesh_group)):
        result = agree(mesh_group, lambda: work(True))
    return comm.broadcast_object(result, 0, mesh_group)


def convert_module(
    module: LightningModule,
    shards: ModelShards,
    tensor_plan: TensorPlan,
    cut_plan: CutPlan | None,
    parameters_stay: bool = False,
    splits_backward: bool = False,
) -> tuple[Undo, StageCut | None]:
    """Tensor-parallel layers and shards, the cut, and the move to the device. Collective over the world.

    Args:
        module: the user's plain module, with the same weights on every rank.
        shards: its local part.
        tensor_plan: what happens to every layer.
        cut_plan: blocks and owners of every stage; None for one stage.
        parameters_stay: do not move them to the device, which will have shares of them.
        splits_backward: whether the schedule has gradients of weights as actions of their own.

    Returns:
        What takes the layers back, and the applied cut.

    Raises:
        ValueError or RuntimeError: it failed on some rank; the module is as it was then, on all of them.
    """
    conversion = _Conversion(module, shards, tensor_plan, cut_plan, parameters_stay, splits_backward)
    try:
        agree(shards.mesh.world, conversion.apply, conversion.take_back)
    except BaseException:
        conversion.leave()
        raise
    if conversion.cut is not None:
        conversion.cut.free_foreign()
    return conversion.undo, conversion.cut


class _Conversion:
    """Of one module, on one rank; the data of other stages' parameters stay until all ranks are done."""

    def __init__(
        self,
        module: LightningModule,
        shards: ModelShards,
        tensor_plan: TensorPlan,
        cut_plan: CutPlan | None,
        parameters_stay: bool,
        splits_backward: bool,
    ) -> None:
        self.module = module
        self.shards = shards
        self.tensor_plan = tensor_plan
        self.parameters_stay = parameters_stay
        self.undo = Undo()
        mesh = shards.mesh
        self.cut = None
        if cut_plan is not None:
            self.cut = StageCut(module, cut_plan, mesh.stage, mesh.device, splits_backward=splits_backward)
        self._cut_plan = cut_plan
        self._snapshot = ModuleSnapshot(module)
        self._split = split_parameters(module, shards.tags, self._keeps)
        split = {id(parameter) for parameter, _ in self._split}
        self._devices = [parameter.device for parameter, _ in self._split]
        self._data = [(p, p.data) for p in module.parameters() if id(p) not in split]

    def apply(self) -> None:
        """What may fail."""
        module, mesh = self.module, self.shards.mesh
        self.undo = parallelize_module(module, self.tensor_plan, mesh.tensor, keep=self._keeps)
        shard_parameters(module, self.shards.tags, mesh.tensor_rank, keep=self._keeps)
        if self.cut is not None:
            self.cut.apply()
        module._apply(self._moved)
        _compat.set_module_device(module, mesh.device)

    def take_back(self) -> None:
        """The module as it was before. Collective over the tensor group."""
        self._restore()
        mesh = self.shards.mesh
        for (parameter, tag), device in zip(self._split, self._devices, strict=True):
            assert tag.shard is not None, "only such parameters are split"
            local = parameter.data
            if tuple(local.shape) != tag.shard.local_shape(tag.shape, mesh.tensor_rank):  # this rank did not get there
                local = shard_tensor(local, tag.shard, mesh.tensor_rank)
            parameter.data = all_gather_full(local.to(mesh.device), tag.shard, tag.shape, mesh.tensor).to(device)

    def leave(self) -> None:
        """The same as far as it goes without the other ranks: a module whose weights stay apart tells so."""
        self._restore()
        if any(tuple(parameter.shape) != tag.shape for parameter, tag in self._split):
            mark_left_apart(self.module, AFTER_AN_EXCEPTION)

    def _restore(self) -> None:
        self.undo.regions.reset()
        self._snapshot.restore()
        for parameter, data in self._data:
            parameter.data = data

    def _keeps(self, module_name: str) -> bool:
        """Whether this stage runs a module."""
        own = self.module.get_submodule(module_name)._parameters
        names = [f"{module_name}.{leaf}" if module_name else leaf for leaf, p in own.items() if p is not None]
        return all(self._is_local(name) for name in names)

    def _is_local(self, name: str) -> bool:
        stage = self.shards.mesh.stage
        return self._cut_plan is None or stage in self._cut_plan.owners.get(self.shards.keys.get(name, name), (stage,))

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        stays = tensor.is_meta or (self.parameters_stay and isinstance(tensor, nn.Parameter))
        return tensor if stays else tensor.to(self.shards.mesh.device)
