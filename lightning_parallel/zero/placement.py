"""Mechanism: whether an optimizer works on ranges of elements, needs whole parameters, or cannot be sharded at all."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import optim

__all__ = ["NEEDS_WHOLE_MODEL", "needs_whole_parameters", "plain_step", "refuse_on_host", "refuse_shared_on_disk"]

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
    return isinstance(optimizer, known) and all(
        inspect.unwrap(getattr(type(optimizer), name)) is inspect.unwrap(getattr(known, name))
        for name in ("step", "_init_group")  # through which a subclass reaches the gradients of a group
    )


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """What an optimizer's step does, without the hooks around it."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def refuse_on_host(optimizer: torch.optim.Optimizer, kind: str) -> None:
    """Raises ValueError if an optimizer cannot step on shards in host memory.

    Args:
        optimizer: one that can be sharded.
        kind: "cpu" or "nvme".
    """
    name = type(optimizer).__name__
    for option in ("capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise ValueError(
                f"{name} with {option}=True steps on the device only, but offload={kind!r} steps in host memory; leave "
                f"{option} out"
            )
    steps = any(p.requires_grad for group in optimizer.param_groups for p in group["params"])
    if kind == "nvme" and steps and needs_whole_parameters(optimizer):
        raise ValueError(
            f"{name} has a step of its own, which may look at all parameters, count its calls or keep more than "
            "offload='nvme' can bring in bucket by bucket; use offload='cpu', or an optimizer such as AdamW"
        )


def refuse_shared_on_disk(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises ValueError if several optimizers step on the same parameter, whose states a file keeps of one."""
    seen: dict[int, str] = {}
    for optimizer in optimizers:
        own = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        shared = next((p for key, p in own.items() if key in seen), None)
        if shared is not None:
            raise ValueError(
                f"a parameter of shape {tuple(shared.shape)} is stepped by {seen[id(shared)]} and by "
                f"{type(optimizer).__name__}, but with offload='nvme' a file keeps the state of one optimizer for it; "
                "use offload='cpu', or give every optimizer parameters of its own"
            )
        seen |= dict.fromkeys(own, type(optimizer).__name__)
