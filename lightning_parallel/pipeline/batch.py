"""Mechanism: splits a batch of any structure into micro-batches and puts results of micro-batches together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["batch_size", "count_valid_labels", "merge_outputs", "slice_batch", "split_batch"]


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return any(_holds_tensor(child) for child in _children(value))


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name) for f in dataclasses.fields(value)]
    return []


def batch_size(batch: Any) -> int | None:
    """Number of samples: first dimension of the first tensor found, else the length of the first list of samples.

    Returns:
        None if the structure holds neither.
    """
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else None
    children = _children(batch)
    for child in children:
        if _holds_tensor(child):
            return batch_size(child)
    for child in children:
        size = batch_size(child)
        if size is not None:
            return size
    if isinstance(batch, list | tuple) and batch and not any(_children(c) for c in batch):
        return len(batch)
    return None


def slice_batch(batch: Any, start: int, stop: int, size: int) -> Any:
    """Samples [start, stop) of a batch of `size` samples, in the same structure.

    Tensors are sliced along their first dimension if it has `size` entries and kept whole otherwise (shared masks,
    scalars). Lists without tensors are sliced if they have one entry per sample. Everything else (strings, numbers,
    None) is kept.
    """
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() > 0 and batch.size(0) == size else batch
    if isinstance(batch, Mapping):
        sliced = {k: slice_batch(v, start, stop, size) for k, v in batch.items()}
        return _rebuild_mapping(batch, sliced)
    if isinstance(batch, list | tuple):
        if len(batch) == size and not _holds_tensor(batch) and not any(isinstance(c, Mapping) for c in batch):
            return batch[start:stop] if type(batch) in (list, tuple) else type(batch)(batch[start:stop])
        entries = [slice_batch(v, start, stop, size) for v in batch]
        return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: slice_batch(getattr(batch, f.name), start, stop, size) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    return batch


def _rebuild_mapping(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return values
    copy = getattr(original, "copy", None)
    if copy is not None and hasattr(original, "update"):
        rebuilt = copy()
        rebuilt.update(values)
        return rebuilt
    return type(original)(values)  # type: ignore[call-arg]


def split_batch(batch: Any, micro_batches: int) -> list[Any]:
    """Splits a batch into at most `micro_batches` parts of nearly equal size, in order.

    Fewer parts come back if the batch has fewer samples, and the batch itself if its size cannot be told.
    """
    size = batch_size(batch)
    if size is None or size == 0 or micro_batches <= 1:
        return [batch]
    parts = min(micro_batches, size)
    base, extra = divmod(size, parts)
    pieces, start = [], 0
    for part in range(parts):
        stop = start + base + (part < extra)
        pieces.append(slice_batch(batch, start, stop, size))
        start = stop
    return pieces


def count_valid_labels(batch: Any, ignore_index: int = -100) -> torch.Tensor:
    """Number of labels other than `ignore_index`, as a 0-dim float64 tensor on the labels' device (no host wait).

    The labels are the entry named "labels", "label", "targets", "target" or "y" of a mapping, else the last tensor of
    integers in the batch.

    Raises:
        ValueError: the batch holds no integer tensor that could be labels.
    """
    labels = _find_labels(batch)
    if labels is None:
        raise ValueError(
            "loss_weight='valid_labels' needs integer labels in the batch (an entry 'labels', 'targets' or 'y', or a "
            f"last tensor of integers), but found {type(batch).__name__} without one; pass a function of the batch"
        )
    return (labels != ignore_index).sum().to(torch.float64)


def _find_labels(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, Mapping):
        for key in ("labels", "label", "targets", "target", "y"):
            if isinstance(batch.get(key), torch.Tensor):
                return batch[key]
    if isinstance(batch, torch.Tensor):
        return batch if batch.dtype in (torch.int64, torch.int32, torch.int16) else None
    for child in reversed(_children(batch)):
        found = _find_labels(child)
        if found is not None:
            return found
    return None


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[torch.Tensor]) -> Any:
    """Puts the results of micro-batches together: what one step on the whole batch would have returned.

    Tensors with one row per sample are concatenated, floating point scalars are averaged with `weights`, lists with
    one entry per sample are joined, mappings and tuples are merged entry by entry; anything else: the last one.

    Args:
        outputs: results, one per micro-batch.
        sizes: samples of each micro-batch.
        weights: 0-dim tensors, weight of each micro-batch in the mean.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, torch.Tensor):
        if first.dim() == 0:
            return _weighted_mean(outputs, weights) if first.is_floating_point() else outputs[-1]
        if all(o.dim() > 0 and o.size(0) == s for o, s in zip(outputs, sizes, strict=True)):
            return torch.cat(list(outputs))
        return outputs[-1]
    if isinstance(first, float):
        return _weighted_mean([torch.tensor(o, dtype=torch.float64) for o in outputs], weights)
    if isinstance(first, Mapping):
        return {k: merge_outputs([o[k] for o in outputs], sizes, weights) for k in first}
    if isinstance(first, list | tuple):
        if not _holds_tensor(first) and all(len(o) == s for o, s in zip(outputs, sizes, strict=True)):
            return type(first)([entry for o in outputs for entry in o])
        if all(len(o) == len(first) for o in outputs):
            return type(first)(merge_outputs(list(entries), sizes, weights) for entries in zip(*outputs, strict=True))
    return outputs[-1]


def _weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack([v.detach().to(torch.float64) for v in values])
    share = torch.stack(list(weights)).to(stacked)
    # A micro-batch without weight (no valid label) may hold NaN: it must not enter.
    total = torch.where(share > 0, stacked * share, 0.0).sum() / share.sum()
    return total.to(values[0].dtype)
