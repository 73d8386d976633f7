"""Fits of laws to runs that follow a known one."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lightning_parallel.scaling import ParametricLoss, get_law, optimal
from lightning_parallel.scaling.fit import FitOptions, fit_law, huber_objective
from lightning_parallel.scaling.isoflop import budgets_of, fit_isoflops
from lightning_parallel.scaling.runs import Run, append_run, drop_worst, read_runs

TRUTH = ParametricLoss(1.82, 482.01, 2085.43, 0.3478, 0.3658)
QUICK = FitOptions(starts=3, bootstraps=0)


def sweep(budgets: int = 5, sizes: int = 6, noise: float = 0.0, digits: int = 12) -> list[Run]:
    """An isoFLOP sweep over the budgets of Hoffmann et al.; noise in the log loss, as if read off a figure."""
    generator = np.random.default_rng(3)
    runs = []
    for flops in np.geomspace(6e18, 3e21, budgets):
        for params in np.geomspace(0.2, 5, sizes) * optimal(float(flops)).params:
            tokens = float(flops / 6 / params)
            loss = TRUTH(params, tokens) * math.exp(noise * generator.standard_normal())
            runs.append(Run.of(float(params), tokens, round(loss, digits)))
    return runs


def test_exact_runs_give_their_constants_back() -> None:
    fit = fit_law(sweep(), QUICK)
    for name in ("E", "A", "B", "alpha", "beta"):
        assert getattr(fit.surface, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name
    assert fit.objective < 1e-20
    assert fit.law().optimal(5.76e23).params == pytest.approx(optimal(5.76e23).params, rel=1e-6)


def test_runs_read_off_a_figure_give_predictions_and_optima_back() -> None:
    """240 points of two digits and 0.5% noise, as the published refit had: A and B may move, what they predict not."""
    runs = sweep(budgets=10, sizes=24, noise=0.005, digits=2)
    fit = fit_law(runs, FitOptions(starts=2, bootstraps=15))
    assert fit.runs == 240
    assert fit.objective <= huber_objective(TRUTH, runs)
    assert fit.objective == pytest.approx(huber_objective(fit.surface, runs), rel=1e-9)
    for run in runs[::20]:
        assert fit.surface(run.params, run.tokens) == pytest.approx(TRUTH(run.params, run.tokens), abs=0.01)
    for flops in (1e20, 5.76e23):
        best = fit.law().optimal(flops)
        assert best.params == pytest.approx(optimal(flops).params, rel=0.12)
        assert best.loss == pytest.approx(optimal(flops).loss, abs=0.02)
    low, high = fit.interval(lambda law: law(1e9, 2e10), level=0.95) or (0, 0)
    assert low < TRUTH(1e9, 2e10) < high < low + 0.02
    assert fit.law().exponent_interval == fit.interval(lambda law: law.exponent)


def test_same_runs_same_answer() -> None:
    runs = sweep(budgets=3, sizes=4, noise=0.002)
    options = FitOptions(starts=2, bootstraps=3)
    assert fit_law(runs, options) == fit_law(runs, options)


def test_runs_that_diverged_hardly_count() -> None:
    runs = sweep()
    spoilt = [
        Run.of(run.params, run.tokens, run.loss * (1.5 if index in (4, 17) else 1)) for index, run in enumerate(runs)
    ]
    robust = fit_law(spoilt, QUICK).surface
    for run in runs[::7]:
        assert robust(run.params, run.tokens) == pytest.approx(run.loss, rel=2e-3)
    # Least squares would move the same predictions by percents.
    smooth = fit_law(spoilt, FitOptions(starts=3, bootstraps=0, delta=10.0)).surface
    assert max(abs(smooth(run.params, run.tokens) / run.loss - 1) for run in runs) > 0.02


def test_objective_is_a_sum_of_huber_losses() -> None:
    flat = ParametricLoss(math.e, 1e-12, 1e-12, 1.0, 1.0)
    small, large = Run.of(1e9, 1e9, math.exp(1 + 5e-4)), Run.of(1e9, 1e9, math.exp(1 - 0.1))
    expected = 0.5 * 5e-4**2 + 1e-3 * (0.1 - 0.5e-3)
    assert huber_objective(flat, [small, large]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (sweep()[:5], "need at least 6 different runs .*; these are 5 runs"),
        ([Run.of(1e8, 1e9 * k, 3.0 + 1 / k) for k in range(1, 9)], "at least 3 .*; these are 8 runs with 1 and 8"),
        ([Run.of(n, 20 * n, TRUTH(n, 20 * n)) for n in np.geomspace(1e7, 1e9, 8)], "lie on one line of log parameters"),
        (sweep(budgets=1, sizes=8), "all 8 runs lie on one line"),
        (
            [Run.of(r.params, r.tokens, TRUTH(1e9, r.tokens)) for r in sweep()],
            "do not show how the loss falls with",
        ),
    ],
)
def test_runs_that_do_not_determine_a_law_are_refused(runs: list[Run], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_law(runs, QUICK)


def test_options_are_checked() -> None:
    for wrong in ({"starts": 0}, {"bootstraps": -1}, {"delta": 0.0}):
        with pytest.raises(ValueError, match="use for example 40, 200 and 1e-3"):
            FitOptions(**wrong)  # type: ignore[arg-type]


def test_parabolas_through_budgets() -> None:
    fit = fit_isoflops(sweep(budgets=6, sizes=9))
    truth = get_law("besiroglu")
    assert fit.exponent == pytest.approx(truth.exponent, abs=0.01)
    for valley in fit.valleys:
        best = truth.optimal(valley.flops)
        # The valley of this law is not quite a parabola.
        assert valley.params == pytest.approx(best.params, rel=0.12)
        assert valley.loss == pytest.approx(best.loss, rel=0.02)
        assert 6 * valley.params * valley.tokens == pytest.approx(valley.flops)
        assert valley.parabola(valley.params) == pytest.approx(valley.loss)
        assert valley.parabola(2 * valley.params) == pytest.approx(
            np.polyval(valley.coefficients, math.log10(2 * valley.params))
        )
        assert valley.inside
        assert len(valley.runs) == 9
    assert fit.law().optimal(5.76e23).params == pytest.approx(truth.optimal(5.76e23).params, rel=0.25)
    assert fit.law().optimal(1e21).loss_law == "besiroglu"


def test_a_valley_beyond_the_sizes_is_marked() -> None:
    runs = [run for run in sweep(budgets=2, sizes=12) if run.params < 0.8 * optimal(run.flops).params]
    assert [valley.inside for valley in fit_isoflops(runs).valleys] == [False, False]


def test_sweeps_without_valleys_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 budgets with at least 3 sizes each; these 6 runs have 1 such"):
        fit_isoflops(sweep(budgets=1))
    hill = [Run.of(r.params, r.tokens, 3 - 0.1 * math.log(r.params / optimal(r.flops).params) ** 2) for r in sweep(2)]
    with pytest.raises(ValueError, match="have no lowest point between .*; add smaller and larger models"):
        fit_isoflops(hill)


@pytest.mark.parametrize("bend", [0.0, 1e-9, 1e-3])
def test_losses_that_only_fall_with_size_have_no_valley(bend: float) -> None:
    """Their parabola is a line but for rounding, with its bottom a hundred decades away or more."""
    losses = [3.0, 2.9, 2.8, 2.7 + bend]
    sizes = [[factor * flops**0.5 for factor in (1, 3, 10, 30)] for flops in (1e15, 1e16)]
    runs = [
        Run.of(params, flops / 6 / params, loss)
        for flops, row in zip((1e15, 1e16), sizes, strict=True)
        for params, loss in zip(row, losses, strict=True)
    ]
    with pytest.raises(ValueError, match=r"no lowest point between 3.16e\+07 and 9.49e\+08 parameters"):
        fit_isoflops(runs)


def test_runs_that_do_not_show_a_floor_have_none() -> None:
    """What is left of the loss is known then, and an interval that might have a floor."""
    flat = ParametricLoss(0.0, 40.0, 50.0, 0.3, 0.3)
    runs = [Run.of(n, d, round(flat(n, d), 3)) for n in (1e3, 1e4, 1e5) for d in (1e5, 1e6, 1e7)]
    fit = fit_law(runs, FitOptions(starts=2, bootstraps=3))
    assert not fit.has_floor
    assert fit.deviation < 1e-3
    assert fit.surface(1e4, 1e6) == pytest.approx(flat(1e4, 1e6), rel=1e-3)
    assert fit_law(sweep(), QUICK).has_floor


def test_budgets_of_runs_are_those_of_the_sweep() -> None:
    runs = sweep(budgets=3, sizes=5)
    assert budgets_of(runs) == pytest.approx(sorted({float(f"{run.flops:.6g}") for run in runs}), rel=1e-4)
    many = [Run.of(1e6, 1e6 * 3**k, 3.0) for k in range(20)]
    shown = budgets_of(many)
    assert len(shown) == 8
    assert (shown[0], shown[-1]) == pytest.approx((many[0].flops, many[-1].flops))
    # FLOPs that were counted otherwise than 6ND do not change the tokens of an optimum.
    twice = [Run(run.params, run.tokens, run.loss, 2 * run.flops) for run in runs]
    for one, other in zip(fit_isoflops(runs).valleys, fit_isoflops(twice).valleys, strict=True):
        assert (other.params, other.tokens) == pytest.approx((one.params, one.tokens))
        assert other.flops == pytest.approx(2 * one.flops)


def test_tables_of_other_programs(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    rows = "params,tokens,loss\r\n1e9,2e10,2.5\r\n"
    file.write_bytes(b"\xef\xbb\xbf" + rows.encode())
    assert read_runs(file).runs == (Run.of(1e9, 2e10, 2.5),)
    for encoded, message in (
        (rows.encode("utf-16"), "runs.csv is no text in UTF-8 .*; save it as CSV in UTF-8"),
        (rows.replace(",", ";").encode(), "has the columns params;tokens;loss; .* separated by commas"),
        (rows.encode() + b'"' + b"1" * 200_000, "runs.csv is no CSV: field larger than"),
    ):
        file.write_bytes(encoded)
        with pytest.raises(ValueError, match=message):
            read_runs(file)


def test_tables_are_read_with_their_own_names(tmp_path: Path) -> None:
    file = tmp_path / "points.csv"
    file.write_text("x,Model Size,Training FLOP,loss\n1,1e9,1.2e20,2.5\n2,2e9,,2.4\n3,nan,1e20,2.3\n")
    table = read_runs(file)
    assert table.runs == (Run(1e9, 2e10, 2.5, 1.2e20),)
    assert table.skipped == 2
    file.write_text("N,D,loss\n1e9,2e10,2.5\n")
    assert read_runs(file).runs == (Run.of(1e9, 2e10, 2.5),)
    file.write_text("N,D,loss\n1e9,2e10,2.5\n-1,2e10,2.5\n")
    with pytest.raises(ValueError, match=r"points.csv, line 3: params=-1.0 of a run is not a positive number"):
        read_runs(file)
    file.write_text("N,perplexity\n1,2\n")
    with pytest.raises(ValueError, match="has the columns N, perplexity; needed are params, loss, and tokens or flops"):
        read_runs(file)
    file.write_text("")
    with pytest.raises(ValueError, match="has the columns none"):
        read_runs(file)


def test_rows_are_appended_exactly(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "runs.csv"
    runs = sweep(budgets=2, sizes=3)
    for run in runs:
        append_run(file, run)
    assert file.read_text().splitlines()[0] == "params,tokens,flops,loss"
    assert read_runs(file).runs == tuple(runs)


def test_worst_runs_can_be_left_out() -> None:
    runs = sweep(budgets=2, sizes=3)
    kept = drop_worst(runs, 2)
    assert sorted(run.loss for run in kept) == sorted(run.loss for run in runs)[:4]
    assert [run for run in runs if run in kept] == list(kept)
    assert drop_worst(runs, 0) == tuple(runs)
    with pytest.raises(ValueError, match=r"cannot leave out the 6 worst of 6 runs; use 0 .. 5"):
        drop_worst(runs, 6)


def test_many_writers_of_one_table_lose_no_row(tmp_path: Path) -> None:
    file = tmp_path / "new" / "runs.csv"
    runs = [Run.of(1e6 + index, 1e7, 3.0) for index in range(200)]
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda run: append_run(file, run), runs))
    assert set(read_runs(file).runs) == set(runs)
    # Two that made the file at one time, and one that was interrupted before its line ended.
    file.write_text("params,tokens,flops,loss\nparams,tokens,flops,loss\n1.0,2.0,12.0,3.0")
    append_run(file, runs[0])
    assert read_runs(file).runs == (Run.of(1.0, 2.0, 3.0), runs[0])
