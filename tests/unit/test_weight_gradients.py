"""Gradients of weights that are put off are those of plain backward passes, and hooks see each of them once."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from lightning_parallel.weight_gradients import WeightGradients, split_linears


class Conv1D(nn.Module):
    """As transformers': a linear whose weight is stored as (inputs, outputs)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.nf)


class Twice(nn.Module):
    """Uses one weight in two layers, and one layer under a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).tanh())
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Transformed(nn.Module):
    """Layers inside of functions that torch.func batches, differentiates, or calls with other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.batched, self.moved, self.called = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.vmap(self.batched)(x).tanh()
        y, tangent = torch.func.jvp(self.moved, (x,), (torch.ones_like(x),))
        slope = torch.func.grad(lambda z: self.moved(z).square().sum())(x)
        doubled = {name: 2 * p for name, p in self.called.named_parameters()}
        return torch.func.functional_call(self.called, doubled, (y + slope,)) + tangent


MODELS: dict[str, Callable[[], nn.Module]] = {
    "biases": lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4, bias=False)),
    "Conv1D": lambda: nn.Sequential(Conv1D(6, 4), nn.GELU(), nn.Linear(6, 4)),
    "used twice": lambda: Twice(False),
    "reentrant checkpoint": lambda: Twice(True),
    "torch.func": Transformed,
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
}


def filled(name: str) -> nn.Module:
    model = MODELS[name]()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.sin(torch.arange(p.numel(), dtype=torch.float32) + number).view(p.shape) / 2)
    return model


def inputs(count: int = 3, shape: tuple[int, ...] = (2, 3, 4)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def plainly(model: nn.Module, batches: list[Tensor], steps: int = 1) -> list[Tensor | None]:
    for x in batches * steps:
        loss_of(model, x).backward()
    return [p.grad for p in model.parameters()]


def split(model: nn.Module, batches: list[Tensor], steps: int = 1) -> list[Tensor | None]:
    """All backwards, then all gradients of weights; gradients add up over the steps."""
    store = WeightGradients()
    undo = split_linears(model, store)
    for _ in range(steps):
        with store.opened():
            losses = [loss_of(model, x) for x in batches]
            for number, loss in enumerate(losses):
                with store.backward(number):
                    loss.backward()
            for number in range(len(losses)):
                store.compute(number)
    undo()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("needs_input_gradient", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_split_backwards_give_the_gradients_of_whole_ones(name: str, needs_input_gradient: bool) -> None:
    batches = [x.requires_grad_(needs_input_gradient) for x in inputs()]
    expected = plainly(filled(name), [x.detach().requires_grad_(needs_input_gradient) for x in batches], steps=3)
    found = split(filled(name), batches, steps=3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert all((x.grad is not None) == needs_input_gradient for x in batches)


@pytest.mark.parametrize("shape", [(4,), (0, 4), (5, 4)])
def test_any_number_of_rows(shape: tuple[int, ...]) -> None:
    batches = inputs(2, shape) if shape[0] else inputs(1) + inputs(1, shape)
    weigh: Any = lambda model, x: model(x).square().sum()  # noqa: E731 - a mean of nothing is not a number
    expected, found = filled("biases"), filled("biases")
    for x in batches:
        weigh(expected, x).backward()
    store = WeightGradients()
    split_linears(found, store)
    with store.opened():
        for number, x in enumerate(batches):
            with store.backward(number):
                weigh(found, x).backward()
            store.compute(number)
    torch.testing.assert_close([p.grad for p in found.parameters()], [p.grad for p in expected.parameters()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_under_autocast_and_in_other_dtypes(dtype: torch.dtype) -> None:
    is_cast = dtype == torch.bfloat16
    make = lambda: filled("biases") if is_cast else filled("biases").to(dtype)  # noqa: E731
    batches = [x if is_cast else x.to(dtype) for x in inputs()]
    with torch.autocast("cpu", dtype) if is_cast else nullcontext():
        expected, found = plainly(make(), batches, 2), split(make(), batches, 2)
    assert [g.dtype for g in found] == [g.dtype for g in expected]  # type: ignore[union-attr]
    torch.testing.assert_close(found, expected)


def test_nothing_is_computed_before_its_time_and_sums_are_made_in_place() -> None:
    model, store = filled("biases"), WeightGradients()
    weight = model[0].weight  # type: ignore[index]
    split_linears(model, store)
    for step in range(2):
        with store.opened():
            with store.backward(0):
                loss_of(model, inputs()[0]).backward()
            before = weight.grad
            assert (before is None) == (step == 0)
            kept = None if before is None else before.clone()
            with store.backward(1):
                loss_of(model, inputs()[1]).backward()
            assert weight.grad is before
            if before is not None and kept is not None:
                torch.testing.assert_close(before, kept)
            store.compute(0)
            first = weight.grad
            store.compute(1)
            assert weight.grad is first
    torch.testing.assert_close([p.grad for p in model.parameters()], plainly(filled("biases"), inputs(2), 2))


@pytest.mark.parametrize("kind", ["tensor", "post", "multi", "node"])
def test_hooks_see_the_gradient_of_each_micro_batch_once(kind: str) -> None:
    def run(train: Callable[..., Any]) -> list[Tensor]:
        model, seen = filled("biases"), []
        weight = model[0].weight  # type: ignore[index]

        def note(gradient: Tensor) -> None:
            seen.append(gradient.clone())

        node = weight.view_as(weight).grad_fn.next_functions[0][0] if kind == "node" else None
        if kind == "tensor":
            weight.register_hook(note)
        elif kind == "post":
            weight.register_post_accumulate_grad_hook(lambda p: note(p.grad))
        elif kind == "multi":
            handle = register_multi_grad_hook([weight], lambda gradients: note(gradients[0]))
        else:
            node.register_prehook(lambda gradients: note(gradients[0]))
        train(model, inputs(), 2)
        if kind == "multi":
            handle.remove()
        return seen

    found, expected = run(split), run(plainly)
    assert len(found) == 6
    torch.testing.assert_close(found, expected)


def test_a_hook_on_several_gradients_sees_all_of_them_at_once() -> None:
    def run(train: Callable[..., Any], model: nn.Module) -> list[list[Tensor]]:
        seen: list[list[Tensor]] = []
        handle = register_multi_grad_hook(
            list(model.parameters()), lambda found: seen.append([g.clone() for g in found])
        )
        train(model, inputs(), 2)
        handle.remove()
        return seen

    found, expected = run(split, filled("biases")), run(plainly, filled("biases"))
    assert len(found) == 6
    torch.testing.assert_close(found, expected)


def test_gradients_lie_in_memory_as_their_weights_do() -> None:
    """Fused optimizers count on it."""
    models = []
    for train in (split, plainly):
        model = filled("biases")
        model[0].weight = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6).t())  # type: ignore[index]
        train(model, inputs(), 2)
        models.append(model)
    found, expected = ([p.grad for p in model.parameters()] for model in models)
    assert [g.stride() for g in found] == [g.stride() for g in expected]  # type: ignore[union-attr]
    torch.testing.assert_close(found, expected)


def test_pickles_and_copies_are_plain_layers() -> None:
    model, store = filled("biases"), WeightGradients()
    split_linears(model, store)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert_plain(pickle.loads(pickle.dumps(model, protocol)), model)
    assert_plain(copy.deepcopy(model), model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert_plain(torch.load(file, weights_only=False), model)


def assert_plain(found: nn.Module, model: nn.Module) -> None:
    plain = filled("biases")
    assert [type(m) for m in found.modules()] == [type(m) for m in plain.modules()]
    assert [set(vars(m)) for m in found.modules()] == [set(vars(m)) for m in plain.modules()]
    torch.testing.assert_close(found.state_dict(), model.state_dict())


def test_frozen_layers_and_evaluation_are_left_alone() -> None:
    model, store = filled("biases"), WeightGradients()
    model[0].requires_grad_(False)  # type: ignore[index]
    split_linears(model, store)
    with store.opened():
        with torch.no_grad():
            model(inputs()[0])
        with store.backward(0):
            loss_of(model, inputs()[0]).backward()
        store.compute(0)
    assert [p.grad is not None for p in model.parameters()] == [False, False, True]
    assert store.put_off(model[2].weight) is None, "closed"  # type: ignore[index]


def test_classes_come_back() -> None:
    model = filled("attention")
    classes, attributes = [type(m) for m in model.modules()], [set(vars(m)) for m in model.modules()]
    undo = split_linears(model, WeightGradients())
    assert [type(m) for m in model.modules()] != classes
    undo()
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == attributes


def test_what_cannot_be_split_is_refused() -> None:
    model, store = filled("biases"), WeightGradients()
    split_linears(model, store)
    x = inputs()[0].requires_grad_()
    with (
        store.opened(),
        pytest.raises(RuntimeError, match="a gradient was taken inside of the step .* use schedule='1f1b'"),
    ):
        torch.autograd.grad(loss_of(model, x), x)
    with store.opened(), store.backward(0), pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(loss_of(model, x), x, create_graph=True)
    for take in (
        lambda loss: torch.autograd.grad(loss, x),
        lambda loss: loss.backward(inputs=[x]),
    ):
        with (
            store.opened(),
            store.backward(0),
            pytest.raises(RuntimeError, match="taken in the hook backward .*'1f1b'"),
        ):
            take(loss_of(model, x))
    data = inputs()[0]
    with store.opened():
        with store.backward(0):
            loss_of(model, data).backward()
        data.zero_()
        with pytest.raises(RuntimeError, match=r"of shape \(6, 4\), .* was changed in place after its backward pass"):
            store.compute(0)
    assert not store._kept
