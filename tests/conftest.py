"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.harness import Ranks, WorkerPool

collect_ignore = [] if torch.cuda.is_available() else ["gpu"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Runs a top-level function of the test module on n worker processes; see `tests.harness`."""
    pool = WorkerPool()
    yield pool
    pool.close()
