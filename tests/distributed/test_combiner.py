"""ReplicaCombiner: the loss and logs of several replicas are those of one process on all samples."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel.layout import ParallelLayout
from lightning_parallel.mesh import build_mesh
from lightning_parallel.strategies.logs import LogCall
from lightning_parallel.strategies.weights import SLOTS, ReplicaCombiner
from tests.harness import Ranks

CPU = torch.device("cpu")
LOSSES, WEIGHTS = [1.0, 2.0, 6.0], [2.0, 0.0, 6.0]
"""The second replica only repeats samples of the others."""


def combiner(world_size: int, looks: bool | None = None) -> ReplicaCombiner:
    return ReplicaCombiner(build_mesh(ParallelLayout(data=world_size), CPU, timedelta(seconds=15)), looks)


def call(name: str, value: float, weight: float | None = None, size: int = 1, **options: Any) -> LogCall:
    return LogCall("training_step", name, torch.tensor(value), weight, size, options)


def float64(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def check_reductions(rank: int, world_size: int) -> None:
    value = LOSSES[rank]
    calls = [
        call("mean", value, size=rank + 1),
        LogCall("f", "metric", None, None, 1),
        call("given", value, weight=1.0 + rank),
        call("sum", value, reduce_fx="sum"),
        call("max", -value, reduce_fx="max"),
        call("min", value, reduce_fx="min"),
        call("max", value, reduce_fx="max"),
        call("mean", 10 * value),
    ]
    own = torch.tensor(value, requires_grad=True)
    loss, total, found = combiner(world_size)(own, float64(WEIGHTS[rank]), calls, counted=rank != 1)
    assert loss is not None
    assert float(loss) == (1 * 2 + 6 * 6) / 8
    assert float(total) == 8
    assert [c.name for c in found] == [c.name for c in calls]
    assert found[1] is calls[1]
    values = [float(c.value) for c in found if c.value is not None]
    expected = [38 / 8, (1 * 1 + 6 * 3) / 4, 7.0, -1.0, 1.0, 6.0, 10 * 38 / 8]
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)
    assert int(found[0].size) == 1 + 3, "repeated samples are not counted"
    assert all(c.value is None or c.value.dtype == torch.float32 for c in found)


def test_reductions_over_replicas(ranks: Ranks) -> None:
    ranks(3, check_reductions)


def check_nan(rank: int, world_size: int) -> None:
    """What a replica without weight computed may be anything; what one with weight computed is shown."""
    combine = combiner(world_size)
    weight = float64([3.0, 0.0][rank])
    value = [2.0, math.nan][rank]
    loss, _, found = combine(torch.tensor(value), weight, [call("x", value), call("s", value, reduce_fx="sum")])
    assert loss is not None
    assert [float(loss), *(float(c.value) for c in found if c.value is not None)] == [2.0, 2.0, 2.0]
    loss, _, _ = combine(torch.tensor(value), float64(1.0), [])
    assert loss is not None
    assert math.isnan(float(loss))
    assert combine(None, float64(1.0), [])[0] is None


def test_values_that_are_not_finite(ranks: Ranks) -> None:
    ranks(2, check_nan)


def check_other_keys(rank: int, world_size: int) -> None:
    combine = combiner(world_size)
    for mine in (
        [call("a", 1.0)] if rank == 0 else [call("b", 1.0)],
        [call("a", 1.0)] if rank == 0 else [],
        [call("a", 1.0, reduce_fx="max")] if rank == 0 else [call("a", 1.0)],
        [call("a", 1.0, reduce_fx="max"), call("b", 1.0)] if rank == 0 else [call("b", 1.0)],
    ):
        with pytest.raises(ValueError, match="replicas logged different values in one step: .*training_step"):
            combine(torch.tensor(1.0), float64(1.0), mine)
    _, _, found = combine(torch.tensor(1.0), float64(1.0), [call("a", float(rank))])
    assert float(found[0].value) == 0.5, "the replicas still understand one another"  # type: ignore[arg-type]


def test_replicas_that_log_other_keys_are_told(ranks: Ranks) -> None:
    ranks(2, check_other_keys)


def check_keys_unseen(rank: int, world_size: int) -> None:
    combine = combiner(world_size, looks=False)
    mine = [call("a", 1.0)] if rank == 0 else [call("b", 1.0), call("c", 1.0, reduce_fx="sum")]
    loss, total, found = combine(torch.tensor(LOSSES[rank]), float64(1.0), mine)
    assert loss is not None
    assert (float(loss), float(total)) == (1.5, 2.0)
    assert all(math.isnan(float(c.value)) and c.size == 1 for c in found if c.value is not None)
    loss, _, found = combine(None, float64(1.0), [call("a", float(rank), size=2), call("b", 1.0, reduce_fx="max")])
    assert [(float(c.value), int(c.size)) for c in found if c.value is not None] == [(0.5, 4), (1.0, 2)]


def test_values_of_other_keys_do_not_pass_for_numbers(ranks: Ranks) -> None:
    """As on CUDA, where nobody looks."""
    ranks(2, check_keys_unseen)


def check_many(rank: int, world_size: int) -> None:
    combine = combiner(world_size)
    _, _, found = combine(None, float64(1.0), [call(f"x{i}", float(i + rank)) for i in range(SLOTS - 1)])
    assert [float(c.value) for c in found if c.value is not None] == [i + 0.5 for i in range(SLOTS - 1)]
    with pytest.raises(ValueError, match=f"a step logged {SLOTS} values; at most {SLOTS - 1}"):
        combine(None, float64(1.0), [call(f"x{i}", 1.0) for i in range(SLOTS)])


def test_as_many_values_as_fit(ranks: Ranks) -> None:
    ranks(2, check_many)
