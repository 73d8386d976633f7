"""Collectives on small vectors, and the figures that textbooks print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_parallel.cli import main
from lightning_parallel.planner.explain import collectives, ring_all_reduce, split_product, zero_rows
from lightning_parallel.planner.hardware import Cluster, find_gpu


def vectors(ranks: int) -> list[list[float]]:
    return [[10.0 * rank + place for place in range(ranks)] for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "sends"), [(2, 4), (4, 24), (8, 112)])
def test_the_ring_sums_everything_with_the_fewest_bytes(ranks: int, sends: int) -> None:
    ring = ring_all_reduce(vectors(ranks))
    total = tuple(sum(column) for column in zip(*vectors(ranks), strict=True))
    assert ring.result == (total,) * ranks
    assert ring.sends == sends
    assert ring.share == pytest.approx(2 * (ranks - 1) / ranks)


def test_after_reduce_scatter_every_rank_has_one_complete_chunk() -> None:
    ring = ring_all_reduce(vectors(4))
    middle = ring.steps[2]
    assert middle.phase == "reduce-scatter"
    assert middle.complete == ((1,), (2,), (3,), (0,))
    assert ring.steps[-1].complete == ((0, 1, 2, 3),) * 4


def test_a_ring_needs_a_number_per_rank() -> None:
    with pytest.raises(ValueError, match="at least 2 ranks"):
        ring_all_reduce([[1]])
    with pytest.raises(ValueError, match="one number per rank"):
        collectives([[1, 2]])


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    after = collectives(vectors(3))
    gathered = tuple(number for (number,) in after["reduce_scatter"])
    assert after["all_reduce"] == (gathered,) * 3
    assert after["reduce"] == (gathered, *map(tuple, vectors(3)[1:]))
    assert after["scatter"] == ((0.0,), (1.0,), (2.0,))


def test_seven_billion_parameters_over_four_ranks() -> None:
    rows = zero_rows(7e9, 4, Cluster(find_gpu("a100-80gb")))
    assert [row.total / 1e9 for row in rows] == pytest.approx([112, 49, 38.5, 28])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_a_split_product_add_up(ranks: int) -> None:
    assert split_product(ranks).total == (14.0, 9.0)


def test_a_product_of_four_columns_has_no_three_ranks() -> None:
    with pytest.raises(ValueError, match="column count 4 cannot be split"):
        split_product(3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ring", "--ranks", "4"], "24 sends"),
        (["collectives"], "reduce-scatter"),
        (["zero", "--params", "7e9", "--ranks", "4"], "112"),
        (["tensor"], "Y = [14 9]"),
        (["topology"], "tensor inside a node, data across nodes"),
    ],
)
def test_every_topic_answers_in_both_forms(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["explain", *arguments]) == 0
    assert text in capsys.readouterr().out
    assert main(["explain", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_tensor_traffic_pays_for_a_bad_wire(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "topology", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tensor"]["across"] - data["tensor"]["inside"] > 10 * (data["data"]["across"] - data["data"]["inside"])


def test_a_drawing_needs_the_name_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "bubble", "--plot", str(tmp_path / "grid.txt")]) == 2
    assert "ends in .png or .svg" in capsys.readouterr().err
