"""Code that looks at gradients is found by its text, in whatever a hook calls of the user's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from lightning_parallel.strategies.gradient_readers import names_gradients


def scale(module: nn.Module) -> None:
    for p in module.parameters():
        if p.grad is not None:
            p.grad.mul_(2)


def unrelated(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        return module.requires_grad_(False)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


class Tools:
    @staticmethod
    def norms(module: nn.Module) -> list[Any]:
        return [p.grad for p in module.parameters()]


class Block(nn.Module):
    def rescale(self) -> None:
        scale(self)

    @property
    def size(self) -> Any:
        return self.weight.grad.norm()


class User:
    def __init__(self) -> None:
        self.block = Block()

    def direct(self) -> Any:
        return self.block.weight.grad

    def clips(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.block.parameters(), 1.0)

    def clips_by_name(self) -> None:
        clip_grad_norm_(self.block.parameters(), 1.0)

    def in_a_comprehension(self) -> Any:
        return [p.grad for p in self.block.parameters()]

    def own_helper(self) -> None:
        self.direct()

    def method_of_a_part(self) -> None:
        self.block.rescale()

    def property_of_a_part(self) -> Any:
        return self.block.size

    def function_beside(self) -> None:
        scale(self.block)

    def of_a_class(self) -> Any:
        return Tools.norms(self.block)

    @wrapped
    def decorated(self) -> None:
        scale(self.block)

    @torch.no_grad()
    def without_graph(self) -> None:
        scale(self.block)


@pytest.mark.parametrize("name", [name for name in vars(User) if not name.startswith("_")])
def test_readers_are_found(name: str) -> None:
    user = User()
    assert names_gradients([getattr(user, name)], [user, user.block])


def test_closures_and_callables_are_found() -> None:
    def enclosed(function: Any) -> Any:
        return lambda module: function(module)

    assert names_gradients([enclosed(scale)])
    assert names_gradients([functools.partial(scale, nn.Linear(1, 1))])
    assert names_gradients([type("Called", (), {"__call__": scale})()])


def test_others_are_not() -> None:
    class Innocent(nn.Module):
        def step(self) -> None:
            unrelated(self)
            self.zero_grad()
            self.step()

    assert not names_gradients([Innocent().step, unrelated, print], [Innocent()])
