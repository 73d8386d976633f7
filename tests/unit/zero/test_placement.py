"""Which optimizers work on ranges of elements, which need whole parameters, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_parallel.zero.placement import needs_whole_parameters
from lightning_parallel.zero.sharder import ShardOptions, ZeroSharder


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2))]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "Rprop"])
def test_elementwise(name: str) -> None:
    kind = getattr(optim, name)
    derived = type("Renamed", (kind,), {})
    assert not needs_whole_parameters(kind(parameters()))
    assert not needs_whole_parameters(derived(parameters()))


def test_whole_parameters() -> None:
    own = type("Own", (optim.Adam,), {"step": lambda self, closure=None: None})
    unknown = type("Unknown", (optim.Optimizer,), {"step": lambda self, closure=None: None})
    assert needs_whole_parameters(optim.Adafactor(parameters()))
    assert needs_whole_parameters(own(parameters()))
    part = type("Part", (optim.SGD,), {"_init_group": lambda self, group, *lists: False})
    assert needs_whole_parameters(part(parameters()))
    assert needs_whole_parameters(unknown(parameters(), {}))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (optim.LBFGS, "LBFGS needs all parameters at once, so that its state cannot be sharded"),
        (optim.SparseAdam, "SparseAdam needs sparse gradients"),
        (type("SGDScheduleFree", (optim.SGD,), {}), "also changes parameters between its steps"),
    ],
)
def test_refused(kind: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ZeroSharder(parameters(), [kind(parameters())], None, ShardOptions())


def test_stages() -> None:
    with pytest.raises(ValueError, match="stage=4 does not exist; use 1, 2 or 3"):
        ShardOptions(stage=4)


def test_one_process_gets_its_parameters_and_optimizer_back() -> None:
    """Without a group everything is this rank's; afterwards nothing of the sharder is left."""
    (weight,) = parameters()
    optimizer = optim.AdamW([weight], lr=0.5)
    before = dict(optimizer.__dict__)
    sharder = ZeroSharder([weight], [optimizer], None, ShardOptions(stage=2))
    for _ in range(2):
        sharder.prepare()
        sharder.arm()
        (weight * 2).sum().backward()
        sharder.finish()
        sharder.deliver()
        optimizer.step()
        optimizer.zero_grad()
    sharder.close()
    expected = nn.Parameter(torch.ones(3, 2))
    plain = optim.AdamW([expected], lr=0.5)
    for _ in range(2):
        expected.grad = torch.full((3, 2), 2.0)
        plain.step()
    assert torch.equal(weight, expected)
    assert weight.untyped_storage().nbytes() == 24
    assert optimizer.param_groups[0]["params"][0] is weight
    assert optimizer.__dict__.keys() == before.keys()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    (weight * 2).sum().backward()
    assert weight.grad is not None


def test_calls_out_of_order() -> None:
    (weight,) = parameters()
    sharder = ZeroSharder([weight], [], None, ShardOptions())
    with pytest.raises(RuntimeError, match=r"finish\(\) needs arm\(\) before the backward pass"):
        sharder.finish()
    sharder.arm()
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="use torch.utils.checkpoint with use_reentrant=False"):
        weight.sum().backward()
