"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import sys

# Before torch and scipy are loaded: on few cores, which ranks share, more threads of theirs only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A million objects of imported modules would be looked through again and again while they are made, and after that.
gc.disable()

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# torch and Lightning are imported where they are used: the process that only hands out tests has no need of them.
if TYPE_CHECKING:
    from tests.harness import Ranks

# What is drawn is small (stages, micro-batches, sizes): a fault shows within a few examples, and each run draws others.
settings.register_profile("suite", max_examples=25, deadline=None)
settings.load_profile("suite")

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """The folder for CUDA devices is passed over where there is none."""
    if collection_path != GPU_TESTS:
        return None
    import torch

    return None if torch.cuda.is_available() else True


def pytest_collection_finish() -> None:
    """Every test module has been imported."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # tests leave few cycles; to look for them at every turn takes long
    gc.enable()


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A test that joins a process group belongs on workers: in this process all later tests would be in it, too."""
    yield
    group = getattr(sys.modules.get("torch"), "distributed", None)
    if group is not None and group.is_available() and group.is_initialized():
        group.destroy_process_group()
        pytest.fail("the test left its process group behind")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Runs a top-level function of the test module on n worker processes; see `tests.harness`."""
    from tests.harness import WorkerPool

    pool = WorkerPool()
    yield pool
    pool.close()
