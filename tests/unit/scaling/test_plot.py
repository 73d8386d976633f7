"""Figures say in words what their marks are; matplotlib keeps the words of an SVG as comments."""

from __future__ import annotations

from pathlib import Path

from lightning_parallel.scaling.isoflop import fit_isoflops
from lightning_parallel.scaling.laws import get_law
from lightning_parallel.scaling.plot import plot_scaling
from lightning_parallel.scaling.runs import Run


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
