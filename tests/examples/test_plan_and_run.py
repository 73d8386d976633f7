"""The planning example as a reader runs it: memory decides the layout, and the reports come out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import run_python
from tests.harness.process import ROOT

TINY = ["--max-steps=4", "--layers=2", "--width=32", "--context=32", "--batch-size=4", "--max-bytes=20000"]


@pytest.mark.timeout(120)
def test_the_plan_is_run_and_compared(tmp_path: Path) -> None:
    done = run_python([ROOT / "examples" / "plan_and_run.py", *TINY, "--memory-gib=0.0007"], cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.output
    assert "layouts that fit, fastest first" in done.output
    ran = re.search(r"ran tensor (\d) x pipeline (\d) x data (\d), ZeRO \d", done.output)
    assert ran is not None, done.output
    tensor, pipeline, data = map(int, ran.groups())
    assert (tensor * pipeline, data) == (2, 1), "a replica does not fit into so little"
    figures = re.findall(r"([\d.e-]+) / ([\d.e-]+)", done.output.partition("planned / held")[2])
    assert len(figures) >= 2 * 3 + 2, "two ranks: three kinds of states, and the time of a step"
    assert all(abs(float(planned) / float(held) - 1) < 0.02 for planned, held in figures[:6])
