"""How modules of users are called when a split of theirs is tried, and what cannot be tried."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.tensor_parallel.plan import resolve_plan

PLAN = {"blocks.*.fc": "colwise", "blocks.*.out": "rowwise"}


class MLP(nn.Module):
    def __init__(self, kind: Any = None) -> None:
        super().__init__()
        self.kind = kind
        self.fc, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        if self.kind is None:
            return x + self.out(torch.tanh(self.fc(x)))
        return self.kind(x.hidden + self.out(torch.tanh(self.fc(x.hidden))), x.depth + 1)


class Stack(nn.Module):
    def __init__(self, kind: Any = None) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(MLP(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        state: Any = x if self.kind is None else self.kind(x, 0)
        for block in self.blocks:
            state = block(state)
        return state if self.kind is None else state.hidden


@dataclass
class Record:
    hidden: Tensor
    depth: int


class Opaque(SimpleNamespace):
    def __init__(self, hidden: Tensor, depth: int) -> None:
        super().__init__(hidden=hidden, depth=depth)


Pair = namedtuple("Pair", ("hidden", "depth"))


def evidence(model: nn.Module) -> set[str]:
    return {region.evidence for region in resolve_plan(model, PLAN, 2).regions}


@pytest.mark.parametrize(
    ("kind", "found"), [(None, "checked"), (Record, "checked"), (Pair, "checked"), (Opaque, "given")]
)
def test_arguments_of_any_structure(kind: Any, found: str) -> None:
    assert evidence(Stack(kind)) == {found}


def softmax_between(self: Any, x: Tensor) -> Tensor:
    return x + self.out(F.softmax(self.fc(x), -1))


def relu_between(self: Any, x: Tensor) -> Tensor:
    return x + self.out(torch.relu(self.fc(x)))


def test_a_forward_that_was_replaced_on_the_object_is_tried_too() -> None:
    model = Stack()
    for block in model.blocks:
        block.forward = MethodType(relu_between, block)  # type: ignore[method-assign]
    assert evidence(model) == {"checked"}
    last = model.blocks[1]
    last.forward = MethodType(softmax_between, last)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="does not compute the same when blocks.1.fc and blocks.1.out are split"):
        evidence(model)
    last.forward = MethodType(relu_between, model.blocks[0])  # type: ignore[method-assign]
    assert evidence(model) == {"checked", "given"}


class Product(torch.autograd.Function):
    """A matrix product of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, -2).t() @ x.flatten(0, -2)


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda m, x: Product.apply(Product.apply(x, m.fc1.weight).tanh(), m.fc2.weight), "fc1.weight"),
        (lambda m, x: m.fc2(F.linear(x, m.fc1.weight, m.fc1.bias)), "fc1.bias"),
        (lambda m, x: m.fc1(x).tanh() @ m.fc2.weight.t(), "fc2.weight"),
        (lambda m, x: m.fc2(m.fc1(x).tanh()) * m.fc1.weight.norm(), "fc1.weight"),
    ],
    ids=["own function", "column", "row", "once more"],
)
def test_weights_that_are_used_past_their_layers_are_named(forward: Any, name: str) -> None:
    class Bypassing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = forward(self, x)
            return result

    model = nn.ModuleDict({"mlp": Bypassing()})
    with pytest.raises(ValueError, match=rf"Bypassing 'mlp' cannot be split .* uses {name} past .*call the layer"):
        resolve_plan(model, {"mlp.fc1": "colwise", "mlp.fc2": "rowwise"}, 2)
