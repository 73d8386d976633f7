"""Glue: states of torchmetrics objects, which only the last stage of a pipeline updates. The private names are here."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.metric import jit_distributed_available
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

__all__ = [
    "confine_metrics",
    "is_mergeable",
    "keep_once",
    "load_metrics",
    "merge_states",
    "metric_delta",
    "metric_snapshot",
    "metrics_of",
    "release_metrics",
    "save_metrics",
    "set_metric_delta",
    "summed_over_replicas",
    "take_states",
]


def _link_groups(module: torch.nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, MetricCollection) and child._enable_compute_groups and child._groups_checked:
            child._compute_groups_create_state_ref(copy=False)


def metrics_of(module: torch.nn.Module) -> dict[str, Metric]:
    """Every torchmetrics object of a module by name."""
    # Asked several times in each step, and most modules hold none: names are only made for those that do.
    if not _holds_metric(module):
        return {}
    return {name: child for name, child in module.named_modules() if isinstance(child, Metric)}


def _holds_metric(module: torch.nn.Module) -> bool:
    pending = [module]
    seen: set[int] = set()
    kinds: set[type] = set()  # whether a class is an abstract one's takes longer than the whole walk
    while pending:
        child = pending.pop()
        if id(child) in seen:
            continue
        seen.add(id(child))
        if type(child) not in kinds and isinstance(child, Metric):
            return True
        kinds.add(type(child))
        pending.extend(child.children())
    return False


Marks = dict[str, tuple[int, dict[str, tuple[Any, int]]]]
"""Metric -> (number of updates, state -> (the tensor and its version, or the last entry of a list and its length))."""


def metric_snapshot(module: torch.nn.Module) -> Marks:
    """What tells later whether a step updated or reset a metric, and what it added to lists."""
    return {
        name: (metric._update_count, {state: _mark(getattr(metric, state)) for state in metric._defaults})
        for name, metric in metrics_of(module).items()
    }


def _mark(value: Any) -> tuple[Any, int]:
    if isinstance(value, list):
        return (value[-1] if value else None, len(value))
    return (value, 0 if value.is_inference() else value._version)


def _is_marked(value: Any, mark: tuple[Any, int]) -> bool:
    entry, number = _mark(value)
    return entry is mark[0] and number == mark[1]


def _kept(value: list[Any], mark: tuple[Any, int]) -> int:
    """How many entries of a list were there before; none if it was reset in between.

    Some metrics replace their entries by copies in `forward`. Copies are compared where that costs no wait.
    """
    last, length = mark
    if not 0 < length <= len(value):
        return 0
    now = value[length - 1]
    alike = now is last or (now.shape == last.shape and now.dtype == last.dtype)
    return length if alike and (now is last or now.device.type != "cpu" or torch.equal(now, last)) else 0


def metric_delta(module: torch.nn.Module, before: Marks, also: Collection[str] = ()) -> dict[str, Any]:
    """What changed in the module's metrics since a snapshot: whole tensors, and only the new entries of lists.

    Args:
        module: the user's module.
        before: the snapshot.
        also: metrics to include whether or not they were updated.
    """
    metrics = metrics_of(module)
    if metrics:
        _link_groups(module)
    delta: dict[str, Any] = {}
    for name, metric in metrics.items():
        count, marks = before.get(name, (0, {}))
        same = count == metric._update_count and all(_is_marked(getattr(metric, s), m) for s, m in marks.items())
        if same and name not in also:
            continue
        states = {}
        for state in metric._defaults:
            value = getattr(metric, state)
            if isinstance(value, list):
                kept = _kept(value, marks.get(state, (None, 0)))
                states[state] = {"keep": kept, "new": [v.detach() for v in value[kept:]]}
            else:
                states[state] = value.detach()
        delta[name] = {"count": metric._update_count, "states": states, "cache": metric._forward_cache}
    return delta


def set_metric_delta(module: torch.nn.Module, delta: dict[str, Any]) -> None:
    """Applies what `metric_delta` returned on another rank."""
    metrics = metrics_of(module) if delta else {}
    for name, change in delta.items():
        metric = metrics[name]
        for state, value in change["states"].items():
            if isinstance(value, dict):
                setattr(metric, state, [*getattr(metric, state)[: value["keep"]], *value["new"]])
            else:
                setattr(metric, state, value)
        metric._update_count = change["count"]
        metric._forward_cache = change["cache"]
        metric._computed = None


def save_metrics(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Copies of every metric's state, for a step that must not count."""
    kept = ("_update_count", "_computed")
    return {
        name: copy.deepcopy({s: getattr(m, s) for s in (*m._defaults, *kept)}) for name, m in metrics_of(module).items()
    }


def load_metrics(module: torch.nn.Module, saved: dict[str, dict[str, Any]]) -> None:
    """Puts back what `save_metrics` copied."""
    for name, metric in metrics_of(module).items():
        for state, value in saved[name].items():
            setattr(metric, state, value)


def is_mergeable(metric: Metric) -> bool:
    """Whether states of two runs can be put together: sums, extremes and concatenations, no inner metric."""
    if not metric._defaults or any(isinstance(child, Metric) for child in metric.children()):
        return False
    return all(r in (dim_zero_sum, dim_zero_max, dim_zero_min, dim_zero_cat) for r in metric._reductions.values())


def take_states(metric: Metric) -> dict[str, Any]:
    """Resets a metric; returns what it held, for `merge_states`."""
    held = {state: getattr(metric, state) for state in metric._defaults}
    held = {state: list(value) if isinstance(value, list) else value for state, value in held.items()}
    count = metric._update_count
    metric.reset()
    return {"count": count, "states": held}


@torch.no_grad()
def merge_states(metric: Metric, held: dict[str, Any]) -> None:
    """Puts what a metric held before in front of what it holds now."""
    if metric._update_count == 0:
        for state, value in held["states"].items():
            setattr(metric, state, value)
    elif held["count"] > 0:
        metric._reduce_states(held["states"])
    metric._update_count += held["count"]
    metric._computed = None


def _persistent(module: torch.nn.Module) -> Iterator[Metric]:
    return (m for m in metrics_of(module).values() if any(m._persistent.values()))


@contextmanager
def summed_over_replicas(module: torch.nn.Module, group: Any) -> Iterator[None]:
    """While open, states that go into checkpoints are those of all samples. Collective over the replicas.

    States whose reduction is not one of sum, mean, max, min and concatenation stay as they are on each replica.
    """
    metrics = list(_persistent(module)) if group is not None else []
    _link_groups(module)
    for metric in metrics:
        own = {state: getattr(metric, state) for state in metric._defaults}
        metric.sync(process_group=group, distributed_available=_available)
        for state, before in own.items():
            value, reduction = getattr(metric, state), metric._reductions[state]
            if reduction not in (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min, dim_zero_cat):
                setattr(metric, state, before)
            elif isinstance(before, list) and not isinstance(value, list):
                setattr(metric, state, [value] if value.numel() else [])
    try:
        yield
    finally:
        for metric in metrics:
            metric.unsync()


def keep_once(module: torch.nn.Module, data_rank: int) -> None:
    """Drops sums and samples that a checkpoint brought, except on the first replica: each replica would add them."""
    if data_rank == 0:
        return
    for metric in _persistent(module):
        for state, default in metric._defaults.items():
            if metric._persistent[state] and metric._reductions[state] in (dim_zero_sum, dim_zero_cat):
                fresh: Any = [] if isinstance(default, list) else default.detach().clone().to(metric.device)
                setattr(metric, state, fresh)


def confine_metrics(module: torch.nn.Module, group: Any) -> None:
    """Makes torchmetrics objects add up over the replicas only, unless the user chose a group."""
    for metric in metrics_of(module).values():
        if metric.process_group is None:
            metric.process_group = group
            metric.distributed_available_fn = _available if group is not None else _unavailable


def release_metrics(module: torch.nn.Module, group: Any) -> None:
    """Undoes `confine_metrics`."""
    for metric in metrics_of(module).values():
        if metric.distributed_available_fn in (_available, _unavailable):
            metric.process_group = None
            metric.distributed_available_fn = jit_distributed_available


def _available() -> bool:
    return True


def _unavailable() -> bool:
    return False
