"""Steps that every replica would take in its own way are refused before they change anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.strategies.optimizers import check_steps, refuse_step, refuse_unshardable
from lightning_parallel.strategies.refusals import refuse_embeddings
from lightning_parallel.strategies.unfinished import UnfinishedGradients
from lightning_parallel.zero.sharder import ShardOptions, ZeroSharder
from tests.glue.oracle import Classifier

Make = Callable[[Any, Any], Any]


def sharded(parameters: Any, optimizers: Any) -> ZeroSharder:
    return ZeroSharder(parameters, optimizers, None, ShardOptions())


def plain(parameters: Any, optimizers: Any) -> GradientReducer:
    return GradientReducer(parameters, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [sharded, plain])
def test_gradients_that_nobody_has_summed(make: Make) -> None:
    module = Classifier()
    module.automatic_optimization = False
    optimizer: Any = optim.SGD(module.parameters(), lr=0.1)
    reducer = make(module.parameters(), [optimizer])
    refuse_step(reducer, optimizer, module, 2)
    module.net(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError, match=r"SGD would step on gradients that were not summed over 2 replicas; call"):
        refuse_step(reducer, optimizer, module, 2)
    optimizer.zero_grad()
    refuse_step(reducer, optimizer, module, 2)
    reducer.prepare()
    module.net(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="self.manual_backward"):
        refuse_step(reducer, optimizer, module, 2)


@pytest.mark.parametrize("make", [sharded, plain])
def test_parameters_that_came_later(make: Make) -> None:
    module = Classifier()
    optimizer: Any = optim.SGD(module.parameters(), lr=0.1)
    reducer = make(module.parameters(), [optimizer])
    optimizer.add_param_group({"params": nn.Linear(3, 2).parameters()})
    with pytest.raises(RuntimeError, match=r"SGD trains a parameter of shape \(2, 3\) that was not in Classifier when"):
        refuse_step(reducer, optimizer, module, 2)


def test_optimizers_that_came_later() -> None:
    module = Classifier()
    first, second = (optim.SGD(module.parameters(), lr=0.1) for _ in range(2))
    refuse_step(plain(module.parameters(), [first]), second, module, 2)
    with pytest.raises(RuntimeError, match="this SGD was made after training had started, but ZeRO has sharded those"):
        refuse_step(sharded(module.parameters(), [first]), second, module, 2)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"max_norm": 1.0}, "0 has max_norm=1.0, which rescales the rows that a batch uses while it runs"),
        ({"scale_grad_by_freq": True}, "0 has scale_grad_by_freq=True, which counts words in a whole batch, of which"),
    ],
)
def test_embeddings_that_need_the_whole_batch(option: dict[str, Any], text: str) -> None:
    module = nn.Sequential(nn.Embedding(5, 2, **option), nn.Embedding(5, 2))
    with pytest.raises(ValueError, match=text):
        refuse_embeddings(module, 2, 1)
    refuse_embeddings(module, 1, 1)


class Wrapped(optim.Optimizer):
    """Looks like an optimizer, and was not built as one."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner, self.defaults, self.state, self.param_groups = (
            inner,
            inner.defaults,
            inner.state,
            inner.param_groups,
        )


def test_optimizers_without_hooks() -> None:
    wrapped = Wrapped(optim.SGD(Classifier().parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"Wrapped does not call torch.optim.Optimizer.__init__, so that 2 replicas"):
        refuse_unshardable([wrapped], 2)
    assert check_steps([wrapped], lambda optimizer: None) == []


class Corrects(optim.SGD):
    """Evaluates the model again in the middle of its step."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        super().step()
        with torch.enable_grad():
            return closure()


def test_closures_run_once_in_a_step() -> None:
    module = Classifier()
    optimizer = Corrects(module.parameters(), lr=0.1)
    sharded(module.parameters(), [optimizer])
    with pytest.raises(RuntimeError, match="Corrects calls its closure again within one step, when its groups hold"):
        optimizer.step(lambda: module.net(torch.ones(2, 8)).sum())


def test_every_step_is_checked_once_and_after_its_closure() -> None:
    class Twofold(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    seen: list[str] = []
    optimizer = Twofold(nn.Linear(2, 2).parameters(), lr=0.1)
    handles = check_steps([optimizer], lambda optimizer: seen.append("step"))
    optimizer.step()
    optimizer.step(closure=lambda: seen.append("closure"))
    optimizer.step(lambda: seen.append("closure"))
    assert seen == ["step", "closure", "step", "closure", "step"]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(seen) == 5


def test_gradients_that_still_accumulate() -> None:
    p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
    p.grad, q.grad = torch.ones(2), torch.ones(2)
    for keeps, grad, is_refused in (
        (False, p.grad, False),
        (False, None, False),
        (True, None, True),
        (False, torch.ones(2), True),
    ):
        p.grad = torch.ones(2) if grad is None or is_refused else grad
        unfinished = UnfinishedGradients({"p": p, "q": q}, lambda p, keeps=keeps: keeps)  # type: ignore[misc]
        unfinished.note()
        p.grad = grad
        if is_refused:
            with pytest.raises(RuntimeError, match="the gradient of p was changed while it is still accumulating"):
                unfinished.check()
        else:
            unfinished.check()
    unfinished.note()
    q.grad.mul_(2)
    with pytest.raises(RuntimeError, match="the gradient of q was changed"):
        unfinished.check()
    unfinished.check()
