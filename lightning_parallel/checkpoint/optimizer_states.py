"""Mechanism: between the optimizer state of one rank and that of the plain run, in both directions.

States of the parameter's shape (moments, momentum, sums of squares) are split and joined like the parameter. Everything
else (step counts) is the same on every rank that holds the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_parallel import comm
from lightning_parallel.checkpoint.consolidate import ModelShards, on_cpu

__all__ = ["full_optimizer_state", "local_optimizer_state", "outline_optimizer_state", "split_optimizer_state"]

Names = Mapping[int, str]
"""Id of a parameter object in the groups of an optimizer -> name in the plain model."""

_SPLIT, _SAME, _REFUSED = "split", "same", "refused"


def full_optimizer_state(
    shards: ModelShards, optimizer: torch.optim.Optimizer, names: Names, keep: bool = True
) -> dict[str, Any]:
    """What `optimizer.state_dict()` of the plain run would hold, on the CPU. Collective over the replica.

    Args:
        shards: the local part of the model.
        optimizer: its groups hold every parameter of the plain run in order (placeholders for foreign ones).
        names: see `Names`; parameters that are not the model's are taken as this rank has them.
        keep: False returns no state and saves the memory; the rank still takes part.

    Raises:
        ValueError: a split parameter has a state that is neither of its shape nor a single number.
    """
    packed = optimizer.state_dict()
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    layout = _layout(shards, optimizer, ordered, names)
    state: dict[Any, dict[str, Any]] = {}
    for index, parameter in enumerate(ordered):
        name = names.get(id(parameter))
        if name is None:
            if index in packed["state"]:
                state[index] = packed["state"][index]
            continue
        if name not in layout:
            continue
        local = optimizer.state.get(parameter, {}) if shards.holds(name) else {}
        state[index] = {
            key: on_cpu(shards.gather(name, local.get(key), value), keep) if kind == _SPLIT else value
            for key, (kind, value) in layout[name].items()
        }
    if not keep:
        return outline_optimizer_state(optimizer)
    state |= {key: value for key, value in packed["state"].items() if not isinstance(key, int)}
    return {**packed, "state": state}


def outline_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The groups of `full_optimizer_state` alone, from what this rank knows."""
    return {**optimizer.state_dict(), "state": {}}


def _layout(
    shards: ModelShards, optimizer: torch.optim.Optimizer, ordered: Iterable[nn.Parameter], names: Names
) -> dict[str, dict[str, tuple[str, Any]]]:
    """For every parameter with state, as seen by its first owner: per key how it is held, with dtype or value."""
    mine: dict[str, dict[str, tuple[str, Any]]] = {}
    for parameter in ordered:
        name = names.get(id(parameter))
        if name is None or shards.tags[name].stages[0] != shards.mesh.stage or parameter not in optimizer.state:
            continue
        mine[name] = {key: _describe(shards, name, value) for key, value in optimizer.state[parameter].items()}
    merged: dict[str, dict[str, tuple[str, Any]]] = {}
    for part in comm.gather_objects(mine, shards.mesh.control):
        merged.update(part)
    for name, entry in merged.items():
        for key, (kind, shape) in entry.items():
            if kind == _REFUSED:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps a state {key!r} of shape {shape} for {name}, whose shape is "
                    f"{shards.tags[name].shape} and which is split over tensor ranks: it cannot be saved as a plain "
                    "run would. Use tensor_parallel_size=1, an elementwise optimizer, or save weights only"
                )
    return merged


def _describe(shards: ModelShards, name: str, value: Any) -> tuple[str, Any]:
    tag = shards.tags[name]
    if not isinstance(value, torch.Tensor):
        return _SAME, value
    if value.dim() > 0 and tuple(value.shape) == tag.local_shape(shards.mesh.tensor_rank):
        return _SPLIT, value.dtype
    if value.dim() > 0 and tag.shard is not None and value.numel() > 1:
        return _REFUSED, tuple(value.shape)
    return _SAME, value.detach().cpu()


def local_optimizer_state(
    shards: ModelShards, optimizer: torch.optim.Optimizer, names: Names, full: Mapping[str, Any]
) -> dict[str, Any]:
    """The part of a plain optimizer's state dict that belongs to this rank, in the same format.

    Raises:
        ValueError: a split parameter has a state that is neither of its shape nor a single number.
    """
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    state = {key: value for key, value in full["state"].items() if not isinstance(key, int)}
    for index, parameter in enumerate(ordered):
        name = names.get(id(parameter))
        entry = full["state"].get(index)
        if entry is None or (name is not None and not shards.holds(name)):
            continue
        state[index] = entry if name is None else _split(shards, name, entry)
    return {**full, "state": state}


def split_optimizer_state(shards: ModelShards, optimizer: torch.optim.Optimizer, names: Names) -> None:
    """Keeps this rank's part of the state that an optimizer made when it was built on the whole model.

    Raises:
        ValueError: a split parameter has a state that is neither of its shape nor a single number.
    """
    for parameter in list(optimizer.state):
        name = names.get(id(parameter))
        if name is None:
            continue
        if shards.holds(name):
            entry = _split(shards, name, optimizer.state[parameter])
            device = shards.mesh.device
            optimizer.state[parameter].update(
                {k: v.to(device) for k, v in entry.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
            )
        else:
            del optimizer.state[parameter]


def _split(shards: ModelShards, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    tag = shards.tags[name]
    local = {}
    for key, value in entry.items():
        sized = isinstance(value, torch.Tensor) and value.dim() > 0
        if sized and tuple(value.shape) == tag.shape:
            value = shards.slice(name, value)
        elif sized and tag.shard is not None and value.numel() > 1:
            raise ValueError(
                f"the state {key!r} of shape {tuple(value.shape)} of {name}, whose shape is {tag.shape}, cannot be "
                "split over tensor ranks. Use tensor_parallel_size=1 or an elementwise optimizer"
            )
        local[key] = value
    return local
