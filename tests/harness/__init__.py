"""Persistent worker processes on which distributed tests run their functions.

A test asks for the ``ranks`` fixture and gives it a top-level function of its own module::

    def worker(rank: int, world_size: int, scale: float) -> torch.Tensor: ...

    def test_sum(ranks: Ranks) -> None:
        first, second = ranks(2, worker, 3.0, timeout=60)

Around the call every worker holds a default gloo group of that size. With ``launch="lightning"`` it holds none, and the
environment reads as under torchrun, so that a Trainer built by the function joins the other ranks by itself. With
``launch="none"`` it knows of no others.

``run_python`` runs a whole script (a launcher, an example) with a time limit and leaves no process behind. Where the
launch itself is not what is tested, ``ranks(2, run_script, path, arguments, folder, launch="lightning")`` runs a script
without the seconds that every new process imports for. Where processes are, but not how the first of them comes to
life, ``ranks(1, fork_script, path, arguments, folder, launch="none")`` is ``run_python`` without those seconds.
"""

from __future__ import annotations

from tests.harness.pool import Ranks, RanksFailed, RanksHung, WorkerPool
from tests.harness.process import Finished, run_python
from tests.harness.scripts import fork_script, run_script

__all__ = ["Finished", "Ranks", "RanksFailed", "RanksHung", "WorkerPool", "fork_script", "run_python", "run_script"]
