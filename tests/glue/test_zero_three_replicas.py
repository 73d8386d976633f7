"""ZeRO over three replicas, which divide neither batches nor parameters: as one plain process, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.glue.checkpointing import ResumableLoader, SaveAt, TiedGPT, assert_same_file, on_layout
from tests.glue.oracle import Classifier, Samples, Site, assert_same, check, weights
from tests.glue.training import Record, Tokens, fit
from tests.harness import Ranks

REPLICAS, BATCH, COUNT = 3, 6, 23
"""The last batch of each epoch has 5 samples: one replica has fewer than the others."""


def train(site: Site, folder: Path, source: Path | None = None) -> Any:
    """A clipped epoch with windows of two batches, or the rest of it; leaves `middle.ckpt` and `final.ckpt`."""
    module, record = TiedGPT(), Record()
    saving = SaveAt(folder, {} if source else {(0, 1): "middle"})
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "callbacks": [record, saving]}
    trainer = site.trainer(max_epochs=1, **options)
    trainer.fit(module, ResumableLoader(Tokens(COUNT), batch_size=BATCH // site.replicas), ckpt_path=source)
    trainer.save_checkpoint(folder / "final.ckpt")
    return {"batches": record.batches, "weights": weights(module)}


def every_stage(site: Site, folder: Path, plain: Path) -> Any:
    """At each stage a whole run, and the rest of a plain one."""
    found = []
    for stage in (1, 2, 3):
        here = Site(site.layout, site.rank, {**site.options, "zero_stage": stage})
        whole, rest = folder / f"{stage}", folder / f"{stage}-rest"
        whole.mkdir(exist_ok=True)
        rest.mkdir(exist_ok=True)
        found.append((train(here, whole), train(here, rest, plain)))
    return found


def test_f27_clipped_runs_and_their_files_are_plain_ones(ranks: Ranks, tmp_path: Path) -> None:
    expected = train(Site(), tmp_path)
    rest = {**expected, "batches": expected["batches"][2:]}
    for found in on_layout(ranks, (1, 1, REPLICAS), every_stage, tmp_path, tmp_path / "middle.ckpt"):
        assert_same(found, [(expected, rest)] * 3, "stages")
    back = tmp_path / "back"
    back.mkdir()
    for stage in ("1", "2", "3"):
        for folder in (tmp_path / stage, tmp_path / f"{stage}-rest"):
            for file in folder.glob("*.ckpt"):
                assert_same_file(file, tmp_path / file.name)
        assert_same(train(Site(), back, tmp_path / stage / "middle.ckpt"), rest, f"a plain run goes on, stage {stage}")


class Tiny(torch.nn.Module):
    """Fewer elements than ranks, one, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.two = torch.nn.Parameter(torch.tensor([0.5, 2.0]))
        self.one = torch.nn.Parameter(torch.ones(1))
        self.scalar = torch.nn.Parameter(torch.tensor(0.25))
        self.none = torch.nn.Parameter(torch.ones(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (-1, 2)) * self.two * self.one
        return torch.cat([x.flatten(-2), self.none.expand(len(x), 0)], -1) + self.scalar


class Edges(Classifier):
    """In blocks and on the root; vectors do not decay, and a schedule moves both groups."""

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.kind = kind
        self.tiny = torch.nn.ModuleList([Tiny(), Tiny()])
        self.seven = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        self.empty = torch.nn.Parameter(torch.ones(0, 3))

    def loss(self, batch: Any) -> torch.Tensor:
        x = self.tiny[1](self.tiny[0](batch["x"]))
        return super().loss({**batch, "x": x}) + (x[:, :7] @ self.seven).square().mean() + self.empty.sum()

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.05},
        ]
        optimizer = self.kind(groups, lr=0.02)  # type: ignore[call-arg]
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def edges(site: Site) -> Any:
    """One run for each stage, each with another optimizer, clipped."""
    found = []
    for stage, kind in ((1, torch.optim.SGD), (2, torch.optim.Adagrad), (3, torch.optim.AdamW), (3, torch.optim.SGD)):
        here = Site(site.layout, site.rank, {**site.options, "zero_stage": stage})
        found.append(fit(here, Edges(kind), Samples(17), BATCH, gradient_clip_val=0.5))
    return found


def test_f29_parameters_with_fewer_elements_than_ranks(ranks: Ranks) -> None:
    check(ranks, edges, (1, 1, REPLICAS), plan="auto")
