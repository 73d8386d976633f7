"""The doctor of a launch: ranks tell each other what they have, one of them prints, and all end alike."""

from __future__ import annotations

import contextlib
import io
import json
import os
from typing import Any

import pytest

from lightning_parallel.cli import main
from lightning_parallel.commands import doctor
from lightning_parallel.commands.agreement import rank_problems
from tests.harness import Ranks

ALIKE: dict[str, Any] = {"host": "a", "devices": 8, "device": "H100, 79 GiB", "versions": {"torch": "2.13.0"}}


def looked_at(rank: int, world_size: int) -> Any:
    """The doctor's answers when all is well, and when the other rank stays away.

    Both ranks try in vain, each at a port of its own: torch counts the attempt, and would name the next group by it.
    """
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = main(["doctor", "--json"])
    with contextlib.redirect_stderr(io.StringIO()) as alone:
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1 + rank)
        assert main(["doctor", "--wait", "1"]) == 2
    return status, printed.getvalue(), alone.getvalue()


def test_ranks_tell_each_other(ranks: Ranks) -> None:
    (status, printed, alone), (other, nothing, _) = ranks(2, looked_at, launch="lightning")
    assert (status, other, nothing) == (0, 0, "")
    data = json.loads(printed)
    assert [facts["rank"] for facts in data["ranks"]] == [facts["local_rank"] for facts in data["ranks"]] == [0, 1]
    assert data["problems"] == []
    assert "error: not all 2 ranks met at" in alone
    assert "within 1 s: start every one of them" in alone


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"device": "A100, 79 GiB"}, "ranks differ in device (H100, 79 GiB on rank 0; A100, 79 GiB on rank 1)"),
        ({"versions": {"torch": "2.12.0"}}, "ranks differ in torch (2.13.0 on rank 0; 2.12.0 on rank 1)"),
        ({"versions": {}}, "not installed on rank 1"),
        ({"local_rank": 0}, "ranks 0 and 1 have LOCAL_RANK=0 on a"),
        ({"local_rank": 8}, "rank 1 is number 8 of a, which has 8 devices: start at most 8 processes there"),
    ],
)
def test_ranks_that_do_not_fit_together(changes: dict[str, Any], text: str) -> None:
    ranks = [{**ALIKE, "rank": 0, "local_rank": 0}, {**ALIKE, "rank": 1, "local_rank": 1, **changes}]
    (problem,) = rank_problems(ranks)
    assert text in problem


def test_nodes_of_different_sizes() -> None:
    ranks = [{**ALIKE, "rank": n, "local_rank": n % 2, "host": "ab"[n // 2]} for n in range(3)]
    (problem,) = rank_problems(ranks)
    assert "nodes have different numbers of ranks (a: 2, b: 1)" in problem


class Installed:
    """What the doctor asks an installed package for."""

    def __init__(self, name: str, *requires: str) -> None:
        self.name, self.requires = name, requires or None


def test_packages_built_on_the_other_lightning_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Installed("lightning", "torch>=2", "pytorch-lightning"),
        Installed("forecasts", "PyTorch_Lightning (>=2.0)"),
        Installed("plots", "pytorch-lightning>=2; extra == 'examples'"),
        Installed("bolts", "pytorch-lightning-bolts"),
        Installed("bare"),
    ]
    monkeypatch.setattr(doctor, "distributions", lambda: found)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name)
    (note,) = doctor._notes()
    assert "write `import lightning.pytorch as pl` for `import pytorch_lightning as pl`" in note
    assert note.endswith("Packages here that are built on pytorch_lightning: forecasts")
    found[1:2] = []
    (note,) = doctor._notes()
    assert "Packages here" not in note
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor._notes() == []


def test_only_the_other_lightning_is_told_from_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "lightning" else name)
    assert main(["doctor"]) == 2
    assert "lightning is not installed; pytorch_lightning, which is, is another package: " in capsys.readouterr().err
