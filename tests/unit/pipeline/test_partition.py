"""The weighted partition, against brute force over every split."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_parallel.pipeline.partition import partition_blocks, stage_weights

weights = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def all_splits(blocks: int, stages: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for cuts in itertools.combinations(range(1, blocks), stages - 1):
        edges = (0, *cuts, blocks)
        yield tuple(zip(edges, edges[1:], strict=False))


@settings(deadline=None)
@given(weights, st.integers(1, 9), st.integers(0, 30), st.integers(0, 30))
def test_best_of_all_splits_with_the_documented_ties(blocks: list[int], stages: int, first: int, last: int) -> None:
    if stages > len(blocks):
        with pytest.raises(ValueError, match=f"{len(blocks)} blocks cannot be split into {stages} pipeline stages"):
            partition_blocks(blocks, stages, first, last)
        return

    def rank(bounds: tuple[tuple[int, int], ...]) -> tuple[int, int, tuple[tuple[int, int], ...]]:
        loads = [sum(blocks[start:stop]) for start, stop in bounds]
        loads[0] += first
        loads[-1] += last
        return max(loads), sum(load * load for load in loads), bounds

    assert partition_blocks(blocks, stages, first, last) == min(all_splits(len(blocks), stages), key=rank)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.data())
def test_fractions_are_exact(blocks: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(blocks)))
    bounds = partition_blocks(blocks, stages)
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == len(blocks)
    assert all(stop > start for start, stop in bounds)
    best = min(max(stage_weights(blocks, split)) for split in all_splits(len(blocks), stages))
    assert max(stage_weights(blocks, bounds)) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(
    ("blocks", "stages", "first", "last", "expected"),
    [
        ([1] * 4, 2, 0, 0, ((0, 2), (2, 4))),
        ([1] * 10, 4, 0, 0, ((0, 2), (2, 4), (4, 7), (7, 10))),
        ([1] * 5, 5, 9, 9, ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))),
        ([1] * 6, 3, 2, 0, ((0, 1), (1, 3), (3, 6))),
        ([2] * 6, 3, 0, 4, ((0, 2), (2, 5), (5, 6))),
        ([1, 1, 8, 1, 1], 3, 0, 0, ((0, 2), (2, 3), (3, 5))),
        ([0.1] * 3, 3, 0, 0, ((0, 1), (1, 2), (2, 3))),
        ([3, 1], 1, 1, 1, ((0, 2),)),
    ],
)
def test_known_splits(
    blocks: Sequence[float], stages: int, first: float, last: float, expected: tuple[tuple[int, int], ...]
) -> None:
    assert partition_blocks(blocks, stages, first, last) == expected


def test_stage_weights_add_embedding_and_head() -> None:
    assert stage_weights([1, 2, 3], ((0, 1), (1, 3)), first=10, last=100) == (11, 105)
    assert stage_weights([1, 2, 3], ((0, 3),), first=10, last=100) == (116,)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ([1, 1], 3),
            "2 blocks cannot be split into 3 pipeline stages, each needs at least one; "
            "use pipeline_parallel_size 2 or less",
        ),
        (([1, -1], 2), "a block weight must be a finite number of at least 0, got -1; use 1"),
        (([1, float("inf")], 2), "a block weight must be a finite number of at least 0, got inf; use 1"),
        (([1, 1], 2, float("nan")), "a block weight must be a finite number of at least 0, got nan; use 1"),
        (([1, 1], 0), "stages must be at least 1, got 0"),
    ],
)
def test_errors(arguments: tuple[list[float], int], text: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared below
        partition_blocks(*arguments)
    assert str(error.value) == text
