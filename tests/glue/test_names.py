"""Strategy names are registered whatever is imported first."""

from __future__ import annotations

from pathlib import Path

from tests.harness import run_python

# The hardest order: the import of a strategy is what imports Lightning, and with it registers the names.
STRATEGY_FIRST = """
import inspect, sys
import lightning_parallel
assert not {"torch", "lightning"} & set(sys.modules)
import lightning_parallel.strategies.refusals  # which the names' registration must not need
import lightning_parallel.strategies.tensor_pipeline as ours
import lightning.pytorch
from lightning.pytorch.strategies import StrategyRegistry
from lightning_parallel.strategies.registry import STRATEGY_NAMES
assert inspect.getsource(lightning.pytorch)
assert isinstance(StrategyRegistry.get("tp_pp"), ours.TensorPipelineStrategy)
assert all(isinstance(StrategyRegistry.get(name), ours.TensorPipelineStrategy) for name in STRATEGY_NAMES)
"""


def test_a_strategy_first(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STRATEGY_FIRST)
    done = run_python([tmp_path / "script.py"], cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.output
