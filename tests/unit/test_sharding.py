"""ShardSpec and its constructors: every row held, one owner, local order, and round trips of an arange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_parallel.tensor_parallel.sharding import (
    Segment,
    ShardSpec,
    split_even,
    split_heads,
    split_kv_heads,
    split_packed,
    split_qkv,
    split_uneven,
    split_vocab,
)

ranks = st.integers(1, 6)
small = st.integers(1, 5)
PADDING = -1


@st.composite
def kv_heads_and_ranks(draw: st.DrawFn) -> tuple[int, int]:
    size, factor = draw(small), draw(small)
    return (size * factor, size) if draw(st.booleans()) else (size, size * factor)


@st.composite
def qkv(draw: st.DrawFn) -> ShardSpec:
    kv_heads, tensor_ranks = draw(kv_heads_and_ranks())
    heads = max(kv_heads, tensor_ranks) * draw(small)
    return split_qkv(draw(st.integers(0, 2)), heads, kv_heads, draw(small), tensor_ranks)


@st.composite
def padded_vocab(draw: st.DrawFn) -> ShardSpec:
    size, tensor_ranks = draw(st.integers(1, 40)), draw(ranks)
    multiple = -(-size // tensor_ranks) + draw(st.integers(0, 9))
    return split_vocab(size, tensor_ranks, padded_to=multiple * tensor_ranks)


dims = st.integers(0, 2)
specs = st.one_of(
    st.builds(lambda dim, n, r: split_even(dim, n * r, r), dims, small, ranks),
    st.builds(split_uneven, dims, st.integers(1, 40), ranks),
    st.builds(lambda dim, n, r, d: split_heads(dim, n * r, d, r), dims, small, ranks, small),
    st.builds(lambda dim, hr, d: split_kv_heads(dim, hr[0], d, hr[1]), dims, kv_heads_and_ranks(), small),
    st.builds(lambda dim, n, p, r: split_packed(dim, n * p * r, p, r), dims, small, small, ranks),
    st.builds(split_vocab, st.integers(1, 40), ranks),
    padded_vocab(),
    qkv(),
)


def scatter(spec: ShardSpec, full: Sequence[Any]) -> list[list[Any]]:
    """The local rows of every rank, padding marked."""
    local = []
    for rank, segments in enumerate(spec.parts):
        rows = [row for segment in segments for row in full[segment.start : segment.stop]]
        local.append(rows + [PADDING] * (spec.local_size(rank) - len(rows)))
    return local


@given(specs)
def test_every_row_is_held_and_owned_once(spec: ShardSpec) -> None:
    held = [row for part in spec.parts for s in part for row in range(s.start, s.stop)]
    owned = [
        row for rank, part in enumerate(spec.parts) for s in part if s.owner == rank for row in range(s.start, s.stop)
    ]
    assert set(held) == set(range(spec.size))
    assert sorted(owned) == list(range(spec.size))
    assert spec.replicated == (len(held) > spec.size)


@given(specs)
def test_owner_is_the_lowest_holder(spec: ShardSpec) -> None:
    for rank, part in enumerate(spec.parts):
        for segment in part:
            holders = spec.holders(segment)
            assert rank in holders
            assert segment.owner == min(holders)
    assert len(spec.segments()) == len({(s.start, s.stop) for part in spec.parts for s in part})
    assert spec.holders(Segment(spec.size, spec.size + 1, 0)) == ()


@given(specs)
def test_scatter_then_gather_of_an_arange_is_the_identity(spec: ShardSpec) -> None:
    local = scatter(spec, list(range(spec.size)))
    gathered = [PADDING] * spec.size
    for rank, rows in enumerate(local):
        assert len(rows) == spec.local_size(rank)
        for segment, where in spec.local_slices(rank):
            if segment.owner == rank:
                gathered[segment.start : segment.stop] = rows[where]
    assert gathered == list(range(spec.size))


@given(specs)
def test_local_shape_replaces_the_split_dimension(spec: ShardSpec) -> None:
    full = tuple(spec.size if axis == spec.dim else 7 for axis in range(spec.dim + 2))
    for rank in range(spec.ranks):
        shape = spec.local_shape(full, rank)
        assert shape[spec.dim] == spec.local_size(rank)
        assert shape[: spec.dim] + shape[spec.dim + 1 :] == full[: spec.dim] + full[spec.dim + 1 :]


@given(st.integers(1, 40), ranks)
def test_uneven_is_torch_chunk(size: int, tensor_ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(tensor_ranks)]
    chunks += [[]] * (tensor_ranks - len(chunks))
    assert scatter(split_uneven(0, size, tensor_ranks), list(range(size))) == chunks
    assert split_vocab(size, tensor_ranks) == split_uneven(0, size, tensor_ranks)


def test_even_and_heads_are_plain_slices() -> None:
    assert scatter(split_even(1, 6, 2), list(range(6))) == [[0, 1, 2], [3, 4, 5]]
    assert split_heads(0, heads=4, head_dim=3, ranks=2) == split_even(0, 12, 2)
    assert split_even(0, 6, 1).parts == ((Segment(0, 6, 0),),)


def test_kv_heads_are_repeated_on_neighbours_when_there_are_fewer_than_ranks() -> None:
    spec = split_kv_heads(0, heads=2, head_dim=2, ranks=4)
    assert scatter(spec, list(range(4))) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [part[0].owner for part in spec.parts] == [0, 0, 2, 2]
    assert spec.holders(spec.parts[3][0]) == (2, 3)
    assert split_kv_heads(0, heads=4, head_dim=2, ranks=2) == split_heads(0, 4, 2, 2)


def test_qkv_gives_each_rank_its_heads_of_every_block() -> None:
    rows = [f"{block}{head}" for block, heads in (("q", 4), ("k", 2), ("v", 2)) for head in range(heads)]
    spec = split_qkv(0, heads=4, kv_heads=2, head_dim=1, ranks=2)
    assert scatter(spec, rows) == [["q0", "q1", "k0", "v0"], ["q2", "q3", "k1", "v1"]]
    wide = split_qkv(0, heads=4, kv_heads=2, head_dim=1, ranks=4)
    assert scatter(wide, rows) == [
        ["q0", "k0", "v0"],
        ["q1", "k0", "v0"],
        ["q2", "k1", "v1"],
        ["q3", "k1", "v1"],
    ]


@given(qkv())
def test_query_heads_find_their_kv_head_on_the_same_rank(spec: ShardSpec) -> None:
    """Query head h reads key/value head h * kv_heads // heads: what grouped-query attention does with local heads."""
    for part in spec.parts:
        query, key, value = part
        queries = spec.parts[-1][0].stop
        keys = (spec.size - queries) // 2
        # In units of rows: the local share of queries and of keys must start and stop at the same fraction.
        assert query.start * keys // queries >= key.start - queries
        assert query.stop * keys <= (key.stop - queries) * queries
        assert (key.stop - key.start, key.start + keys) == (value.stop - value.start, value.start)


def test_packed_splits_each_block() -> None:
    rows = ["g0", "g1", "g2", "g3", "u0", "u1", "u2", "u3"]
    local = scatter(split_packed(0, 8, 2, 2), rows)
    assert local == [["g0", "g1", "u0", "u1"], ["g2", "g3", "u2", "u3"]]


def test_padded_vocabulary_keeps_equal_local_sizes_and_marks_rows_that_do_not_exist() -> None:
    spec = split_vocab(5, 4, padded_to=12)
    assert scatter(spec, list(range(5))) == [[0, 1, 2], [3, 4, PADDING], [PADDING] * 3, [PADDING] * 3]
    assert spec.padding == (0, 1, 3, 3)
    assert spec.local_shape((5, 2), 3) == (3, 2)
    assert split_vocab(8, 4, padded_to=8) == split_even(0, 8, 4)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: split_even(0, 10, 4, what="hidden size"),
            "hidden size 10 cannot be split evenly over tensor_parallel_size=4; use 1, 2 or 5",
        ),
        (
            lambda: split_heads(0, 12, 64, 5),
            "attention head count 12 cannot be split evenly over tensor_parallel_size=5; use 1, 2, 3, 4 or 6",
        ),
        (
            lambda: split_kv_heads(0, 4, 8, 3),
            "4 key/value heads can be neither split nor repeated evenly over tensor_parallel_size=3; use 1, 2 or 4",
        ),
        (lambda: split_qkv(0, 8, 3, 8, 2), "8 attention heads cannot share 3 key/value heads; use 1, 2, 4 or 8"),
        (
            lambda: split_qkv(0, 6, 2, 8, 4),
            "attention head count 6 cannot be split evenly over tensor_parallel_size=4; use 1, 2, 3 or 6",
        ),
        (lambda: split_packed(0, 9, 2, 1), "size 9 is not made of 2 equal blocks; use 1 or 3"),
        (
            lambda: split_packed(0, 12, 2, 4),
            "packed block size 6 cannot be split evenly over tensor_parallel_size=4; use 1, 2, 3 or 6",
        ),
        (
            lambda: split_vocab(10, 4, padded_to=8),
            "a vocabulary of 10 over 4 tensor ranks cannot be padded to 8; "
            "use 12 or another multiple of 4 that is not smaller",
        ),
        (
            lambda: split_vocab(10, 4, padded_to=14),
            "a vocabulary of 10 over 4 tensor ranks cannot be padded to 14; "
            "use 12 or another multiple of 4 that is not smaller",
        ),
        (lambda: split_even(0, 4, 0), "tensor_parallel_size must be at least 1, got 0"),
        (lambda: split_uneven(0, 0, 2), "a shard needs dim >= 0 and size >= 1, got dim=0, size=0"),
        (
            lambda: split_even(0, 4, 2).local_shape((3, 4), 0),
            "shape (3, 4) has no dimension 0 of size 4",
        ),
        (lambda: split_even(0, 4, 2).local_size(2), "tensor rank 2 is outside 0..1"),
        (lambda: split_even(0, 4, 2).local_size(-1), "tensor rank -1 is outside 0..1"),
    ],
)
def test_errors_name_numbers_and_values_that_work(build: object, text: str) -> None:
    assert callable(build)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared below
        build()
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (((Segment(0, 2, 0),), (Segment(3, 4, 1),)), "range 2:3 of 4 is held by no tensor rank"),
        (((Segment(0, 3, 0),), (Segment(2, 4, 1),)), "range 2:3 of 4 is cut in two ways"),
        (((Segment(0, 2, 0),), ()), "cover 0:2, but the full size is 4"),
        (((Segment(0, 4, 0),), (Segment(0, 4, 1),)), "first held by tensor rank 0, but names 1 as its owner"),
        (((Segment(0, 4, 0), Segment(0, 4, 0)),), "holds a range twice"),
        ((), "at least 1 tensor rank, got none"),
    ],
)
def test_a_spec_that_does_not_tile_the_tensor_is_refused(parts: tuple[tuple[Segment, ...], ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ShardSpec(0, 4, parts)


def test_a_bad_segment_or_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="0 <= start < stop, got 2:2"):
        Segment(2, 2, 0)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        Segment(0, 2, -1)
    with pytest.raises(ValueError, match="padding needs 1 counts"):
        ShardSpec(0, 2, ((Segment(0, 2, 0),),), padding=(1, 0))
