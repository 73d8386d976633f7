"""The examples in the planner's docstrings say what really happens."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["explain", "model_shape", "typical", "units"])
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"lightning_parallel.planner.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
