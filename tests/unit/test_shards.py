"""Slices of full tensors and the way back, in one process: the ranks are played one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_parallel.tensor_parallel.sharding import (
    Segment,
    ShardSpec,
    split_even,
    split_kv_heads,
    split_packed,
    split_qkv,
    split_uneven,
    split_vocab,
)
from lightning_parallel.tensor_parallel.shards import (
    all_gather_full,
    contiguous_sizes,
    gather_shards,
    shard_tensor,
    take_shard,
    write_shard,
)

SPECS = [
    split_even(0, 8, 4),
    split_uneven(0, 8, 3),
    split_uneven(0, 3, 4),
    split_packed(0, 8, 2, 2),
    split_kv_heads(0, 2, 4, 4),
    split_qkv(0, 4, 1, 2, 2),
    split_vocab(5, 2, padded_to=8),
    split_even(1, 6, 2),
    split_uneven(2, 5, 3),
]


def numbers(spec: ShardSpec) -> Tensor:
    shape = [3, 4, 2]
    shape[spec.dim] = spec.size
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@pytest.mark.parametrize("spec", SPECS)
def test_shards_put_the_full_tensor_together_again(spec: ShardSpec) -> None:
    full = numbers(spec)
    rebuilt = torch.full_like(full, torch.nan)
    for rank in range(spec.ranks):
        local = shard_tensor(full, spec, rank)
        assert local.is_contiguous()
        assert local.shape == spec.local_shape(tuple(full.shape), rank)
        write_shard(rebuilt, local, spec, rank)
    assert torch.equal(rebuilt, full)


def test_segments_lie_in_local_order_and_padding_is_zero() -> None:
    assert shard_tensor(torch.arange(8), split_packed(0, 8, 2, 2), 1).tolist() == [2, 3, 6, 7]
    assert shard_tensor(torch.arange(1, 6), split_vocab(5, 2, padded_to=8), 1).tolist() == [5, 0, 0, 0]
    assert shard_tensor(torch.arange(3), split_uneven(0, 3, 4), 3).tolist() == []


def test_a_shard_is_a_copy_without_history() -> None:
    full = torch.arange(8.0, requires_grad=True)
    for spec in (split_even(0, 8, 1), split_even(0, 8, 2)):
        local = shard_tensor(full, spec, 0)
        assert not local.requires_grad
        assert local.data_ptr() != full.data_ptr()
    assert shard_tensor(torch.empty(8, 2, device="meta"), split_even(0, 8, 2), 1).device.type == "meta"


def test_write_shard_leaves_the_other_ranks_rows() -> None:
    full = torch.zeros(8)
    write_shard(full, torch.ones(4), split_packed(0, 8, 2, 2), 1)
    assert full.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_shapes_that_do_not_fit() -> None:
    spec = split_even(0, 8, 2)
    with pytest.raises(ValueError, match=r"shape \(6, 2\) has no dimension 0 of size 8"):
        shard_tensor(torch.zeros(6, 2), spec, 0)
    with pytest.raises(ValueError, match=r"tensor rank 1 holds shape \(4, 2\) of \(8, 2\), got \(4, 3\)"):
        write_shard(torch.zeros(8, 2), torch.zeros(4, 3), spec, 1)
    with pytest.raises(ValueError, match=r"tensor rank 0 holds shape \(8,\) of \(8,\), got \(7,\)"):
        all_gather_full(torch.zeros(7), split_even(0, 8, 1), (8,), None)


def test_contiguous_sizes() -> None:
    assert [contiguous_sizes(spec) for spec in SPECS] == [
        [2, 2, 2, 2],
        [3, 3, 2],
        [1, 1, 1, 0],
        None,
        None,
        None,
        None,
        [3, 3],
        [2, 2, 1],
    ]
    swapped = ShardSpec(0, 2, ((Segment(1, 2, 0),), (Segment(0, 1, 1),)))
    assert contiguous_sizes(swapped) is None


def test_one_rank_gathers_a_copy() -> None:
    """The caller may write into what it gets; the differentiable pair hands the very tensor on."""
    full = torch.arange(8.0)
    gathered = all_gather_full(full, split_even(0, 8, 1), (8,), None)
    assert torch.equal(gathered, full)
    assert gathered.data_ptr() != full.data_ptr()
    assert gather_shards(full, split_even(0, 8, 1), None) is full
    assert take_shard(full, split_even(0, 8, 1), None) is full
