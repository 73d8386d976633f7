"""Forward hooks of the user's in modules whose activations are parts, in one process that plays one of two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.tensor_parallel.guard import SplitParameterError, SplitParameterGuard
from lightning_parallel.tensor_parallel.rules import ModuleRule, Region, TensorPlan

PAIR = ("1.fc", "1.out")


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.act(self.fc(x)))


def watched(sequence_parallel: bool = False) -> tuple[nn.Module, SplitParameterGuard]:
    model = nn.Sequential(nn.Linear(4, 4), MLP(), nn.Identity())
    rules = (ModuleRule(PAIR[0], "colwise"), ModuleRule(PAIR[1], "rowwise"))
    region = Region("1", PAIR[:1], PAIR[1])
    plan = TensorPlan(2, rules, (region,), sequence_parallel=sequence_parallel, blocks=("1",) * sequence_parallel)
    weight = model.get_submodule(PAIR[0]).weight
    return model, SplitParameterGuard(model, plan, {id(weight): "1.fc.weight"}, 2)


def step(model: nn.Module, guard: SplitParameterGuard) -> torch.Tensor:
    with guard.watching("step"):
        return model(torch.ones(2, 4)).sum()


def read(module: nn.Module, args: Any, out: torch.Tensor) -> None:
    out.mean()


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "layer"),
    [("1.fc", False, "1.fc"), ("1.act", False, "1.fc"), ("1.out", True, "1.out"), ("1", True, "1"), ("1", False, None)],
)
def test_a_hook_that_reads_a_part_is_named(name: str, sequence_parallel: bool, layer: str | None) -> None:
    model, guard = watched(sequence_parallel)
    handle = model.get_submodule(name).register_forward_hook(read)
    if layer is None:
        step(model, guard)
        return
    with pytest.raises(SplitParameterError, match=f"a forward hook on {name} uses .* the output of {layer} outside"):
        step(model, guard)
    assert list(model.get_submodule(name)._forward_hooks.values()) == [read], (
        "ours are gone, the user's is itself again"
    )
    handle.remove()
    step(model, guard)


def test_a_hook_may_not_use_a_split_weight_either() -> None:
    model, guard = watched()
    model.get_submodule("1.fc").register_forward_pre_hook(lambda module, args: module.weight.norm() and None)
    with pytest.raises(
        SplitParameterError, match=r"a forward hook on 1.fc uses 1.fc.weight outside of 1.fc \(in norm\)"
    ):
        step(model, guard)


def test_steps_are_watched_ever_more_rarely_and_after_a_change_of_hooks() -> None:
    model, guard = watched()
    refused = []
    for number in range(1, 18):
        if number == 11:
            handle = model.get_submodule("1.act").register_forward_hook(lambda module, args, out: None)
        if number == 13:
            handle.remove()
        try:
            with guard.watching("step"):
                model.get_submodule("1.fc").weight.norm()
        except SplitParameterError:
            refused.append(number)
    assert refused == [1, 2, 4, 8, 11, 13, 16]


def test_a_hook_that_removes_itself_stays_away() -> None:
    model, guard = watched()
    seen: list[int] = []

    def once(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        seen.append(out.dim() if out.requires_grad else 0)
        handle.remove()

    handle = model.get_submodule("1.fc").register_forward_hook(once)
    for _ in range(3):
        step(model, guard)
    assert seen == [2]
    assert not model.get_submodule("1.fc")._forward_hooks
