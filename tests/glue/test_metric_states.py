"""States of torchmetrics objects: what a step changed, carried to another copy of the module, makes it the same."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision, MulticlassRecall
from torchmetrics.wrappers import MinMaxMetric

from lightning_parallel.strategies import metric_states as states


class Model(nn.Module):
    """Metrics of every kind: sums, extremes, lists of samples, compute groups, one that is never updated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.accuracy = MulticlassAccuracy(num_classes=3, average="micro")
        self.area = MulticlassAUROC(num_classes=3)  # keeps lists
        self.mean, self.total, self.largest, self.smallest = MeanMetric(), SumMetric(), MaxMetric(), MinMetric()
        self.all = CatMetric()
        self.group = MetricCollection([MulticlassPrecision(3), MulticlassRecall(3)])
        self.idle = MeanMetric()

    def update(self, number: int) -> None:
        logits = torch.sin(torch.arange(12.0) * (number + 1)).view(4, 3).softmax(1)
        labels = (torch.arange(4) + number) % 3
        for score in (self.accuracy, self.area, self.group):
            score(logits, labels)
        for metric in (self.mean, self.total, self.largest, self.smallest, self.all):
            metric(logits.sum(1) * number)

    def values(self) -> dict[str, Any]:
        metrics = {n: m for n, m in self.named_children() if isinstance(m, Metric | MetricCollection)}
        return {name: metric.compute() for name, metric in metrics.items() if name != "idle"}


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_metrics_of() -> None:
    names = set(states.metrics_of(Model()))
    assert {"accuracy", "area", "idle", "group.MulticlassPrecision", "group.MulticlassRecall"} <= names
    assert "group" not in names
    assert "layer" not in names


@pytest.mark.parametrize("start", [0, 2])
def test_a_delta_makes_another_copy_the_same(start: int) -> None:
    here = Model()
    for number in range(start):
        here.update(number)
    there = copy.deepcopy(here)
    for number in range(start, start + 3):
        before = states.metric_snapshot(here)
        here.update(number)
        delta = pickle.loads(pickle.dumps(states.metric_delta(here, before)))
        assert "idle" not in delta
        states.set_metric_delta(there, delta)
        same(there.values(), here.values())
        assert there.mean._update_count == here.mean._update_count == number + 1
        same(there.mean._forward_cache, here.mean._forward_cache)
    here.update(9)
    there.update(9)
    same(there.values(), here.values())


def test_only_new_entries_of_lists_travel() -> None:
    model = Model()
    model.update(0)
    before = states.metric_snapshot(model)
    model.update(1)
    delta = states.metric_delta(model, before)
    assert delta["all"]["states"]["value"]["keep"] == 1
    assert len(delta["all"]["states"]["value"]["new"]) == 1
    assert [len(v["new"]) for v in delta["area"]["states"].values() if isinstance(v, dict)] == [1, 1]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("earlier", "later"), [(1, 2), (1, 1), (2, 1), (3, 0)])
def test_a_reset_inside_of_the_step(earlier: int, later: int, inference: bool) -> None:
    with torch.inference_mode(inference):
        here, there = Model(), Model()
        for number in range(earlier):
            here.update(number)
            there.update(number)
        before = states.metric_snapshot(here)
        for metric in states.metrics_of(here).values():
            metric.reset()
        for number in range(later):
            here.update(5 + number)
        states.set_metric_delta(there, states.metric_delta(here, before))
        assert there.mean._update_count == later
        for model in (here, there):
            model.update(9)
        same(there.values(), here.values())


def test_what_was_not_updated_travels_only_if_asked() -> None:
    model = Model()
    before = states.metric_snapshot(model)
    assert states.metric_delta(model, before) == {}
    assert set(states.metric_delta(model, before, also=["idle"])) == {"idle"}


def test_a_step_that_must_not_count_is_undone() -> None:
    model = Model()
    model.update(0)
    expected = model.values()
    saved = states.save_metrics(model)
    model.update(1)
    states.load_metrics(model, saved)
    same(model.values(), expected)
    assert model.mean._update_count == 1
    model.update(2)
    reference = Model()
    reference.update(0)
    reference.update(2)
    same(model.values(), reference.values())


# ------------------------------------------------------------------------------------------------ merging
class Deviation(Metric):
    """A state whose reduction is the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("spread", torch.zeros(()), dist_reduce_fx=lambda x: x.std(0))

    def update(self, x: Tensor) -> None:
        self.spread = x.std()

    def compute(self) -> Tensor:
        return self.spread


def test_what_can_be_merged() -> None:
    model = Model()
    assert all(map(states.is_mergeable, (model.accuracy, model.area, model.mean, model.largest, model.all)))
    assert not states.is_mergeable(Deviation())
    assert not states.is_mergeable(MinMaxMetric(MeanMetric()))


@pytest.mark.parametrize("parts", [(2, 2), (0, 3), (3, 0), (0, 0)])
def test_states_taken_and_merged_are_those_of_one_run(parts: tuple[int, int]) -> None:
    model, reference = Model(), Model()
    for number in range(parts[0]):
        model.update(number)
        reference.update(number)
    metrics = {n: m for n, m in states.metrics_of(model).items() if states.is_mergeable(m)}
    held = {name: states.take_states(metric) for name, metric in metrics.items()}
    assert all(metric._update_count == 0 for metric in metrics.values())
    for number in range(parts[0], sum(parts)):
        model.update(number)
        reference.update(number)
    for name, metric in metrics.items():
        states.merge_states(metric, held[name])
    for name, metric in metrics.items():
        assert metric._update_count == sum(parts) or name == "idle"
        if sum(parts) and name != "idle":
            same(metric.compute(), states.metrics_of(reference)[name].compute())


# ------------------------------------------------------------------------------------------------ groups
def test_confining_and_releasing() -> None:
    """A metric adds up over the replicas unless the user chose a group; without replicas it stays alone."""
    group, chosen = object(), object()
    model = Model()
    model.total.process_group = chosen
    fresh = Model()
    states.confine_metrics(model, group)
    assert model.mean.process_group is group
    assert model.mean.distributed_available_fn()
    assert model.total.process_group is chosen
    assert not model.total.distributed_available_fn()
    states.release_metrics(model, group)
    assert model.mean.process_group is None
    assert model.total.process_group is chosen
    assert model.mean.distributed_available_fn is fresh.mean.distributed_available_fn
    states.confine_metrics(model, None)
    assert not model.mean.distributed_available_fn()
    states.release_metrics(model, None)


def persistent(model: Model) -> Model:
    for metric in states.metrics_of(model).values():
        metric.persistent(True)
    return model


def test_loaded_sums_are_kept_on_the_first_replica_only() -> None:
    source = persistent(Model())
    source.update(1)
    replicas = [persistent(Model()) for _ in range(2)]
    for rank, replica in enumerate(replicas):
        replica.load_state_dict(source.state_dict())
        states.keep_once(replica, rank)
    same(replicas[0].total.sum_value, source.total.sum_value)
    assert float(replicas[1].total.sum_value) == 0
    assert replicas[1].all.value == []
    same(replicas[1].largest.max_value, source.largest.max_value)


def test_one_replica_saves_its_own_states() -> None:
    model = persistent(Model())
    model.update(0)
    before = tensors_of(model)
    with states.summed_over_replicas(model, None):
        same(tensors_of(model), before)


def tensors_of(model: Model) -> dict[str, Tensor]:
    return {n: v.clone() for n, v in model.state_dict().items() if isinstance(v, Tensor)}
