"""Schedules drawn by ``lightning-parallel explain bubble``."""

from __future__ import annotations

from pathlib import Path

from lightning_parallel.cli import main


def test_a_schedule_can_be_drawn(tmp_path: Path) -> None:
    assert (
        main(["explain", "bubble", "--stages", "2", "--micro-batches", "2", "--plot", str(tmp_path / "grid.svg")]) == 0
    )
    drawing = (tmp_path / "grid.svg").read_text()
    assert drawing.count("stage") >= 2
    assert "</svg>" in drawing
