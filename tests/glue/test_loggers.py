"""What loggers write and bars show of a split run: what they would of a plain one, once."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.glue.oracle import PAIRS, Classifier, Layout, Samples, Site, check, weights
from tests.harness import Ranks


class Shown(Classifier):
    """Logs at steps and epochs, hyperparameters too, and moves batches to the device in a way of its own."""

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return {**moved, "x": moved["x"] * self.hparams["scale"]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


class Bar(TQDMProgressBar):
    """Keeps how far its bars went, where it shows any."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=1)
        self.ends: list[tuple[int, int]] = []

    def on_train_epoch_end(self, *args: Any) -> None:
        super().on_train_epoch_end(*args)
        if not self.is_disabled:
            self.ends.append((self.train_progress_bar.n, self.train_progress_bar.total))


def shown(site: Site) -> Any:
    module, bar = Shown(), Bar()
    loggers = [CSVLogger(".", "rows"), TensorBoardLogger(".", "events")]
    options = {"logger": loggers, "enable_progress_bar": True, "log_every_n_steps": 1}
    trainer = site.trainer(callbacks=[bar], **options)
    trainer.fit(module, site.loader(Samples(20), 8), site.loader(Samples(11, first=100), 4))
    trainer.strategy.barrier()  # rank 0 has written everything
    with (Path("rows") / "version_0" / "metrics.csv").open() as file:
        rows = [{name: float(text or "nan") for name, text in row.items()} for row in csv.DictReader(file)]
    events = EventAccumulator("events/version_0").Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])}
    files = sorted(path.name.split(".")[0] for path in Path().glob("*/version_*/*"))
    bars = {name: float(value) for name, value in sorted(trainer.progress_bar_metrics.items())}
    assert bar.ends == ([(3, 3), (3, 3)] if site.rank == 0 else [])
    return {"rows": rows, "scalars": scalars, "files": files, "bars": bars, "weights": weights(module)}


@pytest.mark.parametrize("layout", PAIRS)
def test_logs_and_bars_are_those_of_a_plain_run(ranks: Ranks, layout: Layout) -> None:
    check(ranks, shown, layout)
