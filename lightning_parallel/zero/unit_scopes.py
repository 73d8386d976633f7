"""Mechanism: which modules of a model get a unit of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lightning_parallel.blocks import resolve_blocks
from lightning_parallel.zero.units import UnitPlan, plan_units

__all__ = ["find_scopes", "plan_model"]


def find_scopes(model: nn.Module) -> tuple[str, ...]:
    """Children with parameters of every ModuleList and Sequential; of nested plain containers the innermost ones.

    Only those that run: nobody would gather a ParameterList or a ModuleDict, which belong to the module around them.

    >>> find_scopes(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))))
    ('0', '1.0', '1.2')
    """
    found: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name == scope or name.startswith(f"{scope}.") for scope in found)
        if is_inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        for leaf, child in module.named_children():
            if _has_parameters(child) and _runs(child) and not _is_plain(child):
                found.append(f"{name}.{leaf}" if name else leaf)
    return tuple(found)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _runs(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _is_plain(module: nn.Module) -> bool:
    """Whether it only holds other modules, which are looked at one by one."""
    return isinstance(module, nn.ModuleList | nn.Sequential)


def plan_model(model: nn.Module, blocks: str | Sequence[str] = "auto") -> UnitPlan:
    """Units of a model: one for each block, and one for the rest.

    Args:
        model: parameters that modules share belong to the rest if they would belong to several blocks.
        blocks: "auto" (see `find_scopes`), or names or patterns of modules.

    Raises:
        ValueError: a name matches no module, or one that is never called, or lies inside another one; or TorchScript
            has compiled a module with parameters.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and _has_parameters(module):
            raise ValueError(
                f"{name} is a module of TorchScript, which stage 3 of ZeRO cannot tell when to gather its parameters; "
                "use torch.compile, or script it after the training, or use stage 2"
            )
    scopes = find_scopes(model) if blocks == "auto" else resolve_blocks(model, blocks)
    for scope in scopes:
        if not _runs(model.get_submodule(scope)):
            raise ValueError(
                f"unit {scope!r} is a {type(model.get_submodule(scope)).__name__}, which is never called, so that its "
                "parameters would not be gathered; name the module that holds it, or modules inside of it"
            )
    names = {id(p): name for name, p in model.named_parameters()}
    holders: dict[str, list[str]] = {name: [] for name in names.values()}
    for module_name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            holders[names[id(p)]].append(module_name)
    return plan_units(holders, scopes)
