"""The example under its limit: what keeps Adam's moments in memory dies, what keeps them in files trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import Ranks, run_script
from tests.harness.process import ROOT


@pytest.mark.timeout(260)
def test_only_files_make_room(ranks: Ranks, tmp_path: Path) -> None:
    sizes = ["--layers=32", "--steps=2", "--devices=2", "--limit=200", "--reference="]
    # The comparison itself trains nothing; what it starts are new processes.
    (output,) = ranks(1, run_script, ROOT / "examples" / "finetune_offload.py", sizes, tmp_path, timeout=240)
    assert "2 processes of 200 MB each: 2.0 times less" in output
    assert re.search(r"^zero3 +- +- +out of memory$", output, re.MULTILINE)
    found = re.search(r"^zero3_nvme +(\d+) +[\d.]+ +loss ([\d.]+) -> ([\d.]+)$", output, re.MULTILINE)
    assert found is not None, output
    peak, first, last = (float(value) for value in found.groups())
    assert peak < 200
    assert last < first
    assert list(tmp_path.iterdir()) == [], "optimizer states leave no files"
