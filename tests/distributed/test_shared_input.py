"""Query, key and value over one input: one backward all-reduce, and always the results of separate linears."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_parallel.tensor_parallel import linear
from lightning_parallel.tensor_parallel.layers import attach_group, convert_to_column_parallel, restore_module
from lightning_parallel.tensor_parallel.sharding import split_uneven
from lightning_parallel.tensor_parallel.shards import shard_tensor
from lightning_parallel.tensor_parallel.shared_input import SharedInput
from tests.distributed.formulas import wave
from tests.distributed.layer_tools import Counter, close, fill, put_shards
from tests.harness import Ranks

worlds = pytest.mark.parametrize("world_size", [2, 3, 4])
NAMES = ("q", "k", "v")


class Projections(nn.Module):
    """Three linears of one input; `used` are called, in that order, and `forward` mixes what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 7)
        self.k = nn.Linear(6, 5, bias=False)
        self.v = nn.Linear(6, 7)
        self.used: tuple[str, ...] = NAMES
        self.double()
        fill(self)

    def outputs(self, x: Tensor) -> list[Tensor]:
        return [getattr(self, name)(x) for name in self.used]

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([y.sin().sum(-1) for y in self.outputs(x)]).sum(0)


def split(model: Projections) -> SharedInput:
    shared, group = SharedInput(), dist.group.WORLD
    for name in NAMES:
        layer = getattr(model, name)
        spec = split_uneven(0, layer.out_features, dist.get_world_size())
        convert_to_column_parallel(layer, spec, group, shared_input=shared)
        put_shards(layer, spec)
    return shared


def pair() -> tuple[Projections, Projections, SharedInput]:
    plain, model = Projections(), Projections()
    return plain, model, split(model)


def compare(plain: Projections, model: Projections, reduces: int, x: Tensor | None = None, **how: Any) -> None:
    """One backward pass of each; sums over the ranks' outputs are the plain model's."""
    x = wave(4, 6) if x is None else x
    model_x, plain_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    with Counter() as counter:
        y = checkpoint(model, model_x, **how) if how else model(model_x)
        (y * wave(4)).sum().backward()
    (plain(plain_x) * wave(4)).sum().backward()
    close(model_x.grad, plain_x.grad, 1e-11)
    assert counter.all_reduces == reduces
    close_gradients(plain, model)


def close_gradients(plain: nn.Module, model: nn.Module) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if expected.grad is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            spec = split_uneven(0, expected.shape[0], dist.get_world_size())
            close(parameter.grad, shard_tensor(expected.grad, spec, dist.get_rank()), 1e-11)


def check_one_reduction(rank: int, world_size: int) -> None:
    plain, model, _ = pair()
    for _ in range(3):  # accumulates
        compare(plain, model, 1)
    # In any order, and some never called.
    for used in (("v", "q", "k"), ("k",), ("q", "v"), ("v",)):
        plain.used = model.used = used
        compare(plain, model, 1)
    # Every call with an input of its own is reduced alone.
    plain.used = model.used = ("q", "q", "k")
    compare(plain, model, 2)


@worlds
def test_one_reduction(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_one_reduction)


class Products(TorchDispatchMode):
    """Files the shapes of all matrix products among the events of a list."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.events.append(tuple(args[-2].shape))
        return func(*args, **(kwargs or {}))


class Noted:
    """A running collective that files when it is waited for."""

    def __init__(self, work: Any, events: list[Any]) -> None:
        self.work, self.events = work, events

    def wait(self) -> None:
        self.events.append("wait")
        self.work.wait()


def check_overlap(rank: int, world_size: int) -> list[Any]:
    """Events of a backward pass in their order."""
    _, model, _ = pair()
    events: list[Any] = []
    original = linear.comm.all_reduce_

    def noted(tensor: Tensor, group: Any, **options: Any) -> Any:
        events.append("start")
        return Noted(original(tensor, group, **options), events)

    linear.comm.all_reduce_ = noted  # type: ignore[assignment]
    try:
        loss = model(wave(4, 6).requires_grad_()).sum()
        with Products(events):
            loss.backward()
    finally:
        linear.comm.all_reduce_ = original
    return events


def test_weight_gradients_are_computed_while_the_inputs_is_reduced(ranks: Ranks) -> None:
    """Three products of (tokens, outputs) with weights first, then three of (outputs, tokens) with the input."""
    for events, outputs in zip(ranks(2, check_overlap), ((4, 3, 4), (3, 2, 3)), strict=True):
        assert events == [*((4, n) for n in outputs), "start", *((n, 4) for n in outputs), "wait"]


def check_frozen(rank: int, world_size: int) -> None:
    for frozen in (["q"], ["k", "v"], list(NAMES)):
        plain, model, _ = pair()
        for module in (plain, model):
            for name in frozen:
                getattr(module, name).requires_grad_(False)
        compare(plain, model, 1)
        assert all(getattr(model, name).weight.grad is None for name in frozen)


def test_frozen_members(ranks: Ranks) -> None:
    ranks(2, check_frozen)


def check_checkpointing(rank: int, world_size: int) -> None:
    for reentrant in (False, True):
        plain, model, _ = pair()
        for used in (NAMES, ("k", "q"), ("v",)):
            plain.used = model.used = used
            compare(plain, model, 1, use_reentrant=reentrant)


def test_activation_checkpointing(ranks: Ranks) -> None:
    ranks(2, check_checkpointing)


def check_no_sharing(rank: int, world_size: int) -> None:
    """Where outputs must not be taken from what another member computed."""
    plain, model, shared = pair()
    x = wave(4, 6).requires_grad_()
    # Another tensor, though equal.
    model.q(x)
    assert shared._outputs
    y = model.k(x.clone())
    close(y, plain.k(x).split([3, 2], -1)[rank], 1e-12)
    # The same tensor, changed in place.
    z = x * 1
    model.q(z)
    z.mul_(2)
    close(model.v(z), plain.v(2 * x).split([4, 3], -1)[rank], 1e-12)
    # A weight changed in place since.
    z = x * 1
    model.q(z)
    with torch.no_grad():
        model.v.weight.mul_(2)
        plain.v.weight.mul_(2)
    close(model.v(z), plain.v(x).split([4, 3], -1)[rank], 1e-12)
    # Another dtype of autocast.
    z = x.float()
    single = Projections().float()
    split(single)
    single.q(z)
    with torch.autocast("cpu", torch.bfloat16):
        assert single.v(z).dtype == torch.bfloat16
    # No gradient wanted: nothing is computed ahead or kept.
    shared.clear()
    with torch.no_grad():
        model.q(x)
    model.q(x.detach())
    with torch.inference_mode():
        model.q(wave(4, 6))
    assert not shared._outputs
    assert shared._input is None
    # All asked for: nothing is kept.
    model.outputs(x)
    assert not shared._outputs
    assert shared._input is None


def test_outputs_are_only_shared_where_they_are_the_same(ranks: Ranks) -> None:
    ranks(2, check_no_sharing)


def check_errors(rank: int, world_size: int) -> None:
    plain, model, shared = pair()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.q(wave(4, 5).requires_grad_())
    assert shared._input is None
    model.q(wave(4, 6).requires_grad_())  # the others are never asked for
    compare(plain, model, 1)


def test_errors_leave_nothing_behind(ranks: Ranks) -> None:
    ranks(2, check_errors)


def check_copies(rank: int, world_size: int) -> None:
    plain, model, _ = pair()
    model.q(wave(4, 6).requires_grad_())  # outputs that belong to the original's graph
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    attach_group(twins[1], dist.group.WORLD)
    for parameter in model.parameters():  # a twin that still used these would notice
        nn.init.zeros_(parameter)
    for twin in twins:
        compare(Projections(), twin, 1)
        assert all(parameter.grad is None for parameter in model.parameters())
    # One linear copied alone keeps working, and so do those it leaves behind.
    alone = copy.deepcopy(twins[0].k)
    x = wave(4, 6).requires_grad_()
    close(alone(x), plain.k(x).split([3, 2], -1)[rank], 1e-12)
    restore_module(twins[0].q)
    assert twins[0].q not in twins[0].k._shared_input.members
    twins[0].used = plain.used = ("k", "v")
    twins[0].zero_grad()
    twins[0].q.requires_grad_(False)
    x, expected_x = wave(4, 6).requires_grad_(), wave(4, 6).requires_grad_()
    with Counter() as counter:
        twins[0](x).sum().backward()
    plain(expected_x).sum().backward()
    close(x.grad, expected_x.grad, 1e-11)
    assert counter.all_reduces == 1


def test_copies(ranks: Ranks) -> None:
    ranks(2, check_copies)


def unchanged(module: nn.Module, grad_input: Any, grad_output: Any) -> tuple[Tensor]:
    return (grad_input[0] * 1,)


def check_hooks(rank: int, world_size: int) -> None:
    """Hooks of a member run with its own input and output, in the order of the calls."""
    plain, model, _ = pair()
    for module in (plain, model):
        module.k.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        module.v.register_forward_hook(lambda _, args, y: y * 3)
        module.q.register_full_backward_hook(unchanged)
    compare(plain, model, 3)  # q's hook and k's make inputs of their own


def test_hooks(ranks: Ranks) -> None:
    ranks(2, check_hooks)


def check_second_derivatives(rank: int, world_size: int) -> None:
    plain, model, _ = pair()
    results = []
    for module in (model, plain):
        x = wave(4, 6).requires_grad_()
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        results.append(x.grad)
    close(results[0], results[1], 1e-10)
    close_gradients(plain, model)


def test_second_derivatives(ranks: Ranks) -> None:
    ranks(2, check_second_derivatives)
