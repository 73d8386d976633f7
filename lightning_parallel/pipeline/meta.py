"""Mechanism: what operators return on the meta device, remembered: many find their shapes in slow Python code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

__all__ = ["result_on_meta"]


@dataclass(frozen=True)
class _TensorOutline:
    """All that the result's outline depends on, of one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorOutline:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def to_meta(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


def result_on_meta(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Result of an operator that writes into none of its arguments, as tensors on the meta device.

    Args:
        func: operator overload.
        args: positional arguments; tensors may live anywhere, only their outlines count.
        kwargs: keyword arguments.
    """
    leaves, spec = tree_flatten((args, dict(kwargs)))
    # With types, because 1, 1.0 and True are equal but promote differently.
    key = tuple((type(x), _TensorOutline.of(x) if isinstance(x, torch.Tensor) else x) for x in leaves)
    try:
        result = _outline_of_result(func, spec, key)
    except TypeError:  # an argument that cannot be a key
        result = _outline_of_result.__wrapped__(func, spec, key)
    if isinstance(result, _TensorOutline):  # nearly always; walking a tree takes longer
        return result.to_meta()
    return tree_map_only(_TensorOutline, _TensorOutline.to_meta, result)


@lru_cache(maxsize=4096)
def _outline_of_result(func: Any, spec: TreeSpec, key: tuple[tuple[type, Any], ...]) -> Any:
    leaves = [leaf.to_meta() if isinstance(leaf, _TensorOutline) else leaf for _, leaf in key]
    args, kwargs = tree_unflatten(leaves, spec)
    return tree_map_only(torch.Tensor, _TensorOutline.of, func(*args, **kwargs))
