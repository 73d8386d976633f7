"""A whole day of a user where tensor, pipeline and data ranks meet, against one plain process (fp32, 1e-5).

The other modules look at one thing at a time, mostly where one or two sizes are greater than 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.glue.oracle import CLASSES, Classifier, Layout, Samples, Site, check, weights
from tests.harness import Ranks

GRIDS: list[Layout] = [(2, 1, 2), (2, 2, 2)]
LAST_STEP = 5
"""Of two epochs of three steps each, over five batches of which the last is smaller."""


class Everyday(Classifier):
    """Logs means, sums and metrics in steps and hooks, and reads the norm of all gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.val_accuracy = (MulticlassAccuracy(CLASSES, average="micro") for _ in range(2))
        self.mean, self.count = MeanMetric(), SumMetric()
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.accuracy(logits, batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log(
            "right", (logits.argmax(-1) == batch["y"]).sum().float(), reduce_fx="sum", on_step=False, on_epoch=True
        )
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(sum(p.grad.pow(2).sum() for p in self.parameters() if p.grad is not None)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("samples", float(len(batch["y"])), reduce_fx="sum", sync_dist=True, on_step=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits = self.net(batch["x"])
        losses = F.cross_entropy(logits, batch["y"], reduction="none")
        self.log(f"val_loss_{dataloader_idx}", losses.mean(), add_dataloader_idx=False, prog_bar=True)
        self.log("val_sum", losses.sum(), reduce_fx="sum", on_step=True, on_epoch=True, sync_dist=True)
        self.mean.update(losses)
        self.count.update(len(losses))
        self.val_accuracy.update(logits, batch["y"])

    def on_validation_epoch_end(self) -> None:
        for name, metric in (("mean", self.mean), ("count", self.count), ("val_accuracy", self.val_accuracy)):
            self.log(name, metric.compute())
            metric.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watch(Callback):
    """Copies what callbacks are shown; asks on one rank for the end of the run."""

    def __init__(self, stops: bool) -> None:
        self.stops = stops
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        shown = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        self.seen.append((trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"], shown))
        if self.stops and trainer.global_step == LAST_STEP:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.seen.append({name: float(value) for name, value in sorted(trainer.callback_metrics.items())})


def loaders(site: Site) -> tuple[DataLoader[Any], list[DataLoader[Any]]]:
    """Training data in the order of the user's own sampler, which Lightning leaves alone; uneven validation data."""
    tensor, _, data = site.layout or (1, 1, 1)
    training = Samples(18)
    sampler: DistributedSampler[Any] = DistributedSampler(
        training, data, site.rank // tensor % data, shuffle=True, seed=3
    )
    evaluation = [site.loader(Samples(count, first=50 * count), 4) for count in (11, 1)]
    return site.loader(training, 4, sampler=sampler), evaluation


def everyday(site: Site) -> Any:
    """Trains, stops, validates, tests and predicts with the best weights, and goes on from its last checkpoint."""
    world_size = 1 if site.layout is None else site.layout[0] * site.layout[1] * site.layout[2]
    watch, stopping = Watch(site.rank == world_size - 1), EarlyStopping("val_loss_0", patience=9, min_delta=0.2)
    saving = ModelCheckpoint("kept", "{epoch}", monitor="val_loss_0", save_last=True)
    trainer = site.trainer(
        max_epochs=4,
        callbacks=[watch, stopping, saving],
        enable_checkpointing=True,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )
    module, (training, evaluation) = Everyday(), loaders(site)
    trainer.fit(module, training, evaluation)
    found: list[Any] = [watch.seen, stopping.wait_count, Path(saving.best_model_path).name, module.norms]
    assert trainer.global_step == LAST_STEP
    found += [weights(module)]
    found += [trainer.validate(module, evaluation, verbose=False)]
    found += [trainer.test(module, evaluation[0], ckpt_path="best", verbose=False)]
    predicted = trainer.predict(module, evaluation[0])
    found.append(predicted if site.layout is None else trainer.strategy.gather_predictions(predicted))  # type: ignore[attr-defined]
    again, rest = Everyday(), Watch(False)
    more = site.trainer(max_epochs=3, callbacks=[rest], accumulate_grad_batches=2, gradient_clip_val=0.5)
    more.fit(again, training, evaluation, ckpt_path="kept/last.ckpt")
    return [*found, rest.seen, weights(again)]


@pytest.mark.parametrize("layout", GRIDS, ids=str)
def test_a_day_of_a_user(ranks: Ranks, layout: Layout) -> None:
    check(ranks, everyday, layout, timeout=90, micro_batches=2 if layout[1] > 1 else 1)
