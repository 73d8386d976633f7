"""Mechanism: apply a tensor-parallel plan to a model in place, and take it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.parameters import ParameterTag
from lightning_parallel.tensor_parallel.attention import AttentionState, convert_attention, disable_fused_kernels
from lightning_parallel.tensor_parallel.calls import forward_names
from lightning_parallel.tensor_parallel.experts import convert_experts, reduce_output, sum_rotary_gradient
from lightning_parallel.tensor_parallel.layers import (
    convert_to_column_parallel,
    convert_to_row_parallel,
    convert_to_vocab_parallel,
    restore_module,
)
from lightning_parallel.tensor_parallel.local_shapes import RegionRun, run_on_local_shapes
from lightning_parallel.tensor_parallel.random import RegionState
from lightning_parallel.tensor_parallel.rules import ModuleRule, TensorPlan
from lightning_parallel.tensor_parallel.sequence import split_sequences
from lightning_parallel.tensor_parallel.shards import shard_tensor
from lightning_parallel.tensor_parallel.shared_input import SharedInput
from lightning_parallel.tensor_parallel.snapshot import ModuleSnapshot
from lightning_parallel.weight_gradients import is_watched

__all__ = ["Undo", "parallelize_module", "shard_parameters", "split_parameters"]


class Undo:
    """Takes a conversion back, in reverse order.

    Attributes:
        regions: random-number state of the split regions; ``reset()`` it after a forward that ended early.
    """

    def __init__(self) -> None:
        self.regions = RegionState()
        self._steps: list[Callable[[], None]] = []

    def add(self, step: Callable[[], None]) -> None:
        """Remember how to take one change back."""
        self._steps.append(step)

    def restore(self) -> None:
        """Take every change back; parameter data is the caller's. A second call does nothing."""
        self.regions.reset()
        while self._steps:
            self._steps.pop()()


@dataclass
class _Job:
    """What the conversion of every module needs."""

    model: nn.Module
    plan: TensorPlan
    group: ProcessGroup
    undo: Undo
    shared: dict[str, SharedInput] = field(default_factory=dict)
    drawing: dict[str, bool] = field(default_factory=dict)

    @property
    def scatter_dim(self) -> int | None:
        return self.plan.sequence_dim if self.plan.sequence_parallel else None

    def regions_of(self, name: str) -> RegionState | None:
        """Random numbers of their own for a region; under sequence parallelism whole blocks have them."""
        own = self.drawing.get(name, False) and not self.plan.sequence_parallel
        return self.undo.regions if own else None


def parallelize_module(
    model: nn.Module,
    plan: TensorPlan,
    group: ProcessGroup | None,
    *,
    keep: Callable[[str], bool] = lambda name: True,
) -> Undo:
    """Convert the modules of ``model`` that the plan names, in place. Parameter data is not touched.

    Args:
        model: the model that the plan was resolved for.
        plan: what happens to each module; an empty plan changes nothing.
        group: tensor group of as many ranks as the plan has.
        keep: whether this process runs the module of that name; others stay as they are.

    Returns:
        What takes the conversion back.

    Raises:
        ValueError: the group is of another size, or a module cannot be converted. Whatever is raised, nothing is
            changed then.
    """
    undo = Undo()
    if not plan:
        return undo
    if group is None or comm.group_size(group) != plan.tensor_parallel_size:
        raise ValueError(
            f"the plan is for tensor_parallel_size={plan.tensor_parallel_size}, but the group has "
            f"{comm.group_size(group)} ranks"
        )
    job = _Job(model, plan, group, undo)
    snapshot = ModuleSnapshot(model)
    for region in plan.regions:
        for name in (*region.columns, region.row):
            job.drawing[name] = region.random
    try:
        for rule in plan.rules:
            if keep(rule.name):
                _convert(rule, job)
        _prepare_regions(job, keep)
        undo.add(disable_fused_kernels(model, {rule.name for rule in plan.rules if keep(rule.name)}))
        if plan.sequence_parallel:
            split_sequences(model, plan, group, undo.regions, keep, undo.add)
    except BaseException:
        snapshot.restore()  # not by steps: the one that failed may have begun
        raise
    return undo


def split_parameters(
    model: nn.Module, tags: Mapping[str, ParameterTag], keep: Callable[[str], bool] = lambda name: True
) -> list[tuple[nn.Parameter, ParameterTag]]:
    """Parameters of which each tensor rank is to hold a part, each once: equal on all ranks of the tensor group.

    Args:
        model: in its plain form, or with its layers converted.
        tags: ``plan.tags(model)``.
        keep: as in :func:`shard_parameters`.
    """
    kept: dict[int, nn.Parameter] = {}
    canonical: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical.setdefault(id(parameter), name)
        if keep(name.rpartition(".")[0]):
            kept[id(parameter)] = parameter
    found = [(parameter, tags[canonical[key]]) for key, parameter in kept.items()]
    return [(parameter, tag) for parameter, tag in found if tag.shard is not None]


def shard_parameters(
    model: nn.Module,
    tags: Mapping[str, ParameterTag],
    tensor_rank: int,
    keep: Callable[[str], bool] = lambda name: True,
) -> None:
    """Replace the data of every split parameter by this rank's shard, once per parameter, so that ties stay tied.

    Args:
        model: its parameters are whole.
        tags: ``plan.tags(model)``.
        tensor_rank: index of this rank in the tensor group.
        keep: whether this process runs the module of that name; a parameter none of whose modules is kept stays whole.

    Raises:
        ValueError: a parameter is not whole, has a gradient already, or a hook waits for its whole gradient in a
            graph; nothing is changed then.
    """
    split = split_parameters(model, tags, keep)
    for parameter, tag in split:
        if tuple(parameter.shape) != tag.shape:
            raise ValueError(
                f"parameter {tag.name!r} has shape {tuple(parameter.shape)} instead of its full {tag.shape}"
            )
        if parameter.grad is not None:
            raise ValueError(f"parameter {tag.name!r} has a gradient already; set it to None before it is split")
        if parameter.requires_grad and is_watched(parameter):
            raise ValueError(
                f"parameter {tag.name!r} is split, but somebody holds the node of the graph that adds to its whole "
                f"gradient of shape {tag.shape} (torch.autograd.graph.register_multi_grad_hook, or a graph that was "
                f"kept); use register_hook, which sees this rank's part, or keep its layer whole with the style "
                f"'replicate'"
            )
    for parameter, tag in split:
        assert tag.shard is not None, "only such parameters are split"
        parameter.data = shard_tensor(parameter.data, tag.shard, tensor_rank)


def _convert(rule: ModuleRule, job: _Job) -> None:
    module: Any = job.model.get_submodule(rule.name)
    spec = rule.shard("weight")
    style, group = rule.style, job.group
    if style in {"colwise", "colwise_qkv", "colwise_gate_up", "colwise_gather"}:
        assert spec is not None, "columns split their weight"
        shared = job.shared.setdefault(rule.shared_input, SharedInput()) if rule.shared_input else None
        gather = style == "colwise_gather"
        convert_to_column_parallel(
            module,
            spec,
            group,
            gather_output=gather,
            shared_input=shared,
            copy_input=gather or job.scatter_dim is None,
            region=job.regions_of(rule.name),
        )
        job.undo.add(lambda: restore_module(module))
    elif style in {"rowwise", "rowwise_split"}:
        assert spec is not None, "rows split their weight"
        split = style == "rowwise_split"
        scatter = None if split else job.scatter_dim
        convert_to_row_parallel(
            module, spec, group, split_input=split, scatter_dim=scatter, region=job.regions_of(rule.name)
        )
        job.undo.add(lambda: restore_module(module))
    elif style == "vocab":
        assert spec is not None, "an embedding splits its weight"
        convert_to_vocab_parallel(module, spec, group)
        job.undo.add(lambda: restore_module(module))
    elif style == "attention":
        draws = module.dropout > 0 and job.scatter_dim is None
        state = AttentionState(group, job.undo.regions if draws else None, job.scatter_dim)
        job.undo.add(convert_attention(module, state))
    elif style == "experts":
        job.undo.add(convert_experts(module, group))
    elif style == "all_reduce":
        job.undo.add(reduce_output(module, group))
    elif style == "mla_kv":
        parent = job.model.get_submodule(rule.name.rpartition(".")[0])
        rotary = getattr(parent, "qk_rope_head_dim", 0)
        job.undo.add(sum_rotary_gradient(rule.name, module, int(rotary), group))


def _prepare_regions(job: _Job, keep: Callable[[str], bool]) -> None:
    """Head counts, stand-ins and local views of every region that runs here."""
    kept = [region for region in job.plan.regions if keep(region.row)]
    for patch in (patch for region in kept for patch in region.patches):
        module = job.model.get_submodule(patch.module)
        job.undo.add(_set(module, patch.attribute, patch.full, patch.local))
    for name in dict.fromkeys(region.name for region in kept if region.stand_in or region.local_views):
        module = job.model.get_submodule(name)
        same = [region for region in kept if region.name == name]
        run = RegionRun(
            ranks=job.plan.tensor_parallel_size,
            names=forward_names(module),
            stand_in=frozenset(parameter for region in same for parameter in region.stand_in),
            local_views=any(region.local_views for region in same),
            columns=tuple(job.model.get_submodule(column) for region in same for column in region.columns),
        )
        job.undo.add(run_on_local_shapes(module, run))


def _set(module: nn.Module, attribute: str, full: int, local: int) -> Callable[[], None]:
    found = getattr(module, attribute)
    if found not in (full, local):
        raise ValueError(
            f"{type(module).__name__}.{attribute} is {found}, but was {full} when the plan was resolved; "
            f"resolve the plan again"
        )
    setattr(module, attribute, local)
    return lambda: setattr(module, attribute, full)
