"""Glue: start weights of a module on the meta device whose parameters are sharded: no rank ever holds all of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.mesh import Mesh
from lightning_parallel.strategies.partition import drawing_of, give_memory, own_tensors
from lightning_parallel.zero.link import not_a_value
from lightning_parallel.zero.unit_sharder import UnitSharder

__all__ = ["draw_shares", "leave_meta"]


def leave_meta(module: nn.Module, device: torch.device) -> set[int]:
    """Turns parameters on the meta device into ones on a real device, without values; they stay the same objects.

    Returns:
        Ids of these parameters.
    """
    waiting = [p for p in module.parameters() if p.is_meta]
    for p in waiting:
        nothing = torch.full((), not_a_value(p.dtype), dtype=p.dtype, device=device)
        real = nn.Parameter(nothing.expand(p.shape), requires_grad=p.requires_grad)
        real.__dict__.update(p.__dict__)
        torch.utils.swap_tensors(p, real)
    return {id(p) for p in waiting}


@torch.no_grad()
def draw_shares(module: nn.Module, sharder: UnitSharder, waiting: set[int], mesh: Mesh) -> None:
    """Draws start weights module by module, in the order of construction, of which each rank keeps its shares.

    Every rank draws the numbers of a plain process; those of the first rank count. Collective over the world.

    Args:
        module: the plain module.
        sharder: knows the shares.
        waiting: what `leave_meta` returned.
        mesh: groups of this rank.

    Raises:
        ValueError: a module with own parameters that wait has no `reset_parameters`.
    """
    waiting = set(waiting)
    for name, child in module.named_modules():
        own = own_tensors(child)
        fresh = [p for p in own.values() if id(p) in waiting or p.is_meta]
        if not fresh:
            continue
        reset = drawing_of(name, child)
        parameters = [p for p in own.values() if isinstance(p, nn.Parameter)]
        kept = {id(t): t.clone() for t in own.values() if not isinstance(t, nn.Parameter) and not t.is_meta}
        hidden = [p.data for p in parameters]
        for tensor in own.values():
            if tensor.is_meta:
                give_memory(tensor, mesh.device)
        for p in parameters:
            p.data = torch.empty(p.shape, dtype=p.dtype, device=mesh.device)
        reset()
        _restore_buffers(own, kept)
        for tensor in fresh:
            comm.broadcast_(tensor.data, 0, mesh.world)
        sharder.write_values((p, p.data) for p in parameters if id(p) in waiting)
        for p, nothing in zip(parameters, hidden, strict=True):
            p.data = nothing
        waiting -= {id(p) for p in parameters}


def _restore_buffers(own: dict[str, Tensor], kept: dict[int, Tensor]) -> None:
    for tensor in own.values():
        if id(tensor) in kept:
            tensor.copy_(kept[id(tensor)])
