"""Glue: what a torchmetrics object that is logged per step shows for a step: its value on the global batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torchmetrics import Metric

from lightning_parallel.strategies.logs import LogRecorder
from lightning_parallel.strategies.metric_states import (
    is_mergeable,
    load_metrics,
    merge_states,
    metrics_of,
    save_metrics,
    take_states,
)

__all__ = ["StepMetrics"]


class StepMetrics:
    """Lets metrics start a step from nothing, so that what they hold after it is that step alone.

    What they held before is merged back afterwards. That is right for every metric whose processes may each start from
    nothing; one with states that cannot be merged, or that wraps another metric, shows what it computed last.

    Args:
        module: the user's module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.names: set[str] = set()

    @contextmanager
    def step(self, recorder: LogRecorder, parts: int, synced: bool, counts: bool) -> Iterator[None]:
        """Around the user's step.

        Args:
            recorder: what the step logs.
            parts: number of micro-batches.
            synced: whether values are combined over the replicas, which must log the same metrics.
            counts: False if the step only repeats samples: then it leaves no trace in any metric.
        """
        metrics = metrics_of(self.module)
        if not metrics or (parts == 1 and not synced and counts):
            yield
            return
        saved = None if counts else save_metrics(self.module)
        fresh = {name for name, metric in metrics.items() if metric._update_count == 0 and is_mergeable(metric)}
        aside = {name: take_states(metrics[name]) for name in sorted(self.names) if is_mergeable(metrics[name])}
        yield
        logged = {c.options["metric_attribute"] for c in recorder.calls if c.value is None and c.options["on_step"]}
        for name in sorted(logged & (fresh | set(aside))):
            self._show(metrics[name], synced, counts)
        for name, held in aside.items():
            merge_states(metrics[name], held)
        if saved is not None:
            load_metrics(self.module, saved)
        self.names |= logged

    @staticmethod
    @torch.no_grad()
    def _show(metric: Metric, synced: bool, counts: bool) -> None:
        """Makes the value of what the metric holds the one that a log of this step shows. Collective if synced."""
        if metric._forward_cache is None:  # only updated, never called: there is no value to show
            return
        if not counts:
            metric.reset()
        to_sync, metric._to_sync = metric._to_sync, synced and metric._to_sync
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a replica without samples of its own
            metric._forward_cache = metric.compute()
        metric._to_sync, metric._computed = to_sync, None
