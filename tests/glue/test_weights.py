"""Weights of micro-batches, and the loss of the global batch with the gradient of one replica's share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel.layout import ParallelLayout
from lightning_parallel.mesh import Mesh
from lightning_parallel.strategies.logs import LogCall
from lightning_parallel.strategies.weights import ReplicaCombiner, global_loss, loss_weights

CPU = torch.device("cpu")


def batch(samples: int, valid: int) -> dict[str, Tensor]:
    labels = torch.full((samples, 3), -100)
    labels.view(-1)[:valid] = 1
    return {"x": torch.zeros(samples, 2), "labels": labels}


PARTS = [batch(2, 5), batch(1, 0), batch(3, 2)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("samples", [2, 1, 3]),
        ("valid_labels", [5, 0, 2]),
        (lambda part: len(part["x"]) ** 2, [4, 1, 9]),
        (lambda part: (part["labels"] == 1).sum(), [5, 0, 2]),
        (lambda part: 0.5, [0.5, 0.5, 0.5]),
    ],
)
def test_weights(rule: Any, expected: list[float]) -> None:
    found = loss_weights(PARTS, rule, True, CPU)
    assert [(float(w), w.dtype, w.shape) for w in found] == [(e, torch.float64, ()) for e in expected]
    assert [float(w) for w in loss_weights(PARTS, rule, False, CPU)] == [0, 0, 0]


def test_a_batch_of_unknown_size_counts_once() -> None:
    assert [float(w) for w in loss_weights(["text", None], "samples", True, CPU)] == [1, 1]


def test_no_labels_are_an_error() -> None:
    with pytest.raises(ValueError, match="loss_weight='valid_labels' needs integer labels"):
        loss_weights([{"x": torch.zeros(2)}], "valid_labels", True, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_global_loss_has_the_gradient_of_the_share(dtype: torch.dtype) -> None:
    w = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    value, share = torch.tensor(5.0, dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64)
    loss = global_loss(w * w, value, share)
    assert (loss.item(), loss.dtype) == (5.0, dtype)
    (loss * 2).backward()
    assert w.grad is not None
    assert (float(w.grad), w.grad.dtype) == (2 * 2 * 3 * 0.25, dtype)


def test_replicas_add_up_to_the_global_gradient() -> None:
    """Two replicas with 1 and 3 samples: the sum of their gradients is that of the mean over 4."""
    x = torch.tensor([1.0, 2.0, 3.0, 7.0], dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for part in (x[:1], x[1:]):
        w = torch.ones((), dtype=torch.float64, requires_grad=True)
        global_loss((w * part).mean(), x.mean(), torch.tensor(len(part) / 4)).backward()
        assert w.grad is not None
        total += w.grad
    assert float(total) == float(x.mean())


def test_one_replica_combines_nothing() -> None:
    combine = ReplicaCombiner(Mesh(ParallelLayout(), 0, CPU))
    loss, weight = torch.tensor(1.5), torch.tensor(3.0)
    calls = [LogCall("f", "x", torch.tensor(1.0), None, 2)]
    assert combine(loss, weight, calls) == (loss, weight, calls)
    assert combine(None, weight, []) == (None, weight, [])
