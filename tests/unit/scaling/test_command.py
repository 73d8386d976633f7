"""``lightning-parallel scaling``: JSON keys, texts and errors of one line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_parallel.cli import main
from lightning_parallel.scaling import LAW_NAMES, Law, ParametricLoss, optimal, verdict
from lightning_parallel.scaling.runs import Run, append_run

TRUTH = ParametricLoss(1.0, 400.0, 900.0, 0.4, 0.45)
FEW = ["--starts", "2", "--bootstraps", "2"]


@pytest.fixture
def run_table(tmp_path: Path) -> Path:
    """Exact runs of a known law: three budgets, four sizes."""
    file = tmp_path / "runs.csv"
    for flops in (1e15, 1e16, 1e17):
        best = TRUTH.coefficient * flops**TRUTH.exponent
        for factor in (0.4, 0.8, 1.6, 3.2):
            params = factor * best
            append_run(file, Run.of(params, flops / 6 / params, TRUTH(params, flops / 6 / params)))
    return file


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Any:
    def answer(*arguments: str) -> Any:
        assert main(["scaling", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return answer


@pytest.mark.parametrize("law", LAW_NAMES)
def test_optimal(ask: Any, law: str) -> None:
    data = ask("optimal", "--flops", "5.6e21", "--law", law)
    best = optimal(5.6e21, law)
    assert (data["params"], data["tokens"], data["loss"], data["law"]) == (best.params, best.tokens, best.loss, law)
    assert 6 * data["params"] * data["tokens"] == pytest.approx(5.6e21, rel=1e-9)
    assert data["all_laws"]["params"][0] <= data["params"] <= data["all_laws"]["params"][1]
    assert data["source"]


def test_optimal_names_its_default_and_takes_more_questions(ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["optimal", "--flops", "1e22", "--unique-tokens", "25e9", "--inference-tokens", "1e12"]
    data = ask(*asked)
    assert data["law"] == "besiroglu"
    assert data["data_limited"]["epochs"] > 4
    assert data["lifetime"]["params"] < data["params"]
    assert main(["scaling", *asked]) == 0
    text = capsys.readouterr().out
    for part in ("'besiroglu'", "Besiroglu et al. 2024", f"{data['params']:.4g}", "80% interval", "epochs"):
        assert part in text
    assert ask("optimal", "--loss", str(data["loss"]))["flops"] == pytest.approx(1e22)


def test_verdict(ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    data = ask("verdict", "--params", "175e9", "--tokens", "300e9")
    assert data["verdict"] == "undertrained"
    found = verdict(175e9, 300e9)
    assert data["ratio"] == found.ratio
    assert (data["optimal"]["params"], data["optimal"]["tokens"]) == (found.optimal.params, found.optimal.tokens)
    assert ask("verdict", "--params", "7e9", "--tokens", "1e12", "--law", "twenty")["verdict"] == "overtrained"
    assert main(["scaling", "verdict", "--params", "70e9", "--tokens", "1.4e12"]) == 0
    assert capsys.readouterr().out.startswith("near-optimal: 20 tokens per parameter")


def test_table(ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ask("table")["budgets"]
    assert [row[0]["flops"] for row in rows] == [1e20, 5.6e21, 3.6e23, 2e25]
    assert [cell["law"] for cell in rows[0]] == list(LAW_NAMES)
    assert main(["scaling", "table"]) == 0
    out = capsys.readouterr().out
    assert "by FLOPs" in out
    assert "5.6e+21" in out


def test_fit(ask: Any, run_table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ask("fit", str(run_table), "--flops", "1e18", *FEW)
    assert data["E"] == pytest.approx(1.0, rel=1e-5)
    assert data["alpha"] == pytest.approx(0.4, rel=1e-5)
    assert data["exponent"] == pytest.approx(0.45 / 0.85, rel=1e-5)
    assert (data["runs"], data["skipped_rows"]) == (12, 0)
    assert data["optimal"]["params"] == pytest.approx(TRUTH.coefficient * 1e18**TRUTH.exponent, rel=1e-4)
    low, high = data["intervals"]["E"]
    assert low <= high
    assert [valley["flops"] for valley in data["isoflop"]["valleys"]] == pytest.approx([1e15, 1e16, 1e17])
    assert data["isoflop"]["exponent"] == pytest.approx(0.45 / 0.85, abs=0.03)
    assert main(["scaling", "fit", str(run_table), "--drop-worst", "1", *FEW]) == 0
    text = capsys.readouterr().out
    assert "through 11 runs" in text
    assert "the fit misses the losses by 0.00%" in text


def test_a_sweep_without_valleys_is_drawn_by_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes far above the optimum: no bottom to be seen, but the budgets are still those of the runs."""
    file, drawn = tmp_path / "runs.csv", []

    def draw(path: str, law: Law, budgets: list[float], runs: Any, valleys: Any) -> str:
        drawn.append(budgets)
        return path

    monkeypatch.setattr("lightning_parallel.scaling.plot.plot_scaling", draw)
    for flops in (1e15, 1e16, 1e17):
        for factor, bend in ((10, 0.0), (20, 0.05), (40, 0.0)):
            params = factor * TRUTH.coefficient * flops**TRUTH.exponent
            tokens = flops / 6 / params
            append_run(file, Run.of(params, tokens, TRUTH(params, tokens) * (1 + bend)))
    assert main(["scaling", "fit", str(file), "--plot", str(tmp_path / "fit.png"), *FEW]) == 0
    assert "no parabolas: the losses at 1e+15 FLOPs have no lowest point" in capsys.readouterr().out
    assert drawn == [pytest.approx([1e15, 1e16, 1e17])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimal", "--flops", "-1"], "flops=-1.0 is not within"),
        (["optimal", "--flops", "1e99"], r"flops=1e\+99 is not within"),
        (["optimal", "--flops", "nan"], "flops=nan is not within"),
        (["optimal", "--flops", "1e400"], "flops=inf is not within"),
        (["optimal", "--flops", "1e20", "--unique-tokens", "inf"], "unique_tokens=inf is not within"),
        (["optimal", "--flops", "1e20", "--inference-tokens", "nan"], "inference_tokens=nan is not within"),
        (["verdict", "--params", "1e9", "--tokens", "-1"], "tokens=-1.0 is not within"),
        (["plot", "--budgets", "nan"], "budgets=nan is not within"),
        (["fit", "empty.csv"], "empty.csv has the columns none; needed are params, loss"),
        (["fit", "header.csv"], "these are 0 runs with 0 and 0"),
        (
            ["fit", "copies.csv"],
            "need at least 6 different runs .* 9 runs, 3 of them different, with 3 and 3",
        ),
        (["fit", "endless.csv"], "endless.csv, line 2: params=inf of a run is not a positive number"),
        (["fit", "few.csv", "--starts", "0"], "starts=0, bootstraps=200 and delta=0.001 must be at least 1"),
        (["fit", "few.csv", "--drop-worst", "1"], "cannot leave out the 1 worst of 1 runs"),
        (["optimal", "--loss", "0.5"], "loss=0.5 is not reached"),
        (["verdict", "--params", "0", "--tokens", "1"], "params=0.0 is not within"),
        (["fit", "missing.csv"], "there is no file missing.csv"),
        (["fit", "few.csv"], "need at least 6 different runs"),
        (["plot", "few.csv", "--law", "sqrt"], "leave out --law and --budgets"),
        (["plot", "--drop-worst", "1"], "are for the fit to a TABLE of runs; name one"),
        # Refused before a fit that may take a minute, not after it.
        (["fit", "few.csv", "--plot", "figure.xyz"], "'figure.xyz' does not end like an image"),
        (["fit", "few.csv", "--plot", "few.csv/a.png"], "few.csv/a.png cannot be written: check who may write to"),
        (["fit", "few.csv", "--flops", "-1"], "flops=-1.0 is not within"),
        (["plot", "--out", "figure.xyz"], "'figure.xyz' does not end like an image; use for example 'scaling.png'"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    append_run("few.csv", Run.of(1e6, 1e7, 3.0))
    Path("empty.csv").touch()
    Path("header.csv").write_text("params,tokens,loss\n")
    Path("endless.csv").write_text("params,tokens,loss\n1e400,1e7,3\n")
    for size in (1e6, 3e6, 1e7) * 3:
        append_run("copies.csv", Run.of(size, 2 * size, 3.0))
    assert main(["scaling", *arguments]) == 2
    streams = capsys.readouterr()
    assert re.search(message, streams.err)
    assert len(streams.err.splitlines()) == 1
    assert streams.out == ""


@pytest.mark.parametrize(
    ("package", "module", "extra"), [("scipy", "scipy", "scaling"), ("matplotlib", "matplotlib.figure", "plots")]
)
def test_a_missing_package_is_named(
    package: str,
    module: str,
    extra: str,
    run_table: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    question = ["fit", str(run_table), *FEW] if package == "scipy" else ["plot"]
    assert main(["scaling", *question]) == 2
    assert f"{package}: pip install 'lightning-parallel[{extra}]'" in capsys.readouterr().err
