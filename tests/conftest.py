"""Fixtures shared by all tests."""

from __future__ import annotations

import os

# Before torch and scipy are loaded: on few cores, which ranks share, more threads of theirs only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.harness import Ranks, WorkerPool  # noqa: E402

collect_ignore = [] if torch.cuda.is_available() else ["gpu"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Runs a top-level function of the test module on n worker processes; see `tests.harness`."""
    pool = WorkerPool()
    yield pool
    pool.close()
