"""The planning example as a reader runs it: memory decides the layout, and the reports come out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import Ranks, run_script
from tests.harness.process import ROOT

TINY = ["--max-steps=4", "--layers=2", "--width=32", "--context=32", "--batch-size=4", "--max-bytes=20000"]


@pytest.mark.timeout(120)
def test_the_plan_is_run_and_compared(ranks: Ranks, tmp_path: Path) -> None:
    script, arguments = ROOT / "examples" / "plan_and_run.py", [*TINY, "--memory-gib=0.0007"]
    output, _ = ranks(2, run_script, script, arguments, tmp_path, launch="lightning", timeout=100)
    assert "layouts that fit, fastest first" in output
    ran = re.search(r"ran tensor (\d) x pipeline (\d) x data (\d), ZeRO \d", output)
    assert ran is not None, output
    tensor, pipeline, data = map(int, ran.groups())
    assert (tensor * pipeline, data) == (2, 1), "a replica does not fit into so little"
    figures = re.findall(r"([\d.e-]+) / ([\d.e-]+)", output.partition("planned / held")[2])
    assert len(figures) >= 2 * 3 + 2, "two ranks: three kinds of states, and the time of a step"
    assert all(abs(float(planned) / float(held) - 1) < 0.02 for planned, held in figures[:6])
