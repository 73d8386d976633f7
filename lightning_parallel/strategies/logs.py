"""Glue: what a step logs, recorded per micro-batch, combined, and replayed once on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torchmetrics import Metric

from lightning_parallel.pipeline.batch import batch_size
from lightning_parallel.pipeline.placeholder import PipelineCutError, Placeholder

__all__ = ["LogCall", "LogRecorder", "combine_calls", "share_of_epoch"]

_REDUCTIONS = {torch.mean: "mean", torch.sum: "sum", sum: "sum", torch.max: "max", max: "max"}
_REDUCTIONS |= {torch.min: "min", min: "min"}


@dataclass
class LogCall:
    """One `self.log` as the result collection receives it.

    Attributes:
        fx: name of the hook that logged.
        name: key.
        value: 0-dim tensor; None for a torchmetrics object, which is named by `options["metric_attribute"]`.
        weight: weight of the value in a mean; None: the weight of its micro-batch in the loss.
        size: number of samples the value stands for, for averages over an epoch.
        options: remaining arguments.
        counted: False if the value must not enter the average over the epoch on this rank.
    """

    fx: str
    name: str
    value: torch.Tensor | None
    weight: float | None
    size: float
    options: dict[str, Any] = field(default_factory=dict)
    counted: bool = True

    @property
    def reduction(self) -> str:
        """Mean, sum, max or min."""
        reduce_fx = self.options.get("reduce_fx", "mean")
        name = reduce_fx if isinstance(reduce_fx, str) else _REDUCTIONS.get(reduce_fx, "mean")
        return "mean" if name == "avg" else name


class LogRecorder:
    """Stands in for Lightning's result collection while a step runs.

    It is empty (and false) for anyone who looks at the metrics logged so far.
    """

    def __init__(self) -> None:
        self.micro_batches: list[list[LogCall]] = []
        self.resets: list[dict[str, Any]] = []
        self.batch: Any = None
        self.batch_size: int | None = None
        self.dataloader_idx: int | None = None

    def __bool__(self) -> bool:
        return False

    @property
    def calls(self) -> list[LogCall]:
        """Everything logged so far, by micro-batch."""
        return [call for calls in self.micro_batches for call in calls]

    def start_micro_batch(self, batch: Any) -> None:
        """Calls that follow belong to this micro-batch."""
        self.micro_batches.append([])
        self.batch = batch

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Recorded too: Lightning clears the values of the previous epoch when the first value arrives."""
        entry = {"metrics": metrics, "fx": fx}
        if entry not in self.resets:
            self.resets.append(entry)

    def log(self, fx: str, name: str, value: Any, *, batch_size: int | None = None, **options: Any) -> None:
        """Records one call; same signature as the collection's."""
        if isinstance(value, Placeholder):
            raise PipelineCutError(
                f"self.log({name!r}) depends on a value of another pipeline stage: {value!r}. Log values computed "
                "after the last block, or use pipeline_parallel_size=1"
            )
        for unsendable in ("sync_dist_fn", "sync_dist_group"):
            options.pop(unsendable, None)
        samples = batch_size if batch_size is not None else self._samples()
        tensor = None if isinstance(value, Metric) else value.detach()
        call = LogCall(fx, name, tensor, float(batch_size) if batch_size is not None else None, samples, options)
        self.micro_batches[-1].append(call)

    def _samples(self) -> int:
        size = batch_size(self.batch)
        return 1 if size is None else size


def combine_calls(micro_batches: Sequence[Sequence[LogCall]], weights: Sequence[torch.Tensor]) -> list[LogCall]:
    """Combines what micro-batches logged into what one step on the whole batch would have logged.

    Means are weighted by the loss weights, or by the `batch_size` that the user gave; sums are added. A key logged
    several times in a step is matched by its position.

    Args:
        micro_batches: calls of each micro-batch, in order.
        weights: 0-dim tensors, the loss weight of each micro-batch.
    """
    if len(micro_batches) == 1:
        return list(micro_batches[0])
    matched: dict[tuple[str, str, int], list[tuple[LogCall, torch.Tensor]]] = {}
    for calls, weight in zip(micro_batches, weights, strict=True):
        seen: dict[tuple[str, str], int] = {}
        for call in calls:
            position = seen.get((call.fx, call.name), 0)
            seen[call.fx, call.name] = position + 1
            matched.setdefault((call.fx, call.name, position), []).append((call, weight))
    return [_combine(entries) for entries in matched.values()]


def _combine(entries: list[tuple[LogCall, torch.Tensor]]) -> LogCall:
    first = entries[0][0]
    size = sum(call.size for call, _ in entries)
    if first.value is None:
        return first
    values = torch.stack([call.value.to(torch.float64) for call, _ in entries if call.value is not None])
    weights = torch.stack(
        [weight.to(values) if call.weight is None else values.new_full((), call.weight) for call, weight in entries]
    )
    if first.reduction == "sum":
        total = values.sum()
    elif first.reduction == "max":
        total = values.max()
    elif first.reduction == "min":
        total = values.min()
    else:
        total = torch.where(weights > 0, values * weights, 0.0).sum() / weights.sum()
    explicit = None if first.weight is None else sum(call.weight or 0.0 for call, _ in entries)
    dtype = first.value.dtype if first.value.is_floating_point() else torch.get_default_dtype()
    return LogCall(first.fx, first.name, total.to(dtype), explicit, size, first.options)


def share_of_epoch(call: LogCall, share: torch.Tensor, samples: int, everyone: Any) -> LogCall:
    """A mean over a replica's samples, changed so that the mean over all replicas' samples is the one by weight.

    Args:
        call: what was logged; other kinds of values come back as they are.
        share: weight of this replica in the batch over that of all.
        samples: of this replica in the batch.
        everyone: samples of all replicas.
    """
    if call.value is None or call.weight is not None or call.reduction != "mean":
        return call
    value = torch.where(share == 0, 0.0, call.value.to(share) * share) * everyone / samples
    return replace(call, value=value.to(call.value.dtype) if call.value.is_floating_point() else value)
