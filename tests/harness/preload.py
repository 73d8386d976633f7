"""Imported once by the process from which workers are forked: what takes seconds and starts no thread."""

from __future__ import annotations

import gc

gc.disable()  # what is imported stays, and looking through it while it grows takes a tenth of the time

import lightning.pytorch  # noqa: E402
import torch  # noqa: E402

import tests.glue.training  # noqa: E402
import tests.harness.worker  # noqa: E402

__all__ = ["lightning", "tests", "torch"]

gc.freeze()
gc.set_threshold(100_000, 50, 100)  # a run makes few cycles; to look for them thousands of times takes longer than it
gc.enable()
