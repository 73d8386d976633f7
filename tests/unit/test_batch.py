"""Splitting batches of every structure and merging results: parts put together again are the whole."""

from __future__ import annotations

import collections
import dataclasses
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from lightning_parallel.pipeline.batch import (
    batch_size,
    count_valid_labels,
    map_tensors,
    merge_outputs,
    slice_batch,
    split_batch,
)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None
    doubled: Any = field(init=False, default=None)


def ids(count: int) -> Tensor:
    return torch.arange(count)


def rows(count: int, *shape: int) -> Tensor:
    """Rows that hold the number of their sample."""
    return torch.arange(float(count)).view(count, *(1 for _ in shape)).expand(count, *shape).clone()


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected), f"{found!r} instead of {expected!r}"
    if isinstance(expected, (Tensor, np.ndarray)):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=0)
    elif isinstance(expected, collections.abc.Mapping):
        assert list(found) == list(expected)
        same([*found.values()], [*expected.values()])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif dataclasses.is_dataclass(expected):
        for entry in dataclasses.fields(expected):
            same(getattr(found, entry.name), getattr(expected, entry.name))
    else:
        assert found == expected


# ------------------------------------------------------------------------------------------------ size
@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (ids(5), 5),
        (torch.tensor(3.0), None),
        ([ids(5), rows(5, 2)], 5),
        ({"scale": torch.tensor(2.0), "x": rows(4, 2)}, 4),
        ({"names": ["a", "b", "c"], "x": rows(3)}, 3),
        (("text", rows(3)), 3),
        (Pair(None, rows(6)), 6),
        (Frozen("a", [rows(2)]), 2),
        (["a", "b", "c"], 3),
        ({"names": ["a", "b"]}, 2),
        ([("a", "b"), ("c", "d")], 2),
        ([{"name": "a"}, {"name": "b"}, {"name": "c"}], 3),
        (np.zeros((7, 2)), 7),
        ("text", None),
        (None, None),
        (17, None),
        ({}, None),
        ([], None),
        (torch.zeros(0, 3), 0),
        # Detection: images and boxes of every image, stacked or not.
        ((rows(4, 3, 8, 8), [{"boxes": rows(n, 4)} for n in (1, 2, 1, 3)]), 4),
        (([rows(3, 8, n) for n in (8, 9)], [{"boxes": rows(n, 4)} for n in (1, 2)]), 2),
        ([{"boxes": rows(n, 4)} for n in (1, 2, 4)], 3),
        ({"tokens": [ids(n) for n in (5, 3, 7)]}, 3),
    ],
)
def test_size(batch: Any, size: int | None) -> None:
    assert batch_size(batch) == size


# ------------------------------------------------------------------------------------------------ split
def whole(kind: str, size: int) -> Any:
    """A batch of a kind; samples [a, b) of it are what `part` gives."""
    return part(kind, 0, size, size)


MASK = torch.zeros(31, 31)  # no batch below has 31 samples


def part(kind: str, start: int, stop: int, size: int) -> Any:
    x, y = rows(size, 2)[start:stop], ids(size)[start:stop]
    names = [f"sample {i}" for i in range(size)][start:stop]
    ragged = [ids(i % 3 + size + 1) for i in range(size)][start:stop]
    boxes = [{"box": rows(i % 2 + size + 1, 4), "label": torch.tensor(i)} for i in range(size)][start:stop]
    return {
        "tensor": x,
        "list": [x, y],
        "tuple": (x, y),
        "namedtuple": Pair(x, y),
        "dict": {"x": x, "y": y},
        "ordered": collections.OrderedDict(x=x, y=y),
        "default": collections.defaultdict(lambda: x, x=x, y=y),
        "user dict": collections.UserDict(x=x, y=y),
        "encoding": BatchEncoding({"input_ids": y, "attention_mask": x}),
        "dataclass": Frozen(x, {"deep": [y]}),
        "nested": {"a": [x, (y, {"b": x})], "c": Pair(y, [[x]])},
        "none": {"x": x, "y": None, "labels": (None, None)},
        "strings": {"x": x, "task": "text", "names": names, "numbers": 3.5},
        "names": names,
        "scalars": {"x": x, "scale": torch.tensor(0.5), "step": torch.tensor(3)},
        "shared mask": [x, MASK, y],
        "array": {"x": x, "ids": np.arange(size)[start:stop], "constants": np.arange(31)},
        "ragged": {"x": x, "tokens": ragged},
        "detection": (x, boxes),
        "boxes": boxes,
        "metadata": [x, [{"name": n} for n in names]],
        "no samples": {"x": x, "empty": []},
    }[kind]


KINDS = [
    "tensor",
    "list",
    "tuple",
    "namedtuple",
    "dict",
    "ordered",
    "default",
    "user dict",
    "encoding",
    "dataclass",
    "nested",
    "none",
    "strings",
    "names",
    "scalars",
    "shared mask",
    "array",
    "ragged",
    "detection",
    "boxes",
    "metadata",
    "no samples",
]


SPLITS = [(2, 1), (2, 2), (2, 15), (3, 2), (5, 4), (6, 3), (7, 3), (9, 5), (11, 6), (12, 5), (12, 11), (12, 12)]
"""Samples and parts: one part, even, every kind of uneven end, as many parts as samples, and more."""


@pytest.mark.parametrize("kind", KINDS)
def test_parts_hold_every_sample_once_in_order(kind: str) -> None:
    for size, count in SPLITS:
        parts_hold_every_sample_once_in_order(kind, size, count)


def parts_hold_every_sample_once_in_order(kind: str, size: int, count: int) -> None:
    batch = whole(kind, size)
    parts = split_batch(batch, count)
    assert len(parts) == min(size, count)
    sizes = [size // len(parts) + (place < size % len(parts)) for place in range(len(parts))]
    start = 0
    for found, length in zip(parts, sizes, strict=True):
        same(found, part(kind, start, start + length, size))
        start += length
    same(batch, whole(kind, size))


def test_one_part_is_the_batch_itself() -> None:
    batch = whole("nested", 4)
    assert split_batch(batch, 1)[0] is batch


def test_fewer_samples_than_parts() -> None:
    assert [p["x"].tolist() for p in split_batch({"x": ids(3), "name": "a"}, 8)] == [[0], [1], [2]]
    assert len(split_batch(ids(0), 4)) == 1


@pytest.mark.parametrize("batch", [None, "text", torch.tensor(1.0), {}, object(), pack_sequence([ids(3), ids(2)])])
def test_what_has_no_samples_is_not_split(batch: Any) -> None:
    assert split_batch(batch, 4)[0] is batch


def test_a_packed_sequence_keeps_the_batch_whole() -> None:
    batch = (pack_sequence([ids(3), ids(2)]), ids(2))
    assert split_batch(batch, 2) == [batch]


def test_read_only_mappings() -> None:
    batch = types.MappingProxyType({"x": ids(4)})
    assert [type(p) for p in split_batch(batch, 2)] == [types.MappingProxyType] * 2
    assert split_batch(batch, 2)[1]["x"].tolist() == [2, 3]


def test_slice_keeps_what_has_another_length() -> None:
    batch = {"x": ids(4), "table": ids(5), "words": ["a", "b", "c"]}
    same(slice_batch(batch, 1, 3, 4), {"x": torch.tensor([1, 2]), "table": ids(5), "words": ["a", "b", "c"]})


def test_two_columns_of_two_samples_are_columns() -> None:
    """As torch's default collation makes them."""
    same(split_batch([rows(2, 3), rows(2, 3)], 2), [[rows(2, 3)[i : i + 1]] * 2 for i in (0, 1)])
    views = {"views": [rows(2, 3), rows(2, 3)]}
    same(split_batch(views, 2), [{"views": [rows(2, 3)[i : i + 1]] * 2} for i in (0, 1)])


def test_map_tensors() -> None:
    for kind in KINDS:
        seen: list[Tensor] = []

        def note(tensor: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(tensor)
            return tensor

        same(map_tensors(whole(kind, 3), note), whole(kind, 3))
        assert seen or kind == "names"
    packed = map_tensors(pack_sequence([ids(3), ids(2)]), lambda t: t + 1)
    assert packed.data.tolist() == [1, 1, 2, 2, 3]
    assert packed.sorted_indices is None


# ------------------------------------------------------------------------------------------------ labels
def test_labels_are_counted() -> None:
    labels = torch.tensor([[1, -100, 3], [-100, -100, 0]])
    for batch in (
        {"input_ids": ids(7), "labels": labels},
        {"y": labels, "x": ids(3)},
        {"targets": labels, "ids": ids(1)},
        (rows(2, 4), labels),
        [labels],
        Pair(ids(2), labels.int()),
        ({"x": ids(2)}, {"label": labels}),
    ):
        count = count_valid_labels(batch)
        assert count.dtype == torch.float64
        assert float(count) == 3
    assert float(count_valid_labels(labels, ignore_index=3)) == 5


def test_no_labels() -> None:
    with pytest.raises(ValueError, match="needs integer labels in the batch .* but found dict without one"):
        count_valid_labels({"x": rows(3)})


# ------------------------------------------------------------------------------------------------ merge
def weights(*values: float) -> list[Tensor]:
    return [torch.tensor(v, dtype=torch.float64) for v in values]


@pytest.mark.parametrize("kind", KINDS)
def test_merging_undoes_splitting(kind: str) -> None:
    for size, count in SPLITS:
        if count > 1:
            merging_undoes_splitting(kind, size, count)


def merging_undoes_splitting(kind: str, size: int, count: int) -> None:
    batch = whole(kind, size)
    parts = split_batch(batch, count)
    sizes = [size // len(parts) + (place < size % len(parts)) for place in range(len(parts))]
    merged = merge_outputs(parts, sizes, weights(*sizes))
    expected = whole(kind, size)
    if kind == "scalars":
        expected["step"] *= len(parts)  # whole numbers are counts
    same(merged, expected)


def test_scalars_are_means_with_the_given_weights() -> None:
    outputs = [{"loss": torch.tensor(1.0), "value": 2.0}, {"loss": torch.tensor(5.0), "value": 4.0}]
    same(merge_outputs(outputs, [1, 1], weights(3, 1)), {"loss": torch.tensor(2.0), "value": 2.5})
    half = [torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16)]
    same(merge_outputs(half, [1, 1], weights(1, 1)), torch.tensor(1.5, dtype=torch.bfloat16))


def test_a_part_without_weight_does_not_count() -> None:
    outputs = [torch.tensor(float("nan")), torch.tensor(5.0)]
    assert float(merge_outputs(outputs, [2, 2], weights(0, 4))) == 5


def test_whole_numbers_are_summed_and_flags_are_not() -> None:
    outputs = [{"correct": torch.tensor(i), "flag": torch.tensor(i > 1), "index": 7} for i in (1, 2)]
    expected = {"correct": torch.tensor(3), "flag": torch.tensor(True), "index": 7}
    same(merge_outputs(outputs, [2, 2], weights(2, 2)), expected)


def test_loss_and_accuracy_in_a_tuple_are_two_numbers() -> None:
    outputs = [(torch.tensor(1.0), torch.tensor(0.5)), (torch.tensor(3.0), torch.tensor(1.0))]
    same(merge_outputs(outputs, [2, 2], weights(1, 1)), (torch.tensor(2.0), torch.tensor(0.75)))
    same(merge_outputs([(1.0, 2.0), (3.0, 4.0)], [2, 2], weights(1, 1)), (2.0, 3.0))


def test_predictions_per_sample_are_joined() -> None:
    boxes = [rows(n, 4) for n in (5, 7, 6)]
    same(merge_outputs([boxes[:2], boxes[2:]], [2, 1], weights(2, 1)), boxes)
    same(merge_outputs([["a", "b"], ["c"]], [2, 1], weights(2, 1)), ["a", "b", "c"])
    scores = [torch.tensor(float(i)) for i in range(3)]
    same(merge_outputs([scores[:2], scores[2:]], [2, 1], weights(2, 1)), scores)


def test_mappings_keep_their_type() -> None:
    outputs = [CausalLMOutput(loss=torch.tensor(float(i)), logits=rows(2, 3) + i) for i in (0, 2)]
    merged = merge_outputs(outputs, [2, 2], weights(1, 3))
    assert type(merged) is CausalLMOutput
    same(merged.loss, torch.tensor(1.5))
    same(merged.logits, torch.cat([rows(2, 3), rows(2, 3) + 2]))


def test_an_entry_that_some_parts_lack() -> None:
    outputs = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0), "rare": torch.tensor(9.0)}]
    merged = merge_outputs(outputs, [1, 1], weights(1, 1))
    same(merged, {"loss": torch.tensor(1.5), "rare": torch.tensor(9.0)})
    outputs = [{"a": torch.tensor(1.0)}, {"b": torch.tensor(2.0)}]
    same(merge_outputs(outputs, [1, 1], weights(1, 1)), {"a": torch.tensor(1.0), "b": torch.tensor(2.0)})


def test_what_cannot_be_merged_is_the_last() -> None:
    assert merge_outputs([None, None], [1, 1], weights(1, 1)) is None
    assert merge_outputs(["a", "b"], [1, 1], weights(1, 1)) == "b"
    assert merge_outputs([torch.tensor(1.0), "b"], [1, 1], weights(1, 1)) == "b"
    same(merge_outputs([torch.zeros(3), torch.ones(3)], [1, 1], weights(1, 1)), torch.ones(3))


def test_one_part_is_returned_as_it_is() -> None:
    output = object()
    assert merge_outputs([output], [3], weights(1)) is output


# ------------------------------------------------------------------------------------------------ pairs
@pytest.mark.parametrize("kind", ["list", "dict", "nested", "strings", "detection", "array", "metadata"])
def test_f15_inputs_keep_their_own_labels(kind: str) -> None:
    """Every leaf of a part that has one entry per sample speaks of the same samples."""
    for parts in (2, 3, 7):
        for piece in split_batch(whole(kind, 7), parts):
            numbers = {tuple(t[:, 0].tolist() if t.dim() == 2 else t.tolist()) for t in tensors_of(piece, kind)}
            assert len(numbers) == 1


def tensors_of(piece: Any, kind: str) -> list[Tensor]:
    if kind == "detection":
        return [piece[0], torch.stack([entry["label"] for entry in piece[1]])]
    if kind == "strings":
        return [piece["x"], torch.tensor([float(name.split()[1]) for name in piece["names"]])]
    if kind == "metadata":
        return [piece[0], torch.tensor([float(entry["name"].split()[1]) for entry in piece[1]])]
    found: list[Tensor] = []
    map_tensors(piece, lambda t: found.append(t))
    return [*found, torch.tensor(piece["ids"])] if kind == "array" else found


def test_sparse_and_nested_tensors_are_cut_by_samples() -> None:
    whole = torch.arange(20.0).view(5, 4) % 3
    rows = [torch.arange(2.0 + length) for length in range(5)]
    batch = {
        "coo": whole.to_sparse(),
        "csr": whole.to_sparse_csr(),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "nested": torch.nested.nested_tensor(rows),
    }
    first, second = split_batch(batch, 2)
    for part, start, stop in ((first, 0, 3), (second, 3, 5)):
        for name in ("coo", "csr"):
            assert part[name].layout is batch[name].layout
            assert torch.equal(part[name].to_dense(), whole[start:stop])
        for name in ("jagged", "nested"):
            assert part[name].layout is batch[name].layout
            assert all(map(torch.equal, part[name].unbind(), rows[start:stop]))
