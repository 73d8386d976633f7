"""TreeBroadcast: the last stage's value on every stage, exactly."""

from __future__ import annotations

import collections
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel.pipeline import share
from lightning_parallel.pipeline.share import TreeBroadcast
from tests.distributed.cut_tools import pipeline_mesh
from tests.harness import Ranks

Pair = collections.namedtuple("Pair", "first second")


@dataclass
class Opaque:
    """An object that travels whole."""

    value: Any


def values() -> list[Any]:
    return [
        None,
        1.5,
        7,
        True,
        "text",
        torch.tensor(2.5),
        {"loss": torch.arange(3.0), "list": [1, 2.5, None, "x"], "pair": Pair(torch.tensor([True]), -3)},
        (torch.arange(4, dtype=torch.bfloat16), torch.arange(2), torch.zeros(0, 3), torch.tensor([1 + 1j])),
        [torch.arange(6.0).view(2, 3).T, 2**70, float("inf"), Opaque({"a": 1})],
        [],
        {},
        [torch.float16, b"bytes"],
    ]


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert type(found) is Tensor
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        return
    assert type(found) is type(expected), f"{found!r} instead of {expected!r}"
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected


def check_values(rank: int, world_size: int) -> None:
    broadcast = TreeBroadcast(pipeline_mesh())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # the second time no structure travels
            for value in values():
                same(broadcast(value if rank == world_size - 1 else "ignored"), value)
    gradient = torch.ones(2, requires_grad=True) * 2
    found = broadcast([gradient])
    assert found[0].requires_grad == (rank == world_size - 1), "the graph stays on the last stage"


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_value_arrives(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_values)


def check_numbers(rank: int, world_size: int) -> None:
    """Numbers that change are no new structure; ever new structures are forgotten, on both sides alike."""
    broadcast = TreeBroadcast(pipeline_mesh())
    for step in range(20):
        assert broadcast({"loss": step * 0.5, "step": step, "x": torch.tensor(float(step))})["step"] == step
    assert len(broadcast._numbers) + len(broadcast._structures) == 1
    for step in range(share._MAX_KNOWN + 20):
        assert broadcast([f"key {step}"]) == [f"key {step}"] or rank < 0
        assert broadcast(["again"]) == ["again"]
    assert max(len(broadcast._numbers), len(broadcast._structures)) <= share._MAX_KNOWN


def test_numbers_and_ever_new_structures(ranks: Ranks) -> None:
    ranks(2, check_numbers)


def check_unsendable(rank: int, world_size: int) -> None:
    broadcast = TreeBroadcast(pipeline_mesh())
    with pytest.raises(TypeError, match="what the step returned or logged cannot be sent to the other pipeline stages"):
        broadcast({"function": lambda: None})
    assert broadcast(3 if rank == world_size - 1 else None) == 3, "the ranks still understand one another"


def test_what_cannot_be_sent_is_an_error_on_every_stage(ranks: Ranks) -> None:
    ranks(3, check_unsendable)


def check_alone(rank: int, world_size: int) -> None:
    value = object()
    assert TreeBroadcast(pipeline_mesh())(value) is value


def test_one_stage_sends_nothing(ranks: Ranks) -> None:
    ranks(1, check_alone)
