"""Glue: what a step changes in the module besides gradients, and how it gets to the stages that did not finish it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule

from lightning_parallel.mesh import Mesh
from lightning_parallel.strategies.logs import LogRecorder
from lightning_parallel.strategies.metric_states import metric_delta, metric_snapshot, set_metric_delta
from lightning_parallel.strategies.mirror import AttributeMirror
from lightning_parallel.strategies.step_metrics import StepMetrics

__all__ = ["StepState"]


@dataclass
class _Before:
    """The module's state before a step; attributes only if somebody will ask for them."""

    metrics: Any
    attributes: Any


class StepState:
    """Follows torchmetrics objects and plain attributes of one module.

    Args:
        module: the user's module.
        mesh: groups of this rank.
    """

    def __init__(self, module: LightningModule, mesh: Mesh) -> None:
        self.module = module
        self.mesh = mesh
        self._metrics = StepMetrics(module)
        self._mirror = AttributeMirror(module, mesh.device)

    @contextmanager
    def step(self, recorder: LogRecorder, parts: int, synced: bool, counts: bool) -> Iterator[_Before]:
        """Around the user's step; yields the argument of the other methods.

        Args:
            recorder: what the step logs.
            parts: number of micro-batches.
            synced: whether values of metrics per step are combined over the replicas.
            counts: False if the step only repeats samples: then it leaves no trace.
        """
        followed = self.mesh.pipeline is not None or not counts
        before = _Before(metric_snapshot(self.module), self._mirror.hold(exactly=not counts) if followed else None)
        with self._metrics.step(recorder, parts, synced, counts):
            yield before
        if not counts:
            self._mirror.restore(before.attributes)

    def changes(self, before: _Before) -> Any:
        """What the step changed, on the last stage."""
        attributes = {} if self.mesh.pipeline is None else self._mirror.changes(before.attributes)
        return metric_delta(self.module, before.metrics, self._metrics.names), attributes

    def repeat(self, before: _Before, changes: Any) -> None:
        """Makes the same changes on another stage."""
        metrics, attributes = changes
        set_metric_delta(self.module, metrics)
        self._mirror.repeat(before.attributes, attributes)
