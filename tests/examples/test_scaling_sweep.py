"""The sweep runs from start to end on a little text: runs, fit, prediction, the predicted run and its figure."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from lightning_parallel.scaling.isoflop import Valley
from lightning_parallel.scaling.runs import read_runs
from tests.harness import Ranks, run_script
from tests.harness.process import ROOT

# The examples are scripts beside the package, not part of it.
sys.path.insert(0, str(ROOT / "examples"))

from scaling_sweep import STEP_TOKENS, along_bottoms, build, closest_width, count, widths_for
from train_gpt import GPT

BUDGETS = (2e8, 6e8)
QUICK = ["--budgets", *map(str, BUDGETS), "--spread", "1.4", "3.4", "8.5", "--factor", "2", "--val-bytes", "2049"]


def test_sizes_are_those_of_the_models() -> None:
    for width in (4, 16):
        model = GPT(layers=2, heads=2, width=width, context=32, tie_head=True)
        assert count(width) == sum(p.numel() for p in model.parameters())
        assert closest_width(count(width) * 1.01) == width
    widths = widths_for(1e11, (0.25, 1.0, 4.0))
    assert [count(width) * 4 / count(widths[1]) for width in widths] == pytest.approx([1, 4, 16], rel=0.2)


def test_wider_models_start_and_step_smaller() -> None:
    torch.manual_seed(0)
    narrow, wide = build(8, 0.01), build(32, 0.01)
    assert narrow.hparams["lr"] == pytest.approx(2 * wide.hparams["lr"])
    for one, other in zip(narrow.parameters(), wide.parameters(), strict=True):
        if one.dim() == 2:
            assert (one.std() / other.std()).item() == pytest.approx(2, rel=0.15)


def test_bottoms_are_continued_as_a_power_law() -> None:
    losses = {flops: 4 * flops**-0.1 for flops in (1e3, 1e4, 1e5)}
    valleys = [Valley(flops, 1.0, 1.0, loss, (1.0, 0.0, loss), True, ()) for flops, loss in losses.items()]
    assert along_bottoms(valleys, 1e7) == pytest.approx(4 * 1e7**-0.1)


@pytest.mark.timeout(200)
def test_sweep_from_start_to_end(ranks: Ranks, tmp_path: Path) -> None:
    script, arguments = ROOT / "examples" / "scaling_sweep.py", [*QUICK, "--bootstraps", "5"]
    (output,) = ranks(1, run_script, script, arguments, tmp_path, launch="lightning", timeout=180)
    runs = read_runs(tmp_path / "scaling_sweep" / "runs.csv").runs
    assert len(runs) == 7
    for run in runs[:-1]:
        assert run.tokens % STEP_TOKENS == 0
        assert min(abs(run.flops / budget - 1) for budget in BUDGETS) < 0.2
        assert 1 < run.loss < 5.6
    assert runs[-1].flops == pytest.approx(2 * BUDGETS[-1], rel=0.1)
    found = re.findall(r"predicted by the (\w+)[^\d]+(\d\.\d+)[^\d]+\d\.\d+[^\d+-]+([+-]\d\.\d+)", output)
    parabolas = [] if "no parabolas" in output else ["valleys"]
    assert [name for name, _, _ in found] == ["surface", *parabolas], output
    for _, predicted, difference in found:
        assert float(difference) == pytest.approx(runs[-1].loss - float(predicted), abs=2e-4)
    assert (tmp_path / "scaling_sweep" / "sweep.png").read_bytes().startswith(b"\x89PNG")
