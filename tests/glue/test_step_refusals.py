"""Steps that every replica would take in its own way are refused before they change anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.strategies.optimizers import refuse_step
from lightning_parallel.strategies.refusals import refuse_embeddings
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
