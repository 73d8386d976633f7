"""Persistent worker processes on which distributed tests run their functions.

A test asks for the ``ranks`` fixture and gives it a top-level function of its own module::

    def worker(rank: int, world_size: int, scale: float) -> torch.Tensor: ...

    def test_sum(ranks: Ranks) -> None:
        first, second = ranks(2, worker, 3.0, timeout=60)

Around the call every worker holds a default gloo group of that size. With ``launch="lightning"`` it holds none, and the
environment reads as under torchrun, so that a Trainer built by the function joins the other ranks by itself.
"""

from __future__ import annotations

from tests.harness.pool import Ranks, RanksFailed, RanksHung, WorkerPool

__all__ = ["Ranks", "RanksFailed", "RanksHung", "WorkerPool"]
