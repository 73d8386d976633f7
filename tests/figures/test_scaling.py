"""Figures of scaling laws: what their marks are, in words, which matplotlib keeps as comments of an SVG, and files."""

from __future__ import annotations

from pathlib import Path

from lightning_parallel.cli import main
from lightning_parallel.scaling.isoflop import fit_isoflops
from lightning_parallel.scaling.laws import get_law
from lightning_parallel.scaling.plot import plot_scaling
from lightning_parallel.scaling.runs import Run, append_run

PNG = b"\x89PNG\r\n\x1a\n"


def test_every_mark_has_a_name(tmp_path: Path) -> None:
    law = get_law("besiroglu")
    budgets = (1e18, 1e19)
    pairs = [(c, law.optimal(c).params * factor) for c in budgets for factor in (0.5, 1.0, 2.0)]
    runs = [Run.of(n, c / 6 / n, law.surface(n, c / 6 / n)) for c, n in pairs]
    valleys = fit_isoflops(runs).valleys
    bare = plot_scaling(tmp_path / "bare.svg", law, budgets).read_text()
    full = plot_scaling(tmp_path / "full.svg", law, budgets, runs, valleys).read_text()
    assert "<!-- optima of the law -->" in bare
    assert "<!-- 1e+18 FLOPs -->" in bare
    for name in ("runs", "parabolas through the runs", "bottoms of the parabolas"):
        assert f"<!-- {name} -->" in full
        assert f"<!-- {name} -->" not in bare


def test_files_of_the_command(tmp_path: Path) -> None:
    law = get_law("besiroglu")
    few = ["--starts", "2", "--bootstraps", "2"]
    table, first, second, third = (tmp_path / name for name in ("runs.csv", "laws.png", "deep/runs.png", "fit.png"))
    for flops in (1e15, 1e16, 1e17):
        for factor in (0.4, 0.8, 1.6, 3.2):
            params = factor * law.optimal(flops).params
            append_run(table, Run.of(params, flops / 6 / params, law.surface(params, flops / 6 / params)))
    assert main(["scaling", "plot", "--out", str(first), "--law", "hoffmann-3"]) == 0
    assert main(["scaling", "plot", str(table), "--out", str(second), *few]) == 0
    assert main(["scaling", "fit", str(table), "--flops", "1e18", "--plot", str(third), *few]) == 0
    for file in (first, second, third):
        assert file.read_bytes().startswith(PNG)
    assert first.read_bytes() != second.read_bytes()
