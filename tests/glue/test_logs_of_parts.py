"""Logged values of micro-batches, combined into what one step on the whole batch would have logged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_parallel.pipeline.placeholder import PipelineCutError, placeholder_like
from lightning_parallel.strategies.logs import LogCall, LogRecorder, combine_calls


def call(name: str, value: float, weight: float | None = None, size: float = 2, **options: Any) -> LogCall:
    return LogCall("training_step", name, torch.tensor(value), weight, size, options)


def weights(*values: float) -> list[Tensor]:
    return [torch.tensor(v, dtype=torch.float64) for v in values]


def numbers(calls: list[LogCall]) -> dict[str, float]:
    return {c.name: float(c.value) for c in calls if c.value is not None}


# ------------------------------------------------------------------------------------------------ combining
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 2.0),
        ({"reduce_fx": "mean"}, 2.0),
        ({"reduce_fx": "avg"}, 2.0),
        ({"reduce_fx": torch.mean}, 2.0),
        ({"reduce_fx": "sum"}, 6.0),
        ({"reduce_fx": torch.sum}, 6.0),
        ({"reduce_fx": sum}, 6.0),
        ({"reduce_fx": "max"}, 5.0),
        ({"reduce_fx": torch.max}, 5.0),
        ({"reduce_fx": max}, 5.0),
        ({"reduce_fx": "min"}, 1.0),
        ({"reduce_fx": torch.min}, 1.0),
        ({"reduce_fx": min}, 1.0),
    ],
)
def test_reductions(options: dict[str, Any], expected: float) -> None:
    (found,) = combine_calls([[call("x", 1.0, **options)], [call("x", 5.0, **options)]], weights(3, 1))
    assert found.value is not None
    assert float(found.value) == expected
    assert found.value.dtype == torch.float32
    assert (found.size, found.weight, found.options) == (4, None, options)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 9)), min_size=1, max_size=8))
def test_means_and_sums_over_any_parts(parts: list[tuple[float, int]]) -> None:
    micro_batches = [[call("mean", v, size=n), call("sum", v, size=n, reduce_fx="sum")] for v, n in parts]
    found = combine_calls(micro_batches, weights(*(n for _, n in parts)))
    total = sum(n for _, n in parts)
    expected = {"mean": sum(v * n for v, n in parts) / total, "sum": sum(v for v, _ in parts)}
    assert numbers(found) == pytest.approx(expected, rel=1e-5, abs=1e-3)
    assert [c.size for c in found] == [total, total]


def test_the_weight_that_the_user_gave() -> None:
    """`self.log(..., batch_size=...)` replaces the weight of the loss."""
    (found,) = combine_calls(
        [[call("x", 1.0, weight=1.0, size=1)], [call("x", 5.0, weight=3.0, size=3)]], weights(8, 1)
    )
    assert numbers([found]) == {"x": 4.0}
    assert (found.weight, found.size) == (4.0, 4)


def test_a_micro_batch_without_weight_does_not_count() -> None:
    found = combine_calls([[call("x", float("nan"))], [call("x", 5.0)]], weights(0, 2))
    assert numbers(found) == {"x": 5.0}


def test_a_key_logged_several_times_is_matched_by_position() -> None:
    found = combine_calls([[call("x", 1.0), call("x", 10.0)], [call("x", 3.0), call("x", 30.0)]], weights(1, 1))
    assert [float(c.value) for c in found if c.value is not None] == [2.0, 20.0]


def test_keys_of_some_micro_batches_and_hooks() -> None:
    second = LogCall("on_train_batch_start", "x", torch.tensor(7.0), None, 2)
    found = combine_calls([[call("x", 1.0)], [call("y", 3.0), call("x", 2.0), second]], weights(1, 3))
    assert [(c.fx, c.name) for c in found] == [
        ("training_step", "x"),
        ("training_step", "y"),
        ("on_train_batch_start", "x"),
    ]
    assert [float(c.value) for c in found if c.value is not None] == [1.75, 3.0, 7.0]


def test_dtypes_and_whole_numbers() -> None:
    double = [LogCall("f", "x", torch.tensor(v, dtype=torch.float64), None, 1) for v in (1 / 3, 2 / 3)]
    (found,) = combine_calls([[double[0]], [double[1]]], weights(1, 1))
    assert found.value is not None
    assert found.value.dtype == torch.float64
    assert float(found.value) == 0.5
    counts = [LogCall("f", "n", torch.tensor(v), None, 1, {"reduce_fx": "sum"}) for v in (3, 4)]
    (found,) = combine_calls([[counts[0]], [counts[1]]], weights(1, 1))
    assert found.value is not None
    assert (found.value.dtype, float(found.value)) == (torch.float32, 7.0)


def test_metrics_stay_names() -> None:
    metric = LogCall("f", "accuracy", None, None, 2, {"metric_attribute": "accuracy"})
    (found,) = combine_calls([[metric], [metric]], weights(1, 1))
    assert found == metric


def test_one_micro_batch_is_left_alone() -> None:
    calls = [call("x", 1.0), call("x", 2.0)]
    assert combine_calls([calls], weights(3)) == calls
    assert combine_calls([[], []], weights(1, 1)) == []


# ------------------------------------------------------------------------------------------------ recording
def test_a_recorder_files_calls_by_micro_batch() -> None:
    recorder = LogRecorder()
    assert not recorder, "nobody finds values logged so far"
    recorder.start_micro_batch({"x": torch.zeros(3, 2)})
    value = torch.ones((), requires_grad=True) * 2
    recorder.log("training_step", "loss", value, on_step=True, sync_dist_fn=None, sync_dist_group=None)
    recorder.start_micro_batch(torch.zeros(5))
    recorder.log("training_step", "loss", value, batch_size=4)
    recorder.log("training_step", "accuracy", MeanMetric(), metric_attribute="accuracy")
    first, second, third = recorder.calls
    assert [len(calls) for calls in recorder.micro_batches] == [1, 2]
    assert first.value is not None
    assert not first.value.requires_grad
    assert (first.weight, first.size, first.options) == (None, 3, {"on_step": True})
    assert (second.weight, second.size) == (4.0, 4)
    assert (third.value, third.size, third.options) == (None, 5, {"metric_attribute": "accuracy"})


def test_a_batch_of_unknown_size_counts_as_one_sample() -> None:
    recorder = LogRecorder()
    recorder.start_micro_batch("text")
    recorder.log("training_step", "x", torch.tensor(1.0))
    assert recorder.calls[0].size == 1


def test_resets_are_recorded_once() -> None:
    recorder = LogRecorder()
    for _ in range(2):
        recorder.reset(metrics=False, fx="training_step")
    recorder.reset(metrics=True)
    assert recorder.resets == [{"metrics": False, "fx": "training_step"}, {"metrics": True, "fx": None}]


def test_a_value_of_another_stage_cannot_be_logged() -> None:
    recorder = LogRecorder()
    recorder.start_micro_batch(torch.zeros(2))
    with pytest.raises(PipelineCutError, match=r"self.log\('early'\) depends on a value of another pipeline stage"):
        recorder.log("training_step", "early", placeholder_like(torch.zeros(()), ["output of layer 1"]))
