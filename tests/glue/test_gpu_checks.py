"""The GPU checks are collected only where CUDA exists; here they must at least keep loading."""

from __future__ import annotations

import importlib


def test_gpu_checks_load() -> None:
    assert importlib.import_module("tests.gpu.test_layouts").LAYOUTS
    assert callable(importlib.import_module("tests.gpu.train_once").train)
    assert importlib.import_module("tests.gpu.test_hand_over").SCRIPT.exists()
    assert callable(importlib.import_module("tests.gpu.hand_over").hand_over)
