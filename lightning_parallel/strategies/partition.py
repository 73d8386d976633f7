"""Glue: turns the user's plain module into the part of one rank, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_parallel import comm
from lightning_parallel.alone import Alone
from lightning_parallel.blocks import resolve_blocks
from lightning_parallel.checkpoint.consolidate import ModelShards
from lightning_parallel.checkpoint.optimizer_states import split_optimizer_state
from lightning_parallel.mesh import Mesh, add_stage_groups
from lightning_parallel.parameters import ParameterTag
from lightning_parallel.pipeline.cut import StageCut
from lightning_parallel.pipeline.planning import observe_step, plan_pipeline
from lightning_parallel.pipeline.trace import CutPlan
from lightning_parallel.random_streams import random_state, set_random_state
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.config import PipelineConfig, TensorParallelConfig
from lightning_parallel.strategies.conversion import agree, agree_on_first, convert_module
from lightning_parallel.strategies.left_apart import mark_left_apart
from lightning_parallel.tensor_parallel.plan import refuse_parts, resolve_plan
from lightning_parallel.tensor_parallel.rules import TensorPlan
from lightning_parallel.tensor_parallel.shards import all_gather_full, shard_tensor
from lightning_parallel.zero.unit_sharder import UnitSharder

__all__ = [
    "Partition",
    "drawing_of",
    "give_memory",
    "make_partition",
    "materialize",
    "own_tensors",
    "synchronize_start",
]


def materialize(module: nn.Module, device: torch.device, given: Collection[str] = ()) -> None:
    """Gives modules on the meta device memory and start weights, in the order of construction.

    Every rank draws the same numbers in the same order, whatever part of the model it will keep. Parameters and buffers
    stay the same objects, so that ties and optimizers survive.

    Args:
        module: the plain module.
        device: where it gets its memory.
        given: names in its state dict whose values are loaded afterwards: nothing is drawn for them.

    Raises:
        ValueError: a module with own parameters on the meta device has no `reset_parameters`.
    """
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        own = {prefix + leaf: t for leaf, t in own_tensors(child).items()}
        empty = {key: t for key, t in own.items() if t.is_meta}
        if not empty:
            continue
        for tensor in empty.values():
            give_memory(tensor, device)
        if all(key in given for key in empty):
            continue
        reset = drawing_of(name, child)
        kept = {key: t.detach().clone() for key, t in own.items() if key not in empty}  # tied to an earlier module
        with torch.no_grad():
            reset()
            for key, value in kept.items():
                own[key].copy_(value)


def drawing_of(name: str, module: nn.Module) -> Callable[[], object]:
    """What draws a module's own start weights.

    Raises:
        ValueError: a module that was built on the meta device has nothing that does.
    """
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ValueError(
            f"{name or type(module).__name__} was built on the meta device and has no reset_parameters() to start its "
            "weights; define it, or build the module outside of the meta device"
        )
    return reset


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a module itself has."""
    parts = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return dict(parts)


def give_memory(tensor: torch.Tensor, device: torch.device) -> None:
    """Turns a meta tensor into one with memory, as the same Python object."""
    real: torch.Tensor = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    real.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, real)


def synchronize_start(module: nn.Module, mesh: Mesh, leaves_meta: bool = False) -> None:
    """Makes every rank start from rank 0's weights, and every replica's ranks from one random state.

    Args:
        module: the plain module.
        mesh: groups of this rank.
        leaves_meta: leave what is on the meta device there, because it will be sharded. Otherwise it is drawn first.
    """
    if not leaves_meta:
        materialize(module, torch.device("cpu"))
    if mesh.layout.world_size == 1:
        return
    with torch.no_grad():
        for tensor in (t for t in (*module.parameters(), *module.buffers()) if not t.is_meta):
            shared = tensor.detach().to(mesh.device).contiguous()
            comm.broadcast_(shared, 0, mesh.world)
            if shared.data_ptr() != tensor.data_ptr():
                tensor.copy_(shared)
    if mesh.model is not None:
        leader = mesh.layout.rank_of(pipeline=0, data=mesh.data_rank, tensor=0)
        state = comm.broadcast_object(random_state(mesh.device), leader, mesh.model)
        set_random_state(state, mesh.device)


@dataclass
class Partition:
    """The module of one rank in its parallel form, with what is needed to undo it.

    Attributes:
        shards: local part of the model, for checkpoints.
        tensor_plan: what tensor parallelism does to every layer of the whole model.
        cut_plan: blocks and owners of every stage; None for one stage.
        cut: the applied cut; None for one stage.
        names: id of every parameter object of optimizers and of the module -> name in the plain model.
        originals: the plain module's parameters by name.
        copies: (holder, attribute, its shards, how to undo its hook) for every copy that a callback keeps.
        units: gathers parameters that are sharded over the replicas; None if each of them has all of its part.
        restored: whether the plain module is back.
        left_apart: why it then does not have all of its weights; empty if it has.
    """

    module: LightningModule
    mesh: Mesh
    tags: dict[str, ParameterTag]
    shards: ModelShards
    tensor_plan: TensorPlan
    cut_plan: CutPlan | None
    cut: StageCut | None
    undo_tensor: Any
    names: dict[int, str]
    originals: dict[str, nn.Parameter]
    copies: list[tuple[Any, str, ModelShards, Callable[[], None]]] = field(default_factory=list)
    units: UnitSharder | None = None
    restored: bool = False
    left_apart: str = ""

    @property
    def local_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that this stage holds, by name in the plain model, in its order."""
        return {n: p for n, p in self.originals.items() if self.shards.holds(n)}

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, has_parts: bool = False) -> None:
        """Makes an optimizer built on the whole model fit: placeholders for foreign parameters, shards of state.

        Args:
            optimizer: whose groups hold the parameters of the whole model.
            has_parts: its state is that of this rank already.
        """
        stand_ins = self.cut.stand_ins if self.cut is not None else {}
        for group in optimizer.param_groups:
            group["params"] = [stand_ins.get(id(p), p) for p in group["params"]]
        if not has_parts:
            split_optimizer_state(self.shards, optimizer, self.names)

    def release_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts the parameters of other stages back into the groups, whose placeholders end with the run."""
        for group in optimizer.param_groups:
            group["params"] = [self.originals.get(self.names.get(id(p), ""), p) for p in group["params"]]

    def split_copies(self, copies: list[tuple[Any, str, nn.Module]]) -> None:
        """Splits copies of the plain module that callbacks made (weight averages) in the same way.

        Args:
            copies: (holder, attribute, copy); the attribute is replaced by a split module with the copy's values, whose
                state dict is whole again so that callbacks can save it.
        """
        for holder, attribute, whole in copies:
            shards = self.shards.split_copy(whole, lambda: _compat.copy_module(self.module, self.mesh.groups_by_id()))
            self.copies.append((holder, attribute, shards, shards.show_whole()))
            setattr(holder, attribute, shards.module)

    def restore(self, left_apart: str = "") -> None:
        """Puts the plain module back, on the CPU, with the trained weights on every rank. Collective over the replica.

        Args:
            left_apart: a reason to leave each rank's weights where they are, which is not collective; the module tells
                it to whoever uses it.
        """
        keep_weights = not left_apart
        whole = _whole_values(self.shards) if keep_weights else ({}, {})
        extra_states = self.shards.full_extra_states() if keep_weights else {}
        copies = [(holder, name, _whole_values(shards)) for holder, name, shards, _ in self.copies if keep_weights]
        for _, _, _, undo in self.copies:
            undo()
        if self.cut is not None:
            self.cut.restore()
        self.undo_tensor.restore()
        if self.units is not None:
            self.units.leave_device()
        self.module.to("cpu")
        _set_values(self.module, *whole)
        for name, value in extra_states.items():
            self.module.get_submodule(name).set_extra_state(value)
        _compat.set_module_device(self.module, torch.device("cpu"))
        for holder, attribute, values in copies:
            setattr(holder, attribute, _compat.copy_module(self.module, self.mesh.groups_by_id()))
            _set_values(getattr(holder, attribute), *values)
        if self.units is not None:
            self.units.forget_values()
        if not self.shards.is_whole:
            self.left_apart = left_apart
        if self.left_apart:
            mark_left_apart(self.module, left_apart)
        self.restored = True


def _whole_values(shards: ModelShards) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return shards.full_parameters(), shards.full_buffers()


def _set_values(module: nn.Module, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        if name in parameters:
            parameter.data = parameters[name]
            parameter.grad = None
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.data = buffers[name]


def make_partition(
    module: LightningModule,
    mesh: Mesh,
    tensor: TensorParallelConfig,
    pipeline: PipelineConfig,
    step: Callable[[nn.Module, Any], Any],
    batch: Callable[[], Any],
    check: Callable[[Mapping[str, ParameterTag], Mapping[int, str]], None],
    parameters_stay: bool = False,
) -> Partition:
    """Plans and applies the cut and the tensor-parallel plan. Collective over the world; needs the same model on all.

    Args:
        module: the user's plain module.
        mesh: groups of this rank.
        tensor: options of tensor parallelism.
        pipeline: options of the pipeline.
        step: runs one step of a copy of the module on a micro-batch.
        batch: returns a micro-batch to plan with; only called if there is more than one stage.
        check: refuses what does not fit the tags and names of the parameters, before anything is split.
        parameters_stay: do not move them to the device, which will have shares of them.

    Raises:
        ValueError: the model cannot be cut or split like this; names and numbers are in the message. The module is as
            it was, on every rank.
    """
    originals = dict(module.named_parameters())
    names = {id(p): n for n, p in originals.items()}
    keys = {key: names[id(p)] for key, p in module.named_parameters(remove_duplicate=False)}

    tensor_plan, cut_plan = _make_plans(module, mesh, tensor, pipeline, step, batch)
    tags = _with_stages(tensor_plan.tags(module), cut_plan)

    def refuse() -> None:
        refuse_parts(module)
        check(tags, names)

    agree(mesh.world, refuse)
    add_stage_groups(mesh, tuple(sorted({tag.stages for tag in tags.values() if tag.shared})))
    shards = ModelShards(module, tags, keys, mesh, cut_plan, all_gather_full, shard_tensor)
    split = pipeline.schedule == "zero-bubble"
    undo, cut = convert_module(module, shards, tensor_plan, cut_plan, parameters_stay, split)
    if cut is not None:
        names |= {id(stand_in): names[original] for original, stand_in in cut.stand_ins.items()}
    return Partition(module, mesh, tags, shards, tensor_plan, cut_plan, cut, undo, names, originals)


def _make_plans(
    module: LightningModule,
    mesh: Mesh,
    tensor: TensorParallelConfig,
    pipeline: PipelineConfig,
    step: Callable[[nn.Module, Any], Any],
    batch: Callable[[], Any],
) -> tuple[TensorPlan, CutPlan | None]:
    """What becomes of the layers and of the blocks; see `make_partition`. Collective over the world."""
    stages, ranks = mesh.layout.pipeline, mesh.layout.tensor

    def plan() -> tuple[tuple[str, ...], TensorPlan]:
        uses_blocks = stages > 1 or (ranks > 1 and tensor.sequence_parallel)
        # Names that the user gave are looked up even where nothing is made of blocks: a typo must not wait.
        blocks = resolve_blocks(module, pipeline.blocks) if uses_blocks or pipeline.blocks != "auto" else ()
        return blocks, resolve_plan(
            module,
            tensor.plan,
            ranks,
            sequence_parallel=tensor.sequence_parallel and ranks > 1,
            blocks=blocks if uses_blocks else (),
        )

    # Ranks of a replica have one model and one batch, and would all find out the same.
    blocks, tensor_plan = agree_on_first(mesh.world, lambda together: plan(), mesh.rank == 0)
    if stages == 1:
        return tensor_plan, None
    example = agree(mesh.world, batch)

    def cut_by_step(together: bool) -> CutPlan:
        trace = observe_step(module, blocks, step, example, mesh.groups_by_id(), alone=None if together else Alone())
        return plan_pipeline(module, blocks, trace, stages)

    return tensor_plan, agree_on_first(mesh.world, cut_by_step, mesh.stage == mesh.tensor_rank == 0)


def _with_stages(tags: Mapping[str, ParameterTag], plan: CutPlan | None) -> dict[str, ParameterTag]:
    if plan is None:
        return dict(tags)
    return {
        name: ParameterTag(name, tag.shape, tag.shard, tag.partial_gradient, plan.owners[name])
        for name, tag in tags.items()
    }
