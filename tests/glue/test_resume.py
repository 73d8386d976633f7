"""Resuming: a run continued on any layout is the run that was interrupted on any other, plain ones included.

Reference: a plain Trainer (1e-5); for the same layout, the uninterrupted run, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.glue.checkpointing import KINDS, TiedGPT, assert_same_file, on_layout, train
from tests.glue.oracle import PAIRS, Layout, Site, assert_same
from tests.harness import Ranks

PLAIN = None
TWO: list[Layout | None] = [PLAIN, *PAIRS]


class Runs:
    """Every layout's uninterrupted run and its checkpoints, made when first asked for."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self._done: dict[str, list[Any]] = {}

    def name(self, layout: Layout | None) -> str:
        return "plain" if layout is None else "x".join(map(str, layout))

    def result(self, layout: Layout | None, optimizer: str = "adamw", dropout: bool = False) -> list[Any]:
        """What every rank of the uninterrupted run showed."""
        key = f"{self.name(layout)}-{optimizer}-{dropout}"
        if key not in self._done:
            folder = self.files(layout, optimizer, dropout)
            folder.mkdir()
            self._done[key] = on_layout(self.ranks, layout, uninterrupted, folder, optimizer, dropout)
        return self._done[key]

    def files(self, layout: Layout | None, optimizer: str = "adamw", dropout: bool = False) -> Path:
        """The folder with its checkpoints."""
        return self.folder / f"{self.name(layout)}-{optimizer}-{dropout}"

    def resumed(
        self, layout: Layout | None, sources: list[Path], optimizer: str = "adamw", dropout: bool = False
    ) -> list[tuple[list[Any], Path]]:
        """For each source: what every rank of the continued run showed, and its last checkpoint."""
        targets = [self.folder / f"{self.name(layout)}-from-{s.parent.name}-{s.stem}" for s in sources]
        for target in targets:
            target.mkdir(exist_ok=True)
        found = on_layout(
            self.ranks, layout, continued, list(zip(sources, targets, strict=True)), optimizer, dropout, timeout=120
        )
        return [([r[i] for r in found], target / "final.ckpt") for i, target in enumerate(targets)]


def uninterrupted(site: Site, folder: Path, optimizer: str, dropout: bool) -> Any:
    return train(site, folder, TiedGPT(optimizer, dropout))


def continued(site: Site, pairs: list[tuple[Path, Path]], optimizer: str, dropout: bool) -> Any:
    return [train(site, target, TiedGPT(optimizer, dropout), source, saves=False) for source, target in pairs]


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def expected(runs: Runs) -> dict[str, tuple[Any, Path]]:
    """The plain run continued from each of its own checkpoints."""
    whole = runs.result(PLAIN)[0]
    continued = runs.resumed(PLAIN, [runs.files(PLAIN) / f"{kind}.ckpt" for kind in KINDS])
    by_kind = {kind: (results[0], file) for kind, (results, file) in zip(KINDS, continued, strict=True)}
    # The reference is what it claims to be: at the edge of a window nothing is lost, inside of one a gradient is.
    for kind in ("middle", "epoch"):
        assert_same(by_kind[kind][0]["weights"], whole["weights"], kind, atol=0)
    assert not torch.equal(by_kind["window"][0]["weights"]["tok.weight"], whole["weights"]["tok.weight"])
    return by_kind


@pytest.mark.parametrize("target", TWO, ids=str)
def test_any_layout_continues_any_other(runs: Runs, expected: dict[str, tuple[Any, Path]], target: Any) -> None:
    sources = []
    for layout in TWO:
        if (layout, target) != (PLAIN, PLAIN):
            runs.result(layout)
            sources += [runs.files(layout) / f"{kind}.ckpt" for kind in KINDS]
    for source, (results, file) in zip(sources, runs.resumed(target, sources), strict=True):
        for rank, result in enumerate(results):
            assert_same(result, expected[source.stem][0], f"rank {rank} of {target} from {source}")
        assert_same_file(file, expected[source.stem][1])
        if source.parent == runs.files(target) and source.stem != "window":
            for rank, (result, whole) in enumerate(zip(results, runs.result(target), strict=True)):
                assert_same(result["weights"], whole["weights"], f"rank {rank} of {target}", atol=0)


def test_four_ranks_continue_each_other_and_plain(runs: Runs, expected: dict[str, tuple[Any, Path]]) -> None:
    grid, mixed = (2, 2, 1), (1, 2, 2)
    for layout in (grid, mixed):
        runs.result(layout)
    from_grid, from_mixed = runs.files(grid) / "middle.ckpt", runs.files(mixed) / "window.ckpt"
    plain = runs.files(PLAIN) / "epoch.ckpt"
    runs.result(PLAIN)
    for target, sources in ((mixed, [from_grid, plain]), (grid, [from_mixed, from_grid]), (PLAIN, [from_mixed])):
        for source, (results, file) in zip(sources, runs.resumed(target, sources), strict=True):
            for rank, result in enumerate(results):
                assert_same(result, expected[source.stem][0], f"rank {rank} of {target} from {source}")
            assert_same_file(file, expected[source.stem][1])


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_states_that_exist_from_construction_on(runs: Runs, layout: Layout) -> None:
    """Adagrad's sums are there before the first step: they are split with the parameters, saved and continued."""
    whole = runs.result(PLAIN, "adagrad")[0]
    sources = []
    for place in (PLAIN, layout):
        for rank, result in enumerate(runs.result(place, "adagrad")):
            assert_same(result, whole, f"rank {rank} of {place}")
        sources.append(runs.files(place, "adagrad") / "middle.ckpt")
    for target in (PLAIN, layout):
        for results, file in runs.resumed(target, sources, "adagrad"):
            for rank, result in enumerate(results):
                assert_same(result["weights"], whole["weights"], f"rank {rank} of {target}")
            assert_same_file(file, runs.files(PLAIN, "adagrad") / "final.ckpt")


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_the_same_layout_continues_bit_for_bit(runs: Runs, layout: Layout) -> None:
    """With momentum, and dropout in every layer: the random streams of a step are those of its number."""
    wholes = runs.result(layout, "sgd", dropout=True)
    sources = [runs.files(layout, "sgd", dropout=True) / f"{kind}.ckpt" for kind in ("middle", "epoch")]
    for source, (results, file) in zip(sources, runs.resumed(layout, sources, "sgd", dropout=True), strict=True):
        for rank, (result, whole) in enumerate(zip(results, wholes, strict=True)):
            done = len(whole["batches"]) - len(result["batches"])
            assert done == {"middle": 2, "epoch": 4}[source.stem]
            assert_same(result["batches"], whole["batches"][done:], f"rank {rank}, {source.stem}", atol=0)
            assert_same(result["weights"], whole["weights"], f"rank {rank}, {source.stem}", atol=0)
        assert_same_file(file, source.parent / "final.ckpt", atol=0)
