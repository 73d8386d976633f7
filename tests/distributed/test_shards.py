"""Full tensors from the shards of real ranks, and the differentiable pair of gathering and taking one's share."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_parallel.tensor_parallel.sharding import (
    split_kv_heads,
    split_packed,
    split_qkv,
    split_uneven,
    split_vocab,
)
from lightning_parallel.tensor_parallel.shards import all_gather_full, gather_shards, shard_tensor, take_shard
from tests.distributed.formulas import wave
from tests.distributed.layer_tools import close
from tests.harness import Ranks


def check_full_tensors(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    for spec in (
        split_uneven(0, 7, world_size),
        split_uneven(1, 3, world_size),
        split_packed(1, 8, 2, world_size),
        split_kv_heads(0, 2, 3, world_size),
        split_qkv(0, 4, 2, 2, world_size),
        split_vocab(5, world_size, padded_to=8),
    ):
        full = wave(*((spec.size, 4) if spec.dim == 0 else (4, spec.size)))
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            whole = (full * 100).to(dtype)
            local = shard_tensor(whole, spec, rank)
            gathered = all_gather_full(local, spec, tuple(full.shape), group)
            assert torch.equal(gathered, whole)
            assert gathered.dtype == dtype


@pytest.mark.parametrize("world_size", [2, 4])
def test_full_tensors(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_full_tensors)


def check_pair(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    for spec in (split_uneven(0, 7, 2), split_packed(0, 8, 2, 2), split_vocab(5, 2, padded_to=8)):
        full, weight = wave(3, spec.size), wave(3, spec.size, phase=1)
        last = spec.__class__(1, spec.size, spec.parts, spec.padding)
        local = shard_tensor(full, last, rank).requires_grad_()
        y = gather_shards(local, spec, group)
        close(y, full, 0)
        (y * weight).sum().backward()
        close(local.grad, shard_tensor(weight, last, rank), 0)

        x = full.clone().requires_grad_()
        y = take_shard(x, spec, group)
        close(y, local, 0)
        (y * shard_tensor(weight, last, rank)).sum().backward()
        close(x.grad, weight, 0)


def test_gather_and_take(ranks: Ranks) -> None:
    ranks(2, check_pair)
