"""What docs/scaling.md prints and tabulates is what the code says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from lightning_parallel.scaling import LAW_NAMES, optimal, verdict

PAGE = Path(__file__).resolve().parents[3] / "docs" / "scaling.md"


def test_examples() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 4
    assert result.failed == 0


def test_table_of_laws() -> None:
    seen = []
    for line in PAGE.read_text().splitlines():
        names = re.findall(r"`([a-z0-9-]+)`", line.split("|")[1]) if line.count("|") == 5 else []
        columns = line.split("|")[2:5]
        for place, name in enumerate(name for name in names if name in LAW_NAMES):
            seen.append(name)
            best = optimal(5.76e23, name)
            cells = [float(column.split(",")[place]) for column in columns]
            assert cells == pytest.approx([best.params, best.tokens, best.tokens_per_param], rel=0.03), name
    assert sorted(seen) == sorted(LAW_NAMES)


def test_table_of_runs() -> None:
    found = 0
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[3] in ("undertrained", "near-optimal", "overtrained"):
            sizes = zip(cells[1].split(","), cells[2].split(","), strict=True)
            for params, tokens in sizes:
                found += 1
                assert verdict(float(params), float(tokens)).verdict == cells[3]
    assert found == 9
