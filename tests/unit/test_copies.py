"""Deep copies of modules that hold what Python cannot copy."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.copies import copy_with_shared


class Helper:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts = [0]


class Odd(nn.Module):
    def __init__(self, odd: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.odd = odd
        self.steps = [0]


@pytest.mark.parametrize("odd", [threading.Lock(), (n for n in range(3)), torch], ids=lambda o: type(o).__name__)
def test_what_cannot_be_copied_is_shared_and_the_rest_is_not(odd: Any) -> None:
    module = Odd({"odd": odd, "count": [0]})
    clone: Any = copy_with_shared(module, {})
    assert clone.odd["odd"] is odd
    assert clone.odd["count"] is not module.odd["count"]
    assert clone.odd["count"] == [0]
    assert clone.steps is not module.steps
    assert clone.inner.weight is not module.inner.weight
    assert torch.equal(clone.inner.weight, module.inner.weight)


def test_only_the_part_of_an_object_that_cannot_be_copied_is_shared() -> None:
    module = Odd(Helper())
    clone: Any = copy_with_shared(module, {})
    assert clone.odd is not module.odd
    assert clone.odd.lock is module.odd.lock
    assert clone.odd.counts is not module.odd.counts


def test_values_with_a_graph_are_copied_without_it() -> None:
    module = Odd(None)
    nn.utils.weight_norm(module.inner)
    module.odd = [module.inner.weight_g * 2]
    clone: Any = copy_with_shared(module, {})
    assert not clone.odd[0].requires_grad
    assert torch.equal(clone.odd[0], module.odd[0])
    assert torch.equal(clone.inner(torch.ones(1, 2)), module.inner(torch.ones(1, 2)))


def test_given_copies_are_taken() -> None:
    module = Odd(threading.Lock())
    assert copy_with_shared(module, {id(module.inner.weight): module.inner.weight}).inner.weight is module.inner.weight
