"""Split models against the same model in one process: loss and every gradient, fp64, 1e-10."""

from __future__ import annotations

import pytest

from tests.distributed.tensor_models import build, compare_with_plain, language_loss, split_model
from tests.harness import Ranks

worlds = pytest.mark.parametrize("world_size", [2, 4])


def check_automatic(rank: int, world_size: int, kind: str) -> tuple[str, ...]:
    plain, split = build(kind), build(kind)
    plan, tags, undo = split_model(split, "auto")
    compare_with_plain(plain, split, tags, language_loss)
    undo.restore()
    assert [type(m) for m in split.modules()] == [type(m) for m in plain.modules()]
    return plan.replicated


@worlds
@pytest.mark.parametrize(
    "kind",
    ["view", "view_tied", "split", "chunk", "flat", "flat_tied", "grouped1", "grouped2", "grouped4", "grouped8_tied"],
)
def test_automatic_plan(ranks: Ranks, world_size: int, kind: str) -> None:
    for replicated in ranks(world_size, check_automatic, kind):
        assert replicated == ("pos",)
