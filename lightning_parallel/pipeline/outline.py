"""Mechanism: the shape of a nested value without its data, to announce it, to compare it and to stand in for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_parallel.pipeline.meta import TensorOutline
from lightning_parallel.pipeline.placeholder import Placeholder, WriteLedger

__all__ = ["Outline", "TensorMeta", "skeleton_of", "spec_of"]


def skeleton_of(spec: TreeSpec) -> Any:
    """A tree of that structure: what to pickle instead of the structure, which warns when it is unpickled."""
    return tree_unflatten([0] * spec.num_leaves, spec)


def spec_of(skeleton: Any) -> TreeSpec:
    """The structure of a tree."""
    return tree_flatten(skeleton)[1]


@dataclass(frozen=True)
class TensorMeta:
    """What must be known of a tensor to make one like it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Outline:
    """A nested value with `TensorMeta` in place of tensors; cheap to send, equal for equal shapes."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, value: Any) -> Outline:
        """The outline of a value."""
        return cls.of_leaves(*tree_flatten(value))

    @classmethod
    def of_leaves(cls, leaves: Iterable[Any], spec: TreeSpec) -> Outline:
        """The outline of a value that was flattened."""
        return cls(tuple([_outline_leaf(leaf) for leaf in leaves]), spec)

    def __reduce__(self) -> Any:
        return _outline, (self.leaves, skeleton_of(self.spec))

    def stand_in(self, origin: Iterable[str], device: torch.device, ledger: WriteLedger | None = None) -> Any:
        """A value of this structure whose tensors are placeholders."""

        def make(leaf: Any) -> Any:
            if not isinstance(leaf, TensorMeta):
                return leaf
            meta = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
            return Placeholder(TensorOutline.of(meta), origin, device, ledger=ledger)

        return tree_unflatten([make(leaf) for leaf in self.leaves], self.spec)


def _outline_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorMeta(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return leaf


def _outline(leaves: tuple[Any, ...], skeleton: Any) -> Outline:
    return Outline(leaves, spec_of(skeleton))
