"""The order in which buckets go is the same whatever order their parts arrive in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_parallel.bucket_order import BucketOrder


@given(st.lists(st.integers(1, 4), max_size=6), st.randoms(use_true_random=False), st.integers(0, 24))
def test_buckets_go_in_order_and_only_when_complete(sizes: list[int], random: object, cut: int) -> None:
    parts = [bucket for bucket, size in enumerate(sizes) for _ in range(size)]
    random.shuffle(parts)  # type: ignore[attr-defined]
    order = BucketOrder(sizes)
    gone: list[int] = []
    for count, bucket in enumerate(parts[:cut], start=1):
        gone += order.arrived(bucket)
        complete = [b for b, size in enumerate(sizes) if parts[:count].count(b) == size]
        first_missing = next((b for b in range(len(sizes)) if b not in complete), len(sizes))
        assert gone == list(range(first_missing))
    assert gone + order.rest() == list(range(len(sizes)))
    assert order.rest() == []
