"""Backward passes that a user's hook writes on the last stage, in one process that plays it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.pipeline.boundary import Boundary
from lightning_parallel.pipeline.hook_passes import WatchedPasses, refuse_unserved
from lightning_parallel.pipeline.outline import Outline
from lightning_parallel.pipeline.placeholder import PipelineCutError, placeholder_parameter

LEFT_OUT = "the backward pass of micro-batch 3 left out what stage 1 received from stage 0"


def received(*needs_gradient: bool) -> Boundary:
    """What arrived from the stage before: one tensor of ones for each."""
    sent = [torch.ones(2, requires_grad=needed) for needed in needs_gradient]
    outline = Outline.of(tuple(sent))
    boundary = Boundary.like(outline, (), torch.device("cpu"))
    for tensor in boundary.tensors:
        tensor.fill_(1)
    boundary.enter_graph()
    return boundary


def check(loss: torch.Tensor, boundary: Boundary) -> None:
    refuse_unserved(loss, boundary.anchors, stage=1, micro_batch=3)


def test_what_a_pass_left_out_is_told_from_what_the_loss_does_not_use() -> None:
    head = nn.Linear(2, 1)
    boundary = received(True, True, False)
    used, unused, plain = boundary.value()
    loss = head(used + plain).sum()
    for ask in (
        lambda: None,
        lambda: loss.backward(inputs=list(head.parameters()), retain_graph=True),
        lambda: torch.autograd.grad(loss, [*head.parameters(), used], retain_graph=True),
    ):
        ask()
        with pytest.raises(PipelineCutError, match=LEFT_OUT):
            check(loss, boundary)
    loss.backward(retain_graph=True)
    check(loss, boundary)
    assert unused.requires_grad
    assert boundary.anchors[1].grad is None
    torch.testing.assert_close(boundary.anchors[0].grad, head.weight[0])


def test_a_loss_that_uses_nothing_of_another_stage() -> None:
    head = nn.Linear(2, 1)
    loss = head(torch.ones(2)).sum()
    check(loss, received(True))
    loss.backward()
    check(loss, received(True))


class Cuts(torch.autograd.Function):
    """A user's function that has no gradient for its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


def test_a_function_without_a_gradient_leaves_nothing_out() -> None:
    boundary = received(True)
    loss = Cuts.apply(boundary.value()[0]).sum()
    loss.backward()
    check(loss, boundary)


def test_parameters_of_other_stages_are_named() -> None:
    own, foreign = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    stand_in = placeholder_parameter(foreign, "stem.weight", torch.device("cpu"), None)  # type: ignore[arg-type]
    plan = SimpleNamespace(owners={"stem.weight": (0,)})
    cut: Any = SimpleNamespace(foreign={"stem.weight": foreign}, stand_ins={id(foreign): stand_in}, stage=1, plan=plan)
    loss = own.sum()
    passes = (
        lambda inputs: loss.backward(inputs=inputs, retain_graph=True),
        lambda inputs: torch.autograd.backward(loss, inputs=inputs, retain_graph=True),
        lambda inputs: torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True),
    )
    for run in passes:
        for inputs in ([own, stand_in], (own, foreign), stand_in):
            with (
                WatchedPasses(cut),
                pytest.raises(PipelineCutError, match="among them stem.weight, which lives on stage 0"),
            ):
                run(inputs)
        with WatchedPasses(cut):
            run([own])
    with WatchedPasses(cut):
        loss.backward(retain_graph=True)
    torch.testing.assert_close(own.grad, torch.full((2,), 3.0))
