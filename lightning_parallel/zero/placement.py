"""Mechanism: whether an optimizer works on ranges of elements, needs whole parameters, or cannot be sharded at all."""

from __future__ import annotations

import inspect

import torch
from torch import optim

__all__ = ["NEEDS_WHOLE_MODEL", "needs_whole_parameters"]

_ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
# By name, because most live in packages that need not be installed.
NEEDS_WHOLE_MODEL = frozenset({"LBFGS", "PolyakSGD", "SAM", "Prodigy", "DAdaptAdam", "DAdaptSGD", "DAdaptAdaGrad"})
_STEPS_OUTSIDE = frozenset({"AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"})


def needs_whole_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step needs whole parameters; what is not known to work on single elements does.

    Raises:
        ValueError: the optimizer needs every parameter at once, or dense and sparse gradients do not fit.
    """
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    name = type(optimizer).__name__
    if kinds & NEEDS_WHOLE_MODEL:
        raise ValueError(
            f"{name} needs all parameters at once, so that its state cannot be sharded over replicas; use an optimizer "
            "such as AdamW, or a strategy without ZeRO"
        )
    if kinds & _STEPS_OUTSIDE:
        raise ValueError(
            f"{name} also changes parameters between its steps, from a state that each replica would hold a part of; "
            "use an optimizer such as AdamW, or a strategy without ZeRO"
        )
    if isinstance(optimizer, optim.SparseAdam):
        raise ValueError(
            "SparseAdam needs sparse gradients, which are not reduced over replicas; use AdamW and sparse=False for "
            "embeddings"
        )
    return not any(_steps_like(optimizer, known) for known in _ELEMENTWISE)


def _steps_like(optimizer: torch.optim.Optimizer, known: type[torch.optim.Optimizer]) -> bool:
    """Whether the step is that of a class, and not one that a subclass has written itself."""
    return isinstance(optimizer, known) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(known.step)
