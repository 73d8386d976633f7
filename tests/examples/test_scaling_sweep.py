"""The sweep runs from start to end on a little text: runs, fit, prediction, the predicted run and its figure."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightning_parallel.scaling.runs import read_runs
from tests.harness import Ranks, run_script
from tests.harness.process import ROOT

# The examples are scripts beside the package, not part of it.
sys.path.insert(0, str(ROOT / "examples"))

from scaling_sweep import STEP_TOKENS, closest_width, count, widths_for
from train_gpt import GPT

QUICK = ["--budgets", "4e8", "1.2e9", "--spread", "0.9", "2.4", "6", "--factor", "2", "--val-bytes", "2049"]


def test_sizes_are_those_of_the_models() -> None:
    for width in (4, 16):
        model = GPT(layers=2, heads=width // 4, width=width, context=64, tie_head=True)
        assert count(width) == sum(p.numel() for p in model.parameters())
        assert closest_width(count(width) * 1.01) == width
    widths = widths_for(1e10, (0.25, 1.0, 4.0))
    assert [count(width) * 4 / count(widths[1]) for width in widths] == pytest.approx([1, 4, 16], rel=0.2)


@pytest.mark.timeout(200)
def test_sweep_from_start_to_end(ranks: Ranks, tmp_path: Path) -> None:
    script, arguments = ROOT / "examples" / "scaling_sweep.py", [*QUICK, "--bootstraps", "5", "--lr", "2e-3"]
    (output,) = ranks(1, run_script, script, arguments, tmp_path, launch="lightning", timeout=180)
    runs = read_runs(tmp_path / "scaling_sweep" / "runs.csv").runs
    assert len(runs) >= 7
    for run in runs[:-1]:
        assert run.tokens % STEP_TOKENS == 0
        assert min(abs(run.flops / budget - 1) for budget in (4e8, 1.2e9)) < 0.2
        assert 1 < run.loss < 5.6
    assert runs[-1].flops == pytest.approx(2.4e9, rel=0.1)
    observed, predicted = runs[-1].loss, re.search(r"predicted[^\d]+[\d,]+[^\d]+[\d,]+[^\d]+(\d\.\d+)", output)
    assert predicted is not None, output
    (difference,) = re.findall(r"observed - predicted: ([+-]\d\.\d+)", output)
    assert float(difference) == pytest.approx(observed - float(predicted[1]), abs=2e-4)
    assert (tmp_path / "scaling_sweep" / "sweep.png").read_bytes().startswith(b"\x89PNG")
