"""What `self.log` shows on every rank of a layout, against one plain process (fp32, 1e-5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.trainer.connectors.logger_connector.result import warning_cache
from torch.nn import functional as F

from tests.glue.oracle import LAYOUTS, Classifier, Layout, Samples, Site, check
from tests.harness import Ranks


class Notebook(Logger):
    """A logger that keeps what every rank hands it."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "notebook"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.entries.append((step, dict(sorted(metrics.items()))))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Not under test."""


class Watch(Callback):
    """Copies every dict of metrics a callback can see."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, trainer: Trainer, when: str) -> None:
        kinds = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        self.seen.append((when, *({k: float(v) for k, v in sorted(kind.items())} for kind in kinds)))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.note(trainer, "train batch")

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        self.note(trainer, "train epoch")

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.note(trainer, "validation batch")

    def on_validation_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        self.note(trainer, "validation epoch")

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self.note(trainer, "validation end")


def fit(site: Site, module: LightningModule, **kwargs: Any) -> Any:
    """Two epochs of three batches (the last one uneven) with validation; everything that was logged."""
    notebook, watch = Notebook(), Watch()
    callbacks = [watch, *kwargs.pop("callbacks", [])]
    trainer = site.trainer(logger=notebook, log_every_n_steps=1, callbacks=callbacks, **kwargs)
    warning_cache.clear()
    trainer.fit(module, site.loader(Samples(20), 8), site.loader(Samples(11, first=100), 4))
    end = {k: float(v) for k, v in trainer.callback_metrics.items()}
    # Only what replicas log by themselves, in hooks, is not global yet.
    advice = {message for message in warning_cache if "sync_dist=True" in message}
    assert not advice or (site.replicas > 1 and isinstance(module, LogsInHooks)), advice
    return {"seen": watch.seen, "logger": notebook.entries, "end": end}


class LogsInSteps(Classifier):
    def log_all(self, stage: str, batch: Any) -> torch.Tensor:
        logits = self.net(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        right = (logits.argmax(-1) == batch["y"]).float()
        self.log(f"{stage}_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log(f"{stage}_synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log(f"{stage}_right", right.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log(f"{stage}_rights", right.sum(), reduce_fx=torch.sum, on_step=False, on_epoch=True, sync_dist=True)
        self.log(f"{stage}_largest", logits.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log(f"{stage}_smallest", logits.min(), reduce_fx=min, on_step=False, on_epoch=True, sync_dist=True)
        self.log_dict({f"{stage}_a": right.mean(), f"{stage}_b": loss.item() * 2}, on_epoch=True, prog_bar=True)
        self.log(f"{stage}_count", len(batch["y"]), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log(f"{stage}_weighted", right.mean(), batch_size=len(batch["y"]), on_step=False, on_epoch=True)
        self.log(f"{stage}_constant", 3, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.log_all("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.log_all("val", batch)


def logs_in_steps(site: Site) -> Any:
    return fit(site, LogsInSteps())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_logged_in_steps(ranks: Ranks, layout: Layout) -> None:
    check(ranks, logs_in_steps, layout)


class LogsInHooks(Classifier):
    """Hooks outside of steps: values of the whole run, sums of what each replica saw, and a callback's own values."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_start(self) -> None:
        self.log("start", 1.5)

    def on_train_epoch_start(self) -> None:
        self.batches = 0
        self.log("epoch_start", float(self.current_epoch + 1))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_start", float(batch_idx))

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("before_zero_grad", float(self.global_step))

    def on_after_backward(self) -> None:
        self.log("after_backward", float(self.global_step), on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        self.log("outputs", outputs["loss"], on_step=True, on_epoch=True, sync_dist=True)
        # What a replica counts by itself is added up over the replicas, not over tensor ranks and stages.
        self.log("samples", float(len(batch["y"])), reduce_fx="sum", sync_dist=True, on_epoch=True, on_step=True)
        self.log("highest", batch["y"].max().float(), reduce_fx="max", sync_dist=True, on_epoch=True, on_step=False)

    def on_train_epoch_end(self) -> None:
        self.log("batches", float(self.batches), sync_dist=True)
        self.log("train_loss_again", self.trainer.callback_metrics["train_loss"] * 2)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_batches", 1.0, reduce_fx="sum", batch_size=1)

    def on_validation_epoch_end(self) -> None:
        self.log("val_batches_per_epoch", float(self.trainer.num_val_batches[0]), prog_bar=True)
        self.log_dict({"two": torch.tensor(2.0), "three": 3}, sync_dist=True)


class LogsInCallback(Callback):
    log: Any  # given by the trainer

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        pl_module.log("callback_epoch", float(trainer.current_epoch))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.log("callback_steps", float(trainer.global_step), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.log("callback_val", float(trainer.current_epoch))


def logs_in_hooks(site: Site) -> Any:
    return fit(site, LogsInHooks(), callbacks=[LogsInCallback()])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_logged_in_hooks(ranks: Ranks, layout: Layout) -> None:
    check(ranks, logs_in_hooks, layout)
