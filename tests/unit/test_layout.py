"""ParallelLayout: rank arithmetic, groups, and the choice of sizes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_parallel.layout import Coordinate, ParallelLayout, SizeOrAuto, choices_text, divisors

layouts = st.builds(ParallelLayout, st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))


def test_ranks_are_numbered_pipeline_slowest_tensor_fastest() -> None:
    layout = ParallelLayout(pipeline=2, data=2, tensor=2)
    expected = [Coordinate(p, d, t) for p, d, t in itertools.product(range(2), repeat=3)]
    assert [layout.coordinate(rank) for rank in range(8)] == expected
    assert layout.tensor_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.data_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.pipeline_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.model_groups() == ((0, 1, 4, 5), (2, 3, 6, 7))


@given(layouts)
def test_rank_and_coordinate_are_inverse(layout: ParallelLayout) -> None:
    seen = set()
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        assert layout.rank_of(pipeline=at.pipeline, data=at.data, tensor=at.tensor) == rank
        seen.add(at)
    assert len(seen) == layout.world_size


@given(layouts)
def test_every_kind_of_group_covers_the_world_once_and_varies_only_its_dimension(layout: ParallelLayout) -> None:
    kinds = {
        "tensor": (layout.tensor_groups(), layout.tensor),
        "data": (layout.data_groups(), layout.data),
        "pipeline": (layout.pipeline_groups(), layout.pipeline),
    }
    for name, (groups, size) in kinds.items():
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        for group in groups:
            places = [layout.coordinate(rank) for rank in group]
            assert [getattr(place, name) for place in places] == list(range(size))
            others = [field for field in kinds if field != name]
            assert len({tuple(getattr(place, other) for other in others) for place in places}) == 1
    models = layout.model_groups()
    assert sorted(rank for group in models for rank in group) == list(range(layout.world_size))
    assert [{layout.coordinate(rank).data for rank in group} for group in models] == [{d} for d in range(layout.data)]


@pytest.mark.parametrize("rank", [-1, 4, True, 1.0])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"rank .* is outside 0\.\.3"):
        ParallelLayout(2, 1, 2).coordinate(rank)


def test_an_index_outside_its_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data index 2 is outside 0\.\.1"):
        ParallelLayout(2, 2, 2).rank_of(data=2)


@pytest.mark.parametrize("size", [0, -1, True, "2", 1.0])
def test_a_size_that_is_not_a_positive_whole_number_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="tensor size must be a whole number of at least 1"):
        ParallelLayout(tensor=size)


@pytest.mark.parametrize(
    ("world_size", "devices", "tensor", "pipeline", "expected"),
    [
        (1, 1, "auto", "auto", (1, 1, 1)),
        (2, 2, "auto", "auto", (1, 1, 2)),
        (3, 3, "auto", "auto", (1, 1, 3)),
        (4, 4, "auto", "auto", (2, 1, 2)),
        (6, 6, "auto", "auto", (2, 1, 3)),
        (8, 8, "auto", "auto", (2, 1, 4)),
        (16, 16, "auto", "auto", (4, 1, 4)),
        (16, 8, "auto", "auto", (2, 2, 4)),
        (4, 2, "auto", "auto", (1, 2, 2)),
        (4, 4, 1, "auto", (4, 1, 1)),
        (4, 4, 2, "auto", (2, 1, 2)),
        (4, 4, "auto", 1, (1, 1, 4)),
        (8, 4, "auto", 2, (2, 2, 2)),
        (8, 4, "auto", 8, (8, 1, 1)),
        (16, 4, "auto", 8, (8, 1, 2)),
        (12, 4, "auto", 3, (3, 1, 4)),
        (8, 8, 2, 2, (2, 2, 2)),
        (8, 8, 1, 1, (1, 8, 1)),
        (4, 2, 1, 4, (4, 1, 1)),
    ],
)
def test_choose(
    world_size: int, devices: int, tensor: SizeOrAuto, pipeline: SizeOrAuto, expected: tuple[int, int, int]
) -> None:
    assert ParallelLayout.choose(world_size, devices, tensor, pipeline) == ParallelLayout(*expected)


@given(st.integers(1, 16), st.integers(1, 4))
def test_auto_is_the_most_even_split_of_a_node(devices: int, nodes: int) -> None:
    layout = ParallelLayout.choose(devices * nodes, devices)
    assert layout.tensor * layout.pipeline == devices
    assert layout.data == nodes
    splits = [(t, p) for t in range(1, devices + 1) for p in range(1, t + 1) if t * p == devices]
    assert (layout.tensor, layout.pipeline) == min(splits)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 12), st.integers(1, 12))
def test_explicit_sizes_are_kept_or_refused_and_tensor_groups_stay_inside_a_node(
    devices: int, nodes: int, tensor: int, pipeline: int
) -> None:
    fits = devices % tensor == 0 and devices * nodes % (tensor * pipeline) == 0
    if not fits:
        with pytest.raises(ValueError, match="does not divide"):
            ParallelLayout.choose(devices * nodes, devices, tensor, pipeline)
        return
    layout = ParallelLayout.choose(devices * nodes, devices, tensor, pipeline)
    assert (layout.tensor, layout.pipeline, layout.world_size) == (tensor, pipeline, devices * nodes)
    assert all(len({rank // devices for rank in group}) == 1 for group in layout.tensor_groups())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (4, 4, 3, "auto"),
            "tensor_parallel_size=3 does not divide the 4 devices of a node; use 1, 2 or 4, or a multiple of 3",
        ),
        (
            (8, 4, 8, 1),
            "tensor_parallel_size=8 does not divide the 4 devices of a node; use 1, 2 or 4, or a multiple of 8",
        ),
        (
            (4, 4, 2, 4),
            "tensor_parallel_size=2 x pipeline_parallel_size=4 = 8 does not divide the world size 4; "
            "with tensor_parallel_size=2 use pipeline_parallel_size 1 or 2",
        ),
        (
            (8, 8, "auto", 3),
            "tensor_parallel_size=1 x pipeline_parallel_size=3 = 3 does not divide the world size 8; "
            "with tensor_parallel_size=1 use pipeline_parallel_size 1, 2, 4 or 8",
        ),
        ((6, 4, "auto", "auto"), "world size 6 is not a whole number of nodes of 4 devices; use 4 processes"),
        ((2, 4, "auto", "auto"), "world size 2 is not a whole number of nodes of 4 devices; use 4 processes"),
        ((4, 4, 0, 1), "tensor_parallel_size must be a whole number of at least 1, such as 1, got 0"),
        ((4, 4, 1, "two"), "pipeline_parallel_size must be a whole number of at least 1, such as 1, got 'two'"),
    ],
)
def test_choose_names_numbers_and_sizes_that_work(
    arguments: tuple[int, int, SizeOrAuto, SizeOrAuto], text: str
) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared below
        ParallelLayout.choose(*arguments)
    assert str(error.value) == text


@given(st.integers(1, 500))
def test_divisors(number: int) -> None:
    assert divisors(number) == tuple(d for d in range(1, number + 1) if number % d == 0)


def test_divisors_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        divisors(0)


def test_choices_text() -> None:
    assert [choices_text(()), choices_text((3,)), choices_text((1, 2))] == ["", "3", "1 or 2"]
