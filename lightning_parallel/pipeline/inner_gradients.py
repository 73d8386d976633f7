"""Mechanism: derivatives that a step takes itself (gradient penalties, forces), as the planning pass sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

__all__ = ["InnerGradients", "in_transform"]

_BACKWARD = frozenset({torch.autograd.backward, torch.Tensor.backward})
_ALL = _BACKWARD | {torch.autograd.grad}


def in_transform(values: Any) -> bool:
    """Whether a function runs inside of `torch.func.grad`, `vjp` or another transform, or on what is left of one."""
    if torch._C._are_functorch_transforms_active():
        return True
    return any(isinstance(v, torch.Tensor) and is_functorch_wrapped_tensor(v) for v in tree_leaves(values))


class InnerGradients(TorchFunctionMode):
    """Lets a step that is planned, without gradients, go on with zeros in place of derivatives.

    Args:
        note: called with the values and with what they are differentiated by; None stands for all parameters.
    """

    def __init__(self, note: Callable[[Sequence[Any], Sequence[Any] | None], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ALL and in_transform(args):  # which have a graph of their own, and need what comes of it
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            outputs, inputs = args[:2]
            self.note(outputs, inputs)
            nothing = sum(value.sum() for value in outputs) * 0
            return tuple(torch.zeros_like(value) + nothing.to(value.dtype) for value in inputs)
        if func in _BACKWARD:
            self.note(args[0] if isinstance(args[0], Sequence) else args[:1], kwargs.get("inputs"))
            return None
        return func(*args, **kwargs)
