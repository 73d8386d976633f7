"""Which rank owns what: every element once, no padding in any piece, balanced shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_parallel.zero.memory import state_bytes
from lightning_parallel.zero.shards import ALIGNMENT, BucketLayout, Item, plan_buckets

items = st.lists(
    st.builds(Item, st.integers(0, 70) | st.sampled_from([0, 1]), st.sampled_from("ab"), st.booleans()), max_size=24
)
ranks = st.integers(1, 9)
limits = st.integers(1, 200)


def pieces(buckets: tuple[BucketLayout, ...], rank: int) -> dict[int, tuple[int, int]]:
    found = {}
    for bucket in buckets:
        for place, slot in enumerate(bucket.slots):
            piece = bucket.piece(place, rank)
            if piece is not None:
                found[slot.index] = piece
    return found


@given(items, ranks, limits)
def test_every_element_has_one_owner(items: list[Item], ranks: int, limit: int) -> None:
    buckets = plan_buckets(items, ranks, limit)
    assert sorted(slot.index for bucket in buckets for slot in bucket.slots) == list(range(len(items)))
    held = [pieces(buckets, rank) for rank in range(ranks)]
    for index, item in enumerate(items):
        parts = [owned[index] for owned in held if index in owned]
        assert [element for start, stop in parts for element in range(start, stop)] == list(range(item.numel))
        assert len(parts) == 1 or all(start < stop for start, stop in parts)
        if item.whole:
            assert parts == [(0, item.numel)]


@given(items, ranks, limits)
def test_buckets_are_closed_over_their_slots_and_shares(items: list[Item], ranks: int, limit: int) -> None:
    for bucket in plan_buckets(items, ranks, limit):
        members = [items[slot.index] for slot in bucket.slots]
        assert len({(item.kind, item.whole) for item in members}) == 1
        assert [slot.index for slot in bucket.slots] == sorted(slot.index for slot in bucket.slots)
        position = 0
        for slot in bucket.slots:
            assert (slot.offset, slot.numel) == (position, items[slot.index].numel)
            position += slot.numel
        assert position == bucket.used
        assert sum(item.numel for item in members[:-1]) < limit
        assert [start for start, _ in bucket.bounds] == [0, *(stop for _, stop in bucket.bounds[:-1])]
        assert sum(bucket.share(rank) for rank in range(ranks)) == bucket.size >= bucket.used
        if bucket.owner is None:
            assert len({bucket.share(rank) for rank in range(ranks)}) == 1
            assert bucket.size - bucket.used < ranks * ALIGNMENT
        else:
            assert bucket.share(bucket.owner) == bucket.size == bucket.used


@given(items, ranks, limits)
def test_whole_parameters_are_balanced(items: list[Item], ranks: int, limit: int) -> None:
    """No rank exceeds the mean by more than one parameter, which is what the largest-first rule promises."""
    whole = [Item(item.numel, item.kind, True) for item in items]
    buckets = plan_buckets(whole, ranks, limit)
    loads = [sum(bucket.share(rank) for bucket in buckets) for rank in range(ranks)]
    largest = max((item.numel for item in items), default=0)
    assert max(loads) <= sum(loads) / ranks + largest


def test_fewer_elements_than_ranks() -> None:
    (bucket,) = plan_buckets([Item(1), Item(0), Item(2)], ranks=4, limit=100)
    assert [pieces((bucket,), rank) for rank in range(4)] == [{0: (0, 1), 1: (0, 0), 2: (0, 2)}, {}, {}, {}]


def test_a_large_parameter_is_cut_and_no_parameters_need_no_bucket() -> None:
    first, second = plan_buckets([Item(40), Item(5)], ranks=2, limit=30)
    assert [first.piece(0, rank) for rank in range(2)] == [(0, 24), (24, 40)]
    assert [second.piece(0, rank) for rank in range(2)] == [(0, 5), None]
    assert plan_buckets([], ranks=2, limit=1) == ()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 1 rank and a limit of at least 1 element, got 0 and 5"):
        plan_buckets([Item(1)], ranks=0, limit=5)
    with pytest.raises(ValueError, match="at least 0 elements, got -1"):
        Item(-1)
    with pytest.raises(ValueError, match="stage 4 of ZeRO on 2 ranks"):
        state_bytes(4, 2)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 64])
def test_bytes_per_parameter_of_fp32_adam(n: int) -> None:
    """The published formulas: 16 bytes replicated, then 8 + 8/n, 4 + 12/n and 16/n."""
    found = [state_bytes(stage, n).total for stage in range(4)]
    assert found == pytest.approx([16, 8 + 8 / n, 4 + 12 / n, 16 / n])
    assert state_bytes(2, n, moments=0).total == pytest.approx(4 + 4 / n)


def test_a_model_of_seven_billion_parameters() -> None:
    gigabytes = [7 * state_bytes(stage, 4).total for stage in (0, 3)]
    assert gigabytes == [112.0, 28.0]


@given(items, ranks, limits)
def test_no_bucket_waits_for_one_that_is_complete_later(items: list[Item], ranks: int, limit: int) -> None:
    """Buckets are reduced in this order: one with an early and a late parameter must not hold up all others."""
    ends = [max(slot.index for slot in bucket.slots) for bucket in plan_buckets(items, ranks, limit)]
    assert ends == sorted(ends)
