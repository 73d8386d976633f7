"""A process that is killed while its shards are in files leaves one behind, which disturbs nobody."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from tests.harness import Ranks, RanksFailed
from tests.unit.zero.test_offloaded_step import backward, parameters, sharder


def killed(rank: int, world_size: int, folder: str) -> None:
    """Dies when the third bucket of the second step has come in."""
    members = parameters()
    optimizer = optim.AdamW(members, lr=0.5)
    sharded = sharder(members, optimizer, "nvme", Path(folder))
    backward(sharded, members)
    optimizer.step()
    storage = sharded.storage
    assert storage is not None
    arrive, arrived = storage.arrive, []

    def dies(bucket: Any, stepped: Any) -> None:
        arrive(bucket, stepped)
        arrived.append(bucket)
        if len(arrived) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    storage.arrive = dies  # type: ignore[method-assign]
    optimizer.step()


def test_f31_a_run_after_a_killed_one_neither_reads_its_file_nor_trips_over_it(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="ended with exit code -9"):
        ranks(1, killed, str(tmp_path))
    (left,) = tmp_path.iterdir()
    assert (left / "state.bin").stat().st_size > 0, "nobody cleans up after a killed process"
    members, plain = parameters(), parameters()
    optimizer, expected = (optim.AdamW(some, lr=0.5, fused=True) for some in (members, plain))
    sharded = sharder(members, optimizer, "nvme", tmp_path)
    (mine,) = tmp_path.iterdir()
    assert mine.name != left.name
    for _ in range(2):
        optimizer.zero_grad()
        backward(sharded, members)
        optimizer.step()
        for place, p in enumerate(plain):
            p.grad = torch.full((3, 2), place + 1.0)
        expected.step()
    torch.testing.assert_close(members, plain, atol=1e-6, rtol=1e-6)
    assert sharded.storage is not None
    sharded.storage.remove()
    assert list(tmp_path.iterdir()) == []
