"""Sizes left "auto": when the planner's layout takes the place of the even split, and which."""

from __future__ import annotations

from dataclasses import replace

from lightning_parallel.layout import ParallelLayout
from lightning_parallel.planner.choose import NOTABLE
from lightning_parallel.planner.hardware import Cluster, cpu_process, find_gpu
from lightning_parallel.planner.typical import typical_shape
from lightning_parallel.strategies.even_split import EvenSplit

FIXED = {
    "zero_stage": 0,
    "offload": "none",
    "schedule": "1f1b",
    "sequence_parallel": False,
    "recompute": "none",
}


def even_split(
    gpu: str, devices: int, parameters: float = 124e6, nodes: int = 1, batch: int | None = 8, parts: int | None = None
) -> EvenSplit:
    """What a strategy would make of it, with its own micro-batches unless they are given."""
    layout = ParallelLayout.choose(devices * nodes, devices, "auto", "auto")
    own = 4 * layout.pipeline if layout.pipeline > 1 else 1
    cluster = Cluster(find_gpu(gpu), devices, nodes)
    return EvenSplit(
        layout, typical_shape(parameters), cluster, batch, "bf16-mixed", FIXED, parts or own, plans_parts=parts is None
    )


def test_the_planner_replaces_it_where_that_is_notably_faster() -> None:
    split = even_split("rtx-4090", 2)
    assert (split.even.tensor, split.even.pipeline) == (2, 1)
    found = split.what_is_faster()
    assert found is not None, "cards without NVLink sum up slowly"
    assert (found.plan.split.tensor, found.plan.split.pipeline, found.plan.split.data) == (1, 2, 1)
    assert found.seconds_per_sequence < (1 - NOTABLE) * split.seconds


def test_it_stays_where_little_is_to_be_gained() -> None:
    assert even_split("h100-80gb", 2).what_is_faster() is None
    assert even_split("h100-80gb", 4, 7e9).what_is_faster() is None


def test_the_number_of_replicas_stays() -> None:
    split = even_split("a100-40gb", 8, 1.3e9, nodes=2)
    assert split.even.data == 2
    faster = split.what_is_faster()
    assert faster is not None
    assert faster.plan.split.data == 2
    crowded = even_split("h100-80gb", 2, 1.3e9, batch=32)
    assert "usable are" in crowded.why_not()
    runs = crowded.what_runs()
    assert runs is not None
    assert (runs.plan.split.pipeline, runs.plan.split.data) == (2, 1), "the global batch is kept where that is possible"


def test_micro_batches_that_are_given_stay() -> None:
    found = even_split("rtx-4090", 4, batch=32, parts=8).what_is_faster()
    assert found is not None
    assert found.plan.split.micro_batch == 4
    assert found.plan.split.micro_batches(found.job) == 8


def test_given_micro_batches_that_leave_a_smaller_one_are_planned_as_full_ones() -> None:
    for gpu in ("rtx-4090", "h100-80gb"):
        odd = even_split(gpu, 2, batch=7, parts=4)
        odd = replace(odd, shape=replace(odd.shape, heads=3, kv_heads=3))
        assert "cannot be split" in odd.why_not()
        runs = odd.what_runs()
        assert runs is not None
        assert (runs.plan.split.layout.pipeline, runs.plan.split.micro_batch) == (2, 2)


def test_nothing_is_compared_whose_speed_nobody_knows() -> None:
    split = even_split("rtx-4090", 2)
    assert replace(split, batch=None).what_is_faster() is None
    assert replace(split, cluster=Cluster(cpu_process(24.0), 2)).what_is_faster() is None
