"""Glue: how much each micro-batch and replica counts, and the one small message that combines them across replicas."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from lightning_parallel import comm
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.batch import batch_size, count_valid_labels, has_labels
from lightning_parallel.strategies.logs import LogCall

__all__ = ["ReplicaCombiner", "evaluation_rule", "global_loss", "loss_weights"]

SLOTS = 128
_HASH_RANGE = 2**20  # squares and sums over thousands of replicas stay exact in float64


def loss_weights(
    micro_batches: Sequence[Any], rule: str | Callable[[Any], Any], counts: bool, device: torch.device
) -> list[torch.Tensor]:
    """Weight of each micro-batch in the mean, as 0-dim float64 tensors (no wait for the device).

    Args:
        micro_batches: parts of this rank's batch.
        rule: "samples", "valid_labels", or a function of the batch.
        counts: False for a batch that only repeats samples counted elsewhere: its weights are 0.
        device: where the weights live.
    """
    weights = []
    for part in micro_batches:
        if not counts:
            weight: Any = 0.0
        elif callable(rule):
            weight = rule(part)
        elif rule == "valid_labels":
            weight = count_valid_labels(part)
        else:
            weight = batch_size(part) or 1
        if not isinstance(weight, torch.Tensor):
            weight = torch.full((), float(weight), dtype=torch.float64, device=device)
        weights.append(weight.to(device, torch.float64, non_blocking=True))
    return weights


def evaluation_rule(
    rule: str | Callable[[Any], Any], parts: Sequence[Any], over_replicas: bool
) -> str | Callable[[Any], Any]:
    """The rule for a step that only evaluates: a batch in one piece of one replica needs none, and may lack labels.

    Args:
        rule: the one of training.
        parts: of this replica's batch.
        over_replicas: whether what the step logs is combined over replicas.
    """
    if len(parts) == 1 and (not over_replicas or (rule == "valid_labels" and not has_labels(parts[0]))):
        return "samples"
    return rule


class _GlobalLoss(torch.autograd.Function):
    """The loss of the global batch on every replica; backward gives this replica's share of the gradient."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, value: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        ctx.share = share
        return value.to(local.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient * ctx.share.to(gradient.dtype), None, None


def global_loss(local: torch.Tensor, value: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Replaces a replica's loss by the global one.

    Args:
        local: this replica's loss, with its graph.
        value: loss of the global batch.
        share: weight of this replica over the sum of weights. Gradients summed over replicas are then the global ones.
    """
    return _GlobalLoss.apply(local, value, share)


class ReplicaCombiner:
    """Combines a step's loss and logged values over the data replicas in one message of fixed length.

    The length does not depend on what was logged, so that replicas which log different keys get an error instead of a
    hang. Where to look at the keys would make the host wait for the device, they get NaN for every logged value.

    Args:
        mesh: groups of this rank.
        looks: whether to look; None: on every device but CUDA.
    """

    def __init__(self, mesh: Mesh, looks: bool | None = None) -> None:
        self.mesh = mesh
        self._looks = mesh.device.type != "cuda" if looks is None else looks

    def __call__(
        self, loss: torch.Tensor | None, weight: torch.Tensor, calls: Sequence[LogCall], counted: bool = True
    ) -> tuple[torch.Tensor | None, torch.Tensor, list[LogCall]]:
        """Combines over the data group.

        Args:
            loss: this replica's loss, detached; None if the step has none.
            weight: weight of this replica, 0-dim float64.
            calls: what the step logged here.
            counted: False if this replica's batch only repeats samples that another one counts.

        Returns:
            The loss of the global batch, the sum of weights, and the calls with global values.

        Raises:
            ValueError: more than 127 values were logged, or replicas logged different keys (see `looks`).
        """
        if self.mesh.data is None:
            return loss, weight, list(calls)
        scalars = [c for c in calls if c.value is not None]
        if len(scalars) >= SLOTS:
            raise ValueError(f"a step logged {len(scalars)} values; at most {SLOTS - 1} can be combined over replicas")
        message = torch.zeros(3 * SLOTS + 2, dtype=torch.float64, device=self.mesh.device)
        own_loss = torch.zeros_like(weight) if loss is None else loss.detach().to(torch.float64)
        message[0] = _product(own_loss, weight)
        message[1] = weight
        for slot, call in enumerate(scalars, start=1):
            self._write(message[3 * slot : 3 * slot + 3], call, weight, counted)
        key_hash = float(zlib.crc32(repr([(c.fx, c.name, c.reduction) for c in scalars]).encode()) % _HASH_RANGE)
        message[-2], message[-1] = key_hash, key_hash**2
        comm.all_reduce_(message, self.mesh.data)
        alike = message[-2] ** 2 == message[-1] * comm.group_size(self.mesh.data)
        if self._looks and not bool(alike):  # first: replicas with other keys may need no second message
            self._refuse_keys(scalars)
        extremes = {
            slot: torch.where(alike, x, math.nan) for slot, x in self._extremes(scalars, weight, counted).items()
        }
        total = message[1]
        message[3:] = torch.where(alike, message[3:], math.nan)
        combined = iter([self._read(message[3 * s : 3 * s + 3], c, extremes.get(s)) for s, c in enumerate(scalars, 1)])
        merged = [next(combined) if c.value is not None else c for c in calls]
        return None if loss is None else message[0] / total, total, merged

    @staticmethod
    def _write(slot: torch.Tensor, call: LogCall, weight: torch.Tensor, counted: bool) -> None:
        assert call.value is not None, "only scalars are combined"
        value = call.value.detach().to(slot)
        kept = _enters(value, weight, counted)
        if call.reduction == "mean":
            share = weight if call.weight is None else torch.where(kept, call.weight, 0.0)
            slot[0], slot[1] = _product(value, share), share
        elif call.reduction == "sum":
            slot[0] = torch.where(kept, value, 0.0)
        slot[2] = float(call.size) if counted else 0.0

    def _extremes(self, calls: Sequence[LogCall], weight: torch.Tensor, counted: bool) -> dict[int, torch.Tensor]:
        """Largest and smallest over replicas by slot, where a value asks for it (a second message, but only then)."""
        found: dict[int, torch.Tensor] = {}
        operations: tuple[tuple[Literal["max", "min"], float], ...] = (("max", -math.inf), ("min", math.inf))
        for name, nothing in operations:
            chosen = {slot: c.value for slot, c in enumerate(calls, start=1) if c.reduction == name}
            values = [v.detach().to(self.mesh.device, torch.float64) for v in chosen.values() if v is not None]
            if values:
                stacked = torch.stack(values)
                stacked = torch.where(_enters(stacked, weight, counted), stacked, nothing)
                comm.all_reduce_(stacked, self.mesh.data, op=name)
                found |= dict(zip(chosen, stacked.unbind(), strict=True))
        return found

    @staticmethod
    def _read(slot: torch.Tensor, call: LogCall, extreme: torch.Tensor | None) -> LogCall:
        assert call.value is not None, "only scalars are combined"
        value = slot[0] / slot[1] if call.reduction == "mean" else slot[0]
        value = value if extreme is None else extreme
        dtype = call.value.dtype if call.value.is_floating_point() else torch.get_default_dtype()
        size: Any = slot[2].nan_to_num(1.0).round().to(torch.int64)
        return LogCall(call.fx, call.name, value.to(dtype), call.weight, size, call.options)

    def _refuse_keys(self, calls: Sequence[LogCall]) -> None:
        keys = comm.gather_objects([f"{c.fx}.{c.name}" for c in calls], self.mesh.data_control)
        raise ValueError(
            f"replicas logged different values in one step: {keys}. Log the same keys on every rank, or set "
            "sync_logs=False to keep them apart"
        )


def _enters(value: torch.Tensor, weight: torch.Tensor, counted: bool) -> torch.Tensor:
    """Whether a value of a replica is one of its samples': without weight (no valid label) it may be NaN instead."""
    return (weight > 0) | ~value.isnan() & counted


def _product(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """value * weight, where a weight of 0 also removes NaN."""
    return torch.where(weight > 0, value * weight, 0.0)
