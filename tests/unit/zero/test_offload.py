"""The walk over buckets, the layout of the file, and the bytes of an offload: properties over many sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_parallel.zero.memory import offloaded_bytes, state_bytes
from lightning_parallel.zero.offload import ALIGNMENT, RESIDENT, FileLayout, Turn, double_buffered

counts = st.integers(0, 40)


@given(counts)
def test_every_bucket_comes_is_stepped_goes_and_leaves_its_memory(count: int) -> None:
    travels = list(double_buffered(count))
    for turn in Turn:
        assert [travel.bucket for travel in travels if travel.turn is turn] == list(range(count))
    for bucket in range(count):
        turns = [travel.turn for travel in travels if travel.bucket == bucket]
        assert turns == [Turn.FETCH, Turn.STEP, Turn.SEND, Turn.SETTLE]


@given(counts)
def test_three_buckets_are_resident_at_most(count: int) -> None:
    resident = 0
    for travel in double_buffered(count):
        resident += (travel.turn is Turn.FETCH) - (travel.turn is Turn.SETTLE)
        assert 0 <= resident <= RESIDENT
    assert resident == 0


@given(counts, st.integers(1, 50), st.integers(1, 50), st.integers(1, 50))
def test_the_slowest_of_three_sets_the_pace(count: int, read: int, step: int, write: int) -> None:
    """Reads, steps and writes that take turns on three lanes overlap, apart from the first and the last ones."""
    now = reader = writer = 0
    came: dict[int, int] = {}
    went: dict[int, int] = {}
    for travel in double_buffered(count):
        if travel.turn is Turn.FETCH:
            reader = max(reader, now) + read
            came[travel.bucket] = reader
        elif travel.turn is Turn.STEP:
            now = max(now, came[travel.bucket]) + step
        elif travel.turn is Turn.SEND:
            writer = max(writer, now) + write
            went[travel.bucket] = writer
        else:
            now = max(now, went[travel.bucket])
    assert now <= count * max(read, step, write) + read + step + write


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.integers(0, 3 * ALIGNMENT)), max_size=30))
def test_extents_are_aligned_apart_and_stable(parts: list[tuple[int, str, int]]) -> None:
    layout, sizes = FileLayout(), {}
    for bucket, name, size in parts:
        sizes.setdefault((bucket, name), size)
        layout.place(bucket, name, sizes[bucket, name])
    extents = {key: layout.place(*key, size) for key, size in sizes.items()}
    end = 0
    for extent in sorted(extents.values(), key=lambda extent: (extent.offset, extent.nbytes)):
        assert extent.offset % ALIGNMENT == 0
        assert extent.offset >= end
        end = extent.offset + extent.nbytes
    assert end <= layout.size <= sum(sizes.values()) + ALIGNMENT * len(sizes)


def test_a_part_keeps_its_size() -> None:
    layout = FileLayout()
    layout.place(0, "exp_avg", 8)
    with pytest.raises(ValueError, match="part 'exp_avg' of bucket 0 has 8 bytes, not 16"):
        layout.place(0, "exp_avg", 16)
    with pytest.raises(ValueError, match="part 'exp_avg' of bucket 1 cannot have -1 bytes"):
        layout.place(1, "exp_avg", -1)


sizes = st.sampled_from([(4, 4), (2, 4), (2, 2)])
"""Bytes of a parameter, and of its gradient."""


@given(st.sampled_from(["cpu", "nvme"]), st.integers(1, 3), st.integers(1, 64), sizes)
def test_offload_moves_bytes_and_loses_none(kind: str, stage: int, ranks: int, size: tuple[int, int]) -> None:
    parameter, gradient = size
    states = state_bytes(stage, ranks, parameter, gradient_bytes=gradient)
    found = offloaded_bytes(kind, stage, ranks, parameter, gradient_bytes=gradient)
    extra = gradient / ranks if stage == 1 else 0  # a share of it is on the host besides its buffer on the device
    assert found.device + found.host + found.disk == pytest.approx(states.total + extra)
    assert found.disk == (states.optimizer if kind == "nvme" else 0)
    assert (found.down, found.up) == pytest.approx(((gradient + parameter) / ranks, parameter / ranks))


@given(st.sampled_from(["cpu", "nvme"]), st.integers(1, 64), sizes)
def test_offloaded_parameters_leave_nothing_on_the_device(kind: str, ranks: int, size: tuple[int, int]) -> None:
    parameter, gradient = size
    states = state_bytes(3, ranks, parameter, gradient_bytes=gradient)
    found = offloaded_bytes(kind, 3, ranks, parameter, gradient_bytes=gradient, parameters=True)
    assert found.device == 0
    assert found.host + found.disk == pytest.approx(states.total)
    assert found.disk == pytest.approx(states.optimizer + states.parameters if kind == "nvme" else 0)
    assert (found.down, found.up) == pytest.approx((gradient / ranks, 2 * parameter / ranks))
    with pytest.raises(
        ValueError, match="stage 2 of ZeRO has whole parameters on every device; offload those of stage 3"
    ):
        offloaded_bytes(kind, 2, ranks, parameters=True)


@given(st.integers(1, 64))
def test_bytes_of_mixed_precision_as_published(n: int) -> None:
    """Rajbhandari et al. 2020: gradients of 2 bytes, float32 copies and Adam's moments of 12."""
    found = [state_bytes(stage, n, parameter_bytes=2, gradient_bytes=2).total for stage in (1, 2, 3)]
    assert found == pytest.approx([4 + 12 / n, 2 + 14 / n, 16 / n])


def test_offload_of_7_billion_parameters() -> None:
    """The page's example: bf16-true on one device."""
    found = offloaded_bytes("cpu", 2, ranks=1, parameter_bytes=2)
    assert [7 * value for value in (found.device, found.host, found.down, found.up)] == [14, 112, 42, 14]
    with pytest.raises(ValueError, match="offload='disk' of stage 2 of ZeRO does not exist"):
        offloaded_bytes("disk", 2, 1)
