"""Glue: tries what an unknown optimizer's step looks at, on parameters that are nobody's: elements, tensors or all."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.zero.placement import plain_step

__all__ = ["Scope", "scope_of_step"]

_ROWS, _COLUMNS = 4, 6
_STEPS = 2
_RATE = 0.01
"""A warm-up may start with a rate of 0, with which no step would show anything."""


class Scope(IntEnum):
    """What the change of an element depends on."""

    ELEMENT = 0
    TENSOR = 1
    MODEL = 2


def scope_of_step(optimizer: torch.optim.Optimizer) -> Scope | None:
    """What an optimizer's step looks at; None if it cannot be told from steps on small matrices on the CPU.

    >>> scope_of_step(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.0, momentum=0.9)).name
    'ELEMENT'
    >>> scope_of_step(torch.optim.Adafactor([nn.Parameter(torch.ones(1))])).name
    'TENSOR'
    """
    first = torch.sin(torch.arange(_ROWS * _COLUMNS).float() * 1.7).view(_ROWS, _COLUMNS)
    second = first.flip(0, 1) * 3
    try:
        with torch.random.fork_rng(devices=[]):
            together, again = (_stepped(optimizer, [first, second]) for _ in range(2))
            alone = [_stepped(optimizer, [value])[0] for value in (first, second)]
            halves = [torch.cat([_stepped(optimizer, [h])[0] for h in first.chunk(2, dim)], dim) for dim in (0, 1)]
    except Exception:  # the boundary to code that is not ours: it wants parameters of another kind
        return None
    if not all(map(_alike, together, again)):  # it draws random numbers
        return None
    if not all(map(_alike, together, alone)):
        return Scope.MODEL
    return Scope.ELEMENT if all(_alike(half, alone[0]) for half in halves) else Scope.TENSOR


def _stepped(optimizer: torch.optim.Optimizer, values: Sequence[Tensor]) -> list[Tensor]:
    """Values after some steps of a copy of the optimizer, with gradients that follow from the values."""
    trial: Any = object.__new__(type(optimizer))
    containers = (dict, list, set)
    vars(trial).update({k: copy.copy(v) if isinstance(v, containers) else v for k, v in vars(optimizer).items()})
    group = optimizer.param_groups[0]
    parameters = [nn.Parameter(value.clone()) for value in values]
    rate = {"lr": _RATE} if "lr" in group else {}
    trial.param_groups = [{**copy.copy(group), **rate, "params": parameters}]
    trial.state = defaultdict(dict)
    for _ in range(_STEPS):
        for p in parameters:
            p.grad = torch.cos(p.detach() * 2)
        plain_step(trial)
    return [p.detach() for p in parameters]


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)
