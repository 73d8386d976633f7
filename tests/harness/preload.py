"""Imported once by the process from which workers are forked: what takes seconds and starts no thread."""

from __future__ import annotations

import lightning.pytorch
import torch

import tests.glue.training
import tests.harness.worker

__all__ = ["lightning", "tests", "torch"]
