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

from scaling_sweep import STEP_TOKENS, along_bottoms, build, check_settings, closest_width, count, main, widths_for
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--spread", "-1"], "argument --spread: -1 is not a positive number"),
        (["--budgets", "nan"], "argument --budgets: nan is not a positive number"),
        (["--budgets", "1e3"], "flops=1000.0 is not within"),
        (["--budgets", "2e8"], "need at least 6 different runs .*; these are 3 runs"),
        (["--factor", "1e30"], "flops=6e.38 is not within"),
        (["--lr", "0"], "argument --lr: 0 is not a positive number"),
        (["--threads", "0"], "argument --threads: 0 is less than 1"),
        (["--bootstraps", "-1"], "argument --bootstraps: -1 is less than 0"),
        (["--val-bytes", "32"], "argument --val-bytes: 32 is less than 33"),
        (["--data", "nowhere"], "No such file or directory: 'nowhere'"),
        (
            ["--data", "little.txt"],
            "needs 528 bytes of text or more, got 5, and 33 of them for validation",
        ),
        (["--out", "little.txt"], "little.txt/sweep.png cannot be written"),
    ],
)
def test_odd_options_are_refused_before_the_first_run(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scaling_sweep.py", *QUICK, *options])
    Path("little.txt").write_text("text\n")
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not Path("scaling_sweep").exists()


def test_a_table_of_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    table = tmp_path / "sweep" / "runs.csv"
    check_settings(table, {"lr": 0.01, "text": "a"})
    check_settings(table, {"lr": 0.02, "text": "a"})  # nothing was run yet
    table.touch()
    check_settings(table, {"lr": 0.02, "text": "a"})
    with pytest.raises(ValueError, match="runs.csv holds runs of another text; name another folder by --out"):
        check_settings(table, {"lr": 0.02, "text": "b"})
    table.with_name("settings.json").unlink()
    with pytest.raises(ValueError, match="holds runs of another lr, text; name"):
        check_settings(table, {"lr": 0.02, "text": "b"})


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
