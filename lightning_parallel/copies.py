"""Mechanism: deep copies of modules that hold what Python cannot copy: locks, files, streams, values of a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, MutableMapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["copy_with_shared"]

_CONTENTS = ("_parameters", "_buffers", "_modules")


def copy_with_shared(
    module: nn.Module,
    memo: MutableMapping[int, Any],
    value_of: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.detach().clone(),
) -> nn.Module:
    """A deep copy that refers to the original's attributes where they cannot be copied.

    Args:
        module: what is copied.
        memo: copies that exist already, by id of the original, as for `copy.deepcopy`; gains the new ones.
        value_of: copies a tensor that is an attribute with a graph (the weight that `nn.utils.weight_norm` computes).
    """
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:  # attributes raise what they like; what still fails then is raised
        _share_uncopyable(module, memo, value_of)
        return copy.deepcopy(module, dict(memo))


def _share_uncopyable(
    module: nn.Module, memo: MutableMapping[int, Any], value_of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Enters into the memo what a deep copy would fail at, and nothing around it."""
    parts = {id(part): part for part in module.modules()}

    def copies(value: Any) -> bool:
        try:
            copy.deepcopy(value, {**memo, **parts})
        except Exception:
            return False
        return True

    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen or id(value) in parts or copies(value):
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            memo[id(value)] = value_of(value)
            return
        for child in _children(value):
            visit(child)
        if not copies(value):
            memo[id(value)] = value

    for part in parts.values():
        for name, value in _state(part).items():
            if name not in _CONTENTS:
                visit(value)


def _state(part: nn.Module) -> dict[str, Any]:
    """The attributes that a copy would have."""
    reduced = part.__reduce_ex__(4)
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    return state if isinstance(state, dict) else {}


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, ModuleType):
        return []
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())
