"""Resuming: a run continued on any layout is the run that was interrupted on any other, plain ones included.

Reference: a plain Trainer (1e-5); for the same layout, the uninterrupted run, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, Callback

from tests.glue.checkpointing import KINDS, ResumableLoader, SaveAt, TiedGPT, assert_same_file, on_layout, train
from tests.glue.oracle import PAIRS, PLAN, Classifier, Layout, Samples, Site, assert_same, weights
from tests.glue.training import Record
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
    for place, layout in enumerate(TWO):
        if (layout, target) != (PLAIN, PLAIN):
            runs.result(layout)
            # From itself at every point; from the others at points that change, so that each pair and each point occur.
            kinds = KINDS if layout == target else [KINDS[(place + TWO.index(target)) % len(KINDS)]]
            sources += [runs.files(layout) / f"{kind}.ckpt" for kind in kinds]
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


# ------------------------------------------------------------------------------------------------ optimizers
POINTS: dict[tuple[int, int | None], str] = {(0, None): "before", (1, 0): "at", (2, 0): "after"}
"""Where runs of three epochs are interrupted; a finetuned backbone thaws as epoch 1 starts."""


class Grouped(Classifier):
    """Three groups with decay and schedules of their own."""

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [
            {"params": self.net.stem.parameters(), "weight_decay": 0.2, "lr": 0.02},
            {"params": self.net.blocks.parameters(), "weight_decay": 0.0, "betas": (0.8, 0.9)},
            {"params": [*self.net.norm.parameters(), *self.net.head.parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
        factors = [lambda step: 0.9**step, lambda step: 1.0 + step, lambda step: 1.0]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Finetuned(Classifier):
    """Its blocks are frozen at first; a callback gives them to the optimizer later, as a group of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net.blocks

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class ThawAgain(BackboneFinetuning):
    """Lightning freezes a backbone again when a run is resumed in a later epoch than that in which it thawed."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.current_epoch >= self.unfreeze_backbone_at_epoch:
            self.make_trainable(module.get_submodule("backbone"))


class ByHand(Classifier):
    """Two optimizers of different kinds, stepped and scheduled by hand at different times."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        ends = [*self.net.stem.parameters(), *self.net.norm.parameters(), *self.net.head.parameters()]
        blocks = torch.optim.AdamW(self.net.blocks.parameters(), lr=0.01, eps=1e-4)
        both = [blocks, torch.optim.SGD(ends, lr=0.1, momentum=0.9)]
        schedules = [torch.optim.lr_scheduler.StepLR(blocks, 2), torch.optim.lr_scheduler.ExponentialLR(both[1], 0.8)]
        return both, schedules

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizers: Any = self.optimizers()
        schedules: Any = self.lr_schedulers()
        for place, (optimizer, schedule) in enumerate(zip(optimizers, schedules, strict=True)):
            if place == 0 or batch_idx % 2 == 0:
                optimizer.step()
                schedule.step()
            optimizer.zero_grad()
        return loss


def job(kind: str) -> tuple[LightningModule, list[Callback]]:
    """A new module with the callbacks of its kind."""
    if kind in ("groups", "by hand"):
        return (Grouped() if kind == "groups" else ByHand()), []
    thaw = BackboneFinetuning if kind == "finetuned" else ThawAgain
    return Finetuned(), [thaw(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.5)]


def whole_and_continued(site: Site, folder: Path, kind: str, sources: list[Path]) -> list[Any]:
    """The uninterrupted run, and those continued from checkpoints; each leaves `final-<number>.ckpt`."""
    found = []
    for number, source in enumerate([None, *sources]):
        module, callbacks = job(kind)
        callbacks += [record := Record(), SaveAt(folder, {} if source else POINTS)]
        trainer = site.trainer(max_epochs=3, callbacks=callbacks)
        trainer.fit(module, ResumableLoader(Samples(16), batch_size=8 // site.replicas), ckpt_path=source)
        trainer.save_checkpoint(folder / f"final-{number}.ckpt")
        found.append({"batches": record.batches, "weights": weights(module)})
    return found


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("groups", [(2, 1, 1), (1, 2, 1), (2, 1, 2)]),
        ("finetuned", [(1, 2, 1), (2, 1, 1)]),
        ("thawed again", [*PAIRS, (1, 2, 2)]),
        ("by hand", [(2, 1, 1), (1, 1, 2), (2, 1, 2)]),
    ],
    ids=["groups", "finetuned", "thawed again", "by hand"],
)
def test_changing_and_several_optimizers(ranks: Ranks, kind: str, layouts: list[Layout], tmp_path: Path) -> None:
    """Runs of a layout are continued by itself, by the next layout and by a plain run, and plain ones by each layout.

    Reference: the plain run, continued from the same point; all files are those of a plain run, too.
    """
    names = list(POINTS.values())
    folders = [tmp_path / text for text in ("plain", *map(str, layouts), "back")]
    for folder in folders:
        folder.mkdir()
    whole, *parts = whole_and_continued(Site(), folders[0], kind, [folders[0] / f"{name}.ckpt" for name in names])
    if kind != "finetuned":
        for name, part in zip(names, parts, strict=True):
            assert_same(part["weights"], whole["weights"], name, atol=0)
    options: dict[str, Any] = {"plan": PLAN, "micro_batches": 1 if kind == "by hand" else 2}
    for turn, layout in enumerate(layouts):
        own = folders[turn + 1]
        # Which point is continued from whose file changes from layout to layout.
        origins = [(own, folders[turn], folders[0])[(turn + place) % 3] for place in range(len(names))]
        sources = [origin / f"{name}.ckpt" for origin, name in zip(origins, names, strict=True)]
        found = on_layout(ranks, layout, whole_and_continued, own, kind, sources, timeout=120, **options)
        for rank, results in enumerate(found):
            assert_same(results, [whole, *parts], f"rank {rank} of {layout} from {origins}")
        for file in own.iterdir():
            assert_same_file(file, folders[0] / file.name)
    for place, name in enumerate(names):
        source = folders[1 + place % len(layouts)] / f"{name}.ckpt"
        assert_same(whole_and_continued(Site(), folders[-1], kind, [source])[1], parts[place], f"plain from {source}")
