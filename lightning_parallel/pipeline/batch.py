"""Mechanism: splits a batch of any structure into micro-batches and puts results of micro-batches together again.

A batch is nested from mappings, lists, tuples and dataclasses. Its tensors have one row per sample; lists may have one
entry per sample. Everything else belongs to all samples.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = [
    "are_sample_lists",
    "batch_size",
    "count_valid_labels",
    "has_labels",
    "map_tensors",
    "merge_outputs",
    "slice_batch",
    "split_batch",
]


# ------------------------------------------------------------------------------------------------ structure
def _children(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor | PackedSequence):  # samples of the latter are interleaved: not a tuple of rows
        return []
    if type(value) is tuple or type(value) is list:  # before Mapping, which takes long to find out
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name) for f in dataclasses.fields(value)]
    return []


def _rebuild(original: Any, children: Sequence[Any]) -> Any:
    """A container of the same type, keys and attributes with other children."""
    if dataclasses.is_dataclass(original):
        names = list(original) if isinstance(original, Mapping) else [f.name for f in dataclasses.fields(original)]
        if isinstance(original, Mapping):
            return type(original)(**dict(zip(names, children, strict=True)))
        rebuilt: Any = copy.copy(original)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(rebuilt, name, child)  # also frozen ones
        return rebuilt
    if isinstance(original, Mapping):
        values = dict(zip(original, children, strict=True))
        if type(original) is dict:
            return values
        if not hasattr(original, "update"):
            return type(original)(values)  # type: ignore[call-arg]
        rebuilt = copy.copy(original)
        rebuilt.update(values)
        return rebuilt
    return type(original)(*children) if hasattr(original, "_fields") else type(original)(children)


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure with `function` applied to every tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        fields: list[Any] = [None if t is None else function(t) for t in value]
        return PackedSequence(*fields)
    children = _children(value)
    return _rebuild(value, [map_tensors(child, function) for child in children]) if children else value


def _rows(value: Any) -> int | None:
    """First dimension of a tensor or array; None for anything else."""
    if isinstance(value, torch.Tensor):
        return int(value.size(0)) if value.dim() else None
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and hasattr(value, "__array__"):
        return int(shape[0]) if shape else None
    return None


def _leaf_rows(value: Any) -> Iterator[int]:
    """First dimension of every tensor and array inside."""
    rows = _rows(value)
    if rows is not None:
        yield rows
    for child in _children(value):
        yield from _leaf_rows(child)


def _kind(value: Any) -> Any:
    """What the samples in a list have in common."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.dim())
    return (type(value), tuple(value)) if isinstance(value, Mapping) else type(value)


def _is_ragged(value: Any) -> bool:
    """Whether a list holds samples of different sizes: entries of one kind whose tensors differ in length."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or isinstance(value, PackedSequence):
        return False
    return len({_kind(entry) for entry in value}) == 1 and len(set(_leaf_rows(list(value)))) > 1


def _ragged_length(value: Any) -> int | None:
    """Length of the first list of samples of different sizes below the top."""
    for child in _children(value):
        length = len(child) if _is_ragged(child) else _ragged_length(child)
        if length is not None:
            return length
    return len(value) if _is_list_of_mappings(value) and _is_ragged(value) else None


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], Mapping)


# ------------------------------------------------------------------------------------------------ splitting
def batch_size(batch: Any) -> int | None:
    """Number of samples in a batch.

    The length of the first list whose entries are samples of different sizes (boxes of images), else the first
    dimension of the first tensor, else the length of the first list.

    Returns:
        None if the structure holds none of these.
    """
    length = _ragged_length(batch)
    if length is None:
        length = next(_leaf_rows(_tensors_only(batch)), None)
    if length is None:
        length = next(_leaf_rows(batch), None)
    return _list_length(batch) if length is None else length


def _tensors_only(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for child in _children(value) for tensor in _tensors_only(child)]


def _list_length(value: Any) -> int | None:
    children = _children(value)
    is_flat = isinstance(value, list | tuple) and not any(isinstance(c, list | tuple) for c in children)
    if is_flat and len({_kind(child) for child in children}) == 1:
        return len(children)
    return next((size for size in map(_list_length, children) if size is not None), None)


def slice_batch(batch: Any, start: int, stop: int, size: int) -> Any:
    """Samples [start, stop) of a batch of `size` samples, in the same structure.

    Tensors and arrays are sliced along their first dimension if it has `size` entries and kept whole otherwise (shared
    masks, scalars). Lists are sliced if they have one entry per sample: without tensors, or with tensors that have
    other first dimensions. Everything else (strings, numbers, None) is kept.
    """
    if isinstance(batch, list | tuple) and not isinstance(batch, PackedSequence) and any(_leaf_rows(batch)):
        is_samples = len(batch) == size and _is_list_of_mappings(batch) and _is_ragged(batch)
        if not is_samples:  # the batch itself is a list of columns, not of samples
            return _rebuild(batch, [_slice(entry, start, stop, size) for entry in batch])
    return _slice(batch, start, stop, size)


def _slice(value: Any, start: int, stop: int, size: int) -> Any:
    rows = _rows(value)
    if rows is not None:
        return _rows_between(value, start, stop) if rows == size else value
    children = _children(value)
    if _is_sample_list(value, size):
        return _rebuild(value, children[start:stop])
    return _rebuild(value, [_slice(child, start, stop, size) for child in children]) if children else value


def _rows_between(value: Any, start: int, stop: int) -> Any:
    if not isinstance(value, torch.Tensor) or (value.layout is torch.strided and not value.is_nested):
        return value[start:stop]
    if value.is_nested:
        return torch.nested.as_nested_tensor(list(value.unbind()[start:stop]), layout=value.layout)
    part = value.to_sparse_coo().narrow_copy(0, start, stop - start)
    return part if value.layout is torch.sparse_coo else part.to_sparse(layout=value.layout)


def _is_sample_list(value: Any, size: int) -> bool:
    """Whether a list has one entry per sample, and is not a list of `size` columns with one row per sample each."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or len(value) != size or not size:
        return False
    kinds, rows = {_kind(entry) for entry in value}, set(_leaf_rows(list(value)))
    if rows:
        return rows != {size} and len(kinds) == 1
    return kinds != {type(None)} and (len(kinds) == 1 or isinstance(value, list))


def split_batch(batch: Any, micro_batches: int) -> list[Any]:
    """Splits a batch into at most `micro_batches` parts of nearly equal size, in order.

    Fewer parts come back if the batch has fewer samples, and the batch itself if its size cannot be told.
    """
    size = None if _holds_packed(batch) else batch_size(batch)
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


def _holds_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence) or any(_holds_packed(child) for child in _children(value))


# ------------------------------------------------------------------------------------------------ labels
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


def has_labels(batch: Any) -> bool:
    """Whether `count_valid_labels` finds any."""
    return _find_labels(batch) is not None


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


# ------------------------------------------------------------------------------------------------ merging
def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[torch.Tensor]) -> Any:
    """Puts the results of micro-batches together: what one step on the whole batch would have returned.

    Tensors and arrays with one row per sample are concatenated, floating point scalars are averaged with `weights`,
    tensors with a single whole number are summed (they count), lists with one entry per sample are joined, other
    containers are merged entry by entry; anything else: the last one.

    Args:
        outputs: results, one per micro-batch.
        sizes: samples of each micro-batch.
        weights: 0-dim tensors, weight of each micro-batch in the mean.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if any(type(o) is not type(first) for o in outputs):
        return outputs[-1]
    if isinstance(first, torch.Tensor) and first.dim() == 0:
        return _merge_scalars(outputs, weights)
    if isinstance(first, float):
        return float(_weighted_mean([torch.tensor(o, dtype=torch.float64) for o in outputs], weights))
    if all(_rows(o) == s for o, s in zip(outputs, sizes, strict=True)):
        return torch.cat(list(outputs)) if isinstance(first, torch.Tensor) else _concatenate(outputs)
    if isinstance(first, Mapping) and not dataclasses.is_dataclass(first):
        return _merge_mappings(outputs, sizes, weights)
    if are_sample_lists(outputs, sizes):
        return _rebuild(first, [entry for o in outputs for entry in o])
    columns = [_children(o) for o in outputs]
    if columns[0] and all(len(c) == len(columns[0]) for c in columns):
        return _rebuild(first, [merge_outputs(entries, sizes, weights) for entries in zip(*columns, strict=True)])
    return outputs[-1]


def _merge_scalars(outputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    if outputs[0].is_floating_point():
        return _weighted_mean(outputs, weights)
    if outputs[0].dtype == torch.bool or outputs[0].is_complex():
        return outputs[-1]
    return torch.stack(list(outputs)).sum().to(outputs[0].dtype)


def _merge_mappings(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[torch.Tensor]) -> Any:
    """Entry by entry; an entry that some micro-batches lack is merged over the others."""
    merged: dict[Any, Any] = {}
    for key in dict.fromkeys(key for o in outputs for key in o):
        places = [place for place, o in enumerate(outputs) if key in o]
        merged[key] = merge_outputs(
            [outputs[p][key] for p in places], [sizes[p] for p in places], [weights[p] for p in places]
        )
    fullest = max(outputs, key=len)
    return _rebuild(fullest, [merged[key] for key in fullest]) if len(fullest) == len(merged) else merged


def are_sample_lists(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether results are lists with one entry per sample, which may be tensors of unequal sizes."""
    if not all(_is_sample_list(o, s) for o, s in zip(outputs, sizes, strict=True)):
        return False
    # A tuple of numbers is the loss and the accuracy rather than one number per sample.
    scalars = any(isinstance(entry, torch.Tensor | float | int) for entry in outputs[0])
    return not (isinstance(outputs[0], tuple) and scalars and not any(_leaf_rows(list(outputs[0]))))


def _concatenate(arrays: Sequence[Any]) -> Any:
    return sys.modules["numpy"].concatenate(list(arrays))


def _weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack([v.detach().to(torch.float64) for v in values])
    share = torch.stack(list(weights)).to(stacked)
    # A micro-batch without weight (no valid label) may hold NaN: it must not enter.
    total = torch.where(share > 0, stacked * share, 0.0).sum() / share.sum()
    return total.to(values[0].dtype)
