"""Strategy names are registered whatever is imported first, and what only plans starts without torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_parallel.when_imported import when_imported
from tests.architecture.test_floors import BLOCKED_IMPORT
from tests.harness import run_python

# The hardest order: the import of a strategy is what imports Lightning, and with it registers the names.
STRATEGY_FIRST = """
import inspect, sys
import lightning_parallel
assert not {"torch", "lightning"} & set(sys.modules)
import lightning_parallel.strategies.tensor_pipeline as ours
import lightning.pytorch
from lightning.pytorch.strategies import StrategyRegistry
from lightning_parallel.strategies.registry import STRATEGY_NAMES
assert inspect.getsource(lightning.pytorch)
assert isinstance(StrategyRegistry.get("tp_pp"), ours.TensorPipelineStrategy)
assert all(isinstance(StrategyRegistry.get(name), ours.TensorPipelineStrategy) for name in STRATEGY_NAMES)
"""

COMMANDS = BLOCKED_IMPORT.replace("importlib.import_module(sys.argv[1])", "") + (
    "from lightning_parallel.cli import main\n"
    "assert main(['explain', 'bubble', '--json']) == main(['plan', '--params', '7e9', '--json']) == 0\n"
)


@pytest.mark.parametrize("script", [STRATEGY_FIRST, COMMANDS], ids=["a strategy first", "planning only"])
def test_imports(script: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    done = run_python([tmp_path / "script.py"], cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.output


def test_an_action_runs_once_and_the_module_keeps_its_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waited_for.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found: list[int] = []
    when_imported("waited_for", lambda: found.append(sys.modules["waited_for"].value))
    finders = list(sys.meta_path)
    from importlib.util import find_spec

    assert find_spec("waited_for") is not None
    assert (found, sys.meta_path) == ([], finders), "asking for a module is not importing it"
    import waited_for  # type: ignore[import-not-found]

    assert found == [3]
    assert type(waited_for.__loader__).__name__ == type(waited_for.__spec__.loader).__name__ == "SourceFileLoader"
    assert sys.meta_path == finders[1:]
    when_imported("waited_for", lambda: found.append(4))
    assert found == [3, 4]
    monkeypatch.delitem(sys.modules, "waited_for")


def test_a_module_that_fails_is_waited_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_once.py").write_text("raise RuntimeError('not yet')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found: list[str] = []
    when_imported("fails_once", lambda: found.append("ready"))
    with pytest.raises(RuntimeError, match="not yet"):
        __import__("fails_once")
    assert found == []
    (tmp_path / "fails_once.py").write_text("value = 'at last'\n")
    __import__("fails_once")
    assert found == ["ready"]
