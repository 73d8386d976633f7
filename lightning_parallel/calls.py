"""Mechanism: what a call of one of torch's functions is about, for the modes that see every call of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["name_of", "tensors_in"]

_HOLD_NOTHING = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among some values and inside of the containers among them, in their order."""
    # Nearly all arguments are tensors and numbers, for which torch's walk through trees takes longer than the call.
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) not in _HOLD_NOTHING:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def name_of(function: Any) -> str:
    """`norm` of `Tensor.norm`, `grad` of the getter or setter of `Tensor.grad`."""
    name = getattr(function, "__name__", str(function))
    owner = getattr(function, "__self__", None)
    return str(getattr(owner, "__name__", name)) if name in ("__get__", "__set__", "__delete__") else str(name)
