"""The examples in the planner's docstrings say what really happens."""

from __future__ import annotations

import doctest

from lightning_parallel.planner import model_shape


def test_docstring_examples() -> None:
    result = doctest.testmod(model_shape)
    assert result.attempted >= 3
    assert result.failed == 0
