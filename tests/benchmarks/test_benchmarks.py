"""The comparison itself runs: jobs take turns and every number is there. Nothing depends on how fast they are."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.benchmarks import run
from tests.benchmarks.heats import HEATS, OUR_LAYERS, OUR_TENSOR, Heat, Target
from tests.benchmarks.referee import Result


@pytest.mark.timeout(180)
def test_two_steps_of_a_small_heat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(OUR_TENSOR.name, OUR_LAYERS.name, "overhead", {})
    monkeypatch.setitem(HEATS, "small", Heat("small", (OUR_LAYERS, OUR_TENSOR), (target,)))
    out = tmp_path / "benchmarks.json"
    arguments = ["--only", "small", "--configs", "tiny", "--steps", "2", "--warmup", "1", "--out", str(out)]
    (record,) = run.main(arguments)
    assert record == json.loads(out.read_text())[0]
    assert [job["error"] for job in record["jobs"].values()] == [None, None]
    ours, plain = (record["jobs"][job.name] for job in (OUR_TENSOR, OUR_LAYERS))
    assert [len(job["seconds"]) for job in (ours, plain)] == [2, 2]
    assert [len(job["cpu_seconds"]) for job in (ours, plain)] == [2, 2]
    assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    assert len(ours["losses"]) == 3
    (comparison,) = record["comparisons"]
    assert math.isfinite(comparison["median"])
    assert math.isfinite(comparison["minimum"])


def test_measures() -> None:
    results = {"a": Result([1.0, 2.0, 1.0], [2.0, 2.0, 4.0]), "b": Result([1.5, 3.0, 1.5], [4.0, 4.0, 4.0])}
    assert Target("a", "b", "faster", {}).by_median(results) == 1.5
    assert Target("a", "b", "cpu", {}).by_median(results) == 0.5
    assert Target("a", "b", "overhead", {}).by_minimum(results) == pytest.approx(-1 / 3)
    assert Target("a", "b", "bubble", {}).by_minimum(results) == pytest.approx(0.25)
    assert Target("a", "b", "at best", {}).by_median(results) == pytest.approx(1.5 * 2 * 8 / 9)
    faster, bubble = Target("a", "b", "faster", {"mid": 1.25}), Target("a", "b", "bubble", {"mid": 0.2})
    assert faster.holds(1.5, "mid") is True
    assert faster.holds(1.2, "mid") is False
    assert bubble.holds(0.25, "mid") is False
    assert bubble.holds(0.25, "tiny") is None
