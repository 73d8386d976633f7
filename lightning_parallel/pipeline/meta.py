"""Mechanism: shapes of what operators return, remembered: many find them in slow Python code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["TensorOutline", "outline_of_result"]


@dataclass(frozen=True)
class TensorOutline:
    """Of a tensor, all that the outlines of results computed from it depend on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorOutline:
        """The outline of a tensor that lives anywhere."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def to_meta(self) -> torch.Tensor:
        """A tensor of this outline on the meta device."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


def outline_of_result(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Result of an operator that writes into none of its arguments, with outlines in place of tensors.

    Args:
        func: operator overload.
        args: positional arguments; tensors may live anywhere, only their outlines count.
        kwargs: keyword arguments.
    """
    key = _key((args, dict(kwargs)))
    try:
        return _remembered(func, key)
    except TypeError:  # an argument that cannot be a key
        return _remembered.__wrapped__(func, key)


@lru_cache(maxsize=4096)
def _remembered(func: Any, key: tuple[Any, Any]) -> Any:
    args, kwargs = _argument(key)
    return tree_map_only(torch.Tensor, TensorOutline.of, func(*args, **kwargs))


def _key(value: Any) -> tuple[Any, Any]:
    """(type, content) of an argument; with types, because 1, 1.0 and True are equal but promote differently."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, (value.shape, value.stride(), value.dtype)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, tuple([_key(entry) for entry in value])
    if kind is dict:
        return dict, tuple([(name, _key(entry)) for name, entry in value.items()])
    return kind, value


def _argument(key: tuple[Any, Any]) -> Any:
    """An argument of that key, whose tensors are on the meta device."""
    kind, content = key
    if kind is torch.Tensor:
        return TensorOutline(*content).to_meta()
    if kind is tuple or kind is list:
        return kind(_argument(entry) for entry in content)
    if kind is dict:
        return {name: _argument(entry) for name, entry in content}
    return content
