"""The command line: answers as JSON and as text, and errors that are one line."""

from __future__ import annotations

import json

import pytest

from lightning_parallel.cli import main


def test_explain_bubble_prints_the_simulated_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "bubble", "--stages", "2", "--micro-batches", "3"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "stage 0 | F0 F1 .  .  B0 -- F2 B1 -- .  B2 --" in text
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["bubble"] == pytest.approx(1 / 4)
    assert data["bubble_over_ideal"] == pytest.approx(1 / 3)
    assert data["peak_live_micro_batches"] == [2, 1]
    assert all(line in text for line in data["grid"])


def test_wrong_values_end_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "bubble", "--stages", "0"]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("lightning-parallel: error: stages must be a whole number of at least 1")


def test_a_command_is_required() -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
