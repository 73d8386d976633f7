"""The examples in the docstrings of the pure floor say what really happens."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    "layout",
    "parameters",
    "tensor_parallel.sharding",
    "pipeline.actions",
    "pipeline.partition",
    "pipeline.schedules",
    "pipeline.simulate",
    "scaling.checks",
    "scaling.flops",
    "scaling.laws",
    "scaling.meter",
    "scaling.micro_batches",
    "scaling.outlook",
    "scaling.plan",
    "scaling.repeats",
    "scaling.shapes",
    "scaling.sizing",
    "scaling.surfaces",
]


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"lightning_parallel.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
