"""An action waits for an import without changing it, and what only plans starts without torch."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

from lightning_parallel import TensorPipelineStrategy, tensor_parallel
from lightning_parallel.strategies.config import LossConfig, PipelineConfig, TensorParallelConfig
from lightning_parallel.when_imported import when_imported
from tests.architecture.test_floors import BLOCKED_IMPORT
from tests.harness import run_python

COMMANDS = BLOCKED_IMPORT.replace("importlib.import_module(sys.argv[1])", "") + (
    "from lightning_parallel.cli import main\n"
    "assert main(['explain', 'bubble', '--json']) == main(['plan', '--params', '7e9', '--json']) == 0\n"
)


CONTRACT = {
    "tensor_parallel_size": "auto",
    "pipeline_parallel_size": "auto",
    "micro_batches": "auto",
    "schedule": "1f1b",
    "zero_stage": 0,
    "sequence_parallel": False,
    "plan": "auto",
    "blocks": "auto",
    "loss_weight": "samples",
    "non_finite": "ignore",
}
"""The options that users and their files name, in the order in which they may be given."""


def defaults(function: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def test_public_names_and_their_options() -> None:
    assert list(defaults(TensorPipelineStrategy).items())[: len(CONTRACT)] == list(CONTRACT.items())
    loss = {"ignore_index": -100, "label_smoothing": 0.0, "vocab_size": None}
    found = list(defaults(tensor_parallel.vocab_parallel_cross_entropy).items())
    assert [name for name, _ in found[:3]] == ["logits", "target", "group"]
    assert found[3:6] == list(loss.items())
    for layer in ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"):
        assert issubclass(getattr(tensor_parallel, layer), nn.Module)
    for name, sizes in (("tp_pp", ("auto", "auto")), ("tp", ("auto", 1)), ("pp", (1, "auto"))):
        strategy = StrategyRegistry.get(name)
        assert isinstance(strategy, TensorPipelineStrategy)
        assert (strategy.tensor_config, strategy.pipeline_config, strategy.loss_config) == (
            TensorParallelConfig(sizes[0]),
            PipelineConfig(sizes[1]),
            LossConfig(),
        )


def test_what_only_plans_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(COMMANDS)
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
