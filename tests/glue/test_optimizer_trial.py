"""Optimizers of unknown kinds are tried before ranks that hold parts of parameters step with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.parameters import ParameterTag
from lightning_parallel.strategies.optimizer_trial import Scope, scope_of_step
from lightning_parallel.strategies.optimizers import KnownOptimizers, refuse_optimizers, refuse_unshardable
from lightning_parallel.tensor_parallel.sharding import split_even


class Own(torch.optim.Optimizer):
    """Scales each gradient by a factor of the user's own."""

    def __init__(self, parameters: Any, factor: Callable[..., Any], lr: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr})
        self.factor = factor
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        everything = [p for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = p.clone()
                p.sub_(p.grad * self.factor(p, everything), alpha=group["lr"])


class OwnSGD(torch.optim.SGD):
    """A class of torch's with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad /= p.grad.norm()
        return super().step(closure)


def own(factor: Callable[..., Any]) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: Own(parameters, factor)


def too_small(p: Any, every: Any) -> Any:
    raise ValueError("only for large parameters")


KINDS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Scope | None]] = {
    "sign": (own(lambda p, every: p.grad.sign()), Scope.ELEMENT),
    "norm": (own(lambda p, every: p.norm()), Scope.TENSOR),
    "rows": (own(lambda p, every: p.grad.norm(dim=0, keepdim=True)), Scope.TENSOR),
    "columns": (own(lambda p, every: p.grad.norm(dim=-1, keepdim=True)), Scope.TENSOR),
    "all": (own(lambda p, every: sum(q.grad.square().sum() for q in every)), Scope.MODEL),
    "random": (own(lambda p, every: torch.rand_like(p)), None),
    "fails": (own(too_small), None),
    "subclass": (OwnSGD, Scope.TENSOR),
    "rprop": (torch.optim.Rprop, Scope.ELEMENT),
    "muon": (torch.optim.Muon, Scope.TENSOR),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_looks_at_and_no_trace_of_the_trial(kind: str) -> None:
    make, expected = KINDS[kind]
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = make([p])
    group, random = dict(optimizer.param_groups[0]), torch.get_rng_state()
    assert scope_of_step(optimizer) is expected
    assert optimizer.param_groups[0]["params"][0] is p
    assert {**optimizer.param_groups[0], "params": None} == {**group, "params": None}
    assert not optimizer.state
    assert getattr(optimizer, "count", 0) == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(p, torch.ones(4, 4))
    assert p.grad is None


def refuse(kind: str, split: bool, ranks: int) -> None:
    p = nn.Parameter(torch.ones(4, 4))
    tag = ParameterTag("layer.weight", (4, 4), split_even(0, 4, 2) if split else None)
    refuse_optimizers([KINDS[kind][0]([p])], {tag.name: tag}, {id(p): tag.name}, ranks)


def test_ranks_that_share_a_model_refuse_what_needs_more_than_they_hold() -> None:
    with pytest.raises(ValueError, match=r"Own needs whole tensors, but layer.weight of shape \(4, 4\) is split"):
        refuse("norm", split=True, ranks=2)
    with pytest.raises(
        ValueError, match="a step of Own depends on all parameters at once, but 2 ranks share the model"
    ):
        refuse("all", split=False, ranks=2)
    refuse("norm", split=False, ranks=2)
    refuse("all", split=False, ranks=1)
    for kind in ("sign", "random", "fails"):
        refuse(kind, split=True, ranks=2)


class OwnList(Own):
    """Steps on a list that it has kept."""

    def __init__(self, parameters: Any) -> None:
        kept = list(parameters)
        super().__init__(kept, lambda p, every: 1.0)
        self.kept = kept


def test_replicas_refuse_steps_that_need_all_parameters_or_take_them_from_elsewhere() -> None:
    def refuse(make: Callable[[Any], torch.optim.Optimizer], replicas: int = 2) -> None:
        refuse_unshardable([make([nn.Parameter(torch.ones(4, 4))])], replicas)

    with pytest.raises(ValueError, match="a step of Own depends on all parameters at once, but each of 2 replicas"):
        refuse(KINDS["all"][0])
    with pytest.raises(ValueError, match=r"OwnList.kept is a list of parameters beside the optimizer's groups"):
        refuse(OwnList)
    refuse(KINDS["all"][0], replicas=1)
    for kind in ("sign", "norm", "random", "fails", "rprop"):
        refuse(KINDS[kind][0])


def test_parameters_that_come_later_to_an_optimizer_of_whole_tensors() -> None:
    split, whole = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    tags = {"split": ParameterTag("split", (4, 4), split_even(0, 4, 2)), "whole": ParameterTag("whole", (4, 4), None)}
    optimizers = [torch.optim.Muon([whole]), torch.optim.SGD([whole], lr=0.1)]
    known = KnownOptimizers(optimizers, tags, {id(split): "split", id(whole): "whole"}, 2)
    for optimizer in optimizers:
        known.check(optimizer)
        optimizer.add_param_group({"params": [split]})
    known.check(optimizers[1])
    with pytest.raises(ValueError, match=r"Muon needs whole tensors, but split of shape"):
        known.check(optimizers[0])
    with pytest.raises(RuntimeError, match="this SGD was made after training had started, but 2 ranks"):
        known.check(torch.optim.SGD([whole], lr=0.1))
