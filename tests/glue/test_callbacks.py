"""Lightning's own callbacks on every rank of a layout, against one plain process (fp32, 1e-5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import nn

from tests.glue.oracle import LAYOUTS, Block, Classifier, Layout, Samples, Site, check, set_by_formula, weights
from tests.harness import Ranks

TRAINING, VALIDATION = 16, 6


def fit(site: Site, module: LightningModule, *callbacks: Any, **kwargs: Any) -> Trainer:
    trainer = site.trainer(callbacks=list(callbacks), **kwargs)
    trainer.fit(module, site.loader(Samples(TRAINING), 4), site.loader(Samples(VALIDATION, first=50), 4))
    return trainer


class Plateau(Classifier):
    """A learning rate that falls when the validation loss does not."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def decisions(site: Site) -> Any:
    """Early stop, best checkpoint, plateau scheduler and what the monitor of learning rates sees."""
    stopping = EarlyStopping("val_loss", patience=2, min_delta=0.02)
    saving = ModelCheckpoint(Path.cwd() / "best", "{epoch}", monitor="val_loss", save_top_k=2)
    module = Plateau()
    logger = CSVLogger(str(Path.cwd()), name="logs", version="one")
    watching = LearningRateMonitor(logging_interval="epoch")
    more = {"logger": logger, "enable_checkpointing": True, "log_every_n_steps": 1}
    trainer = fit(site, module, stopping, saving, watching, max_epochs=12, **more)
    return {
        "epochs": trainer.current_epoch,
        "stopped": stopping.stopped_epoch,
        "best score": float(saving.best_model_score or 0.0),
        "best": Path(saving.best_model_path).name,
        "kept": sorted(Path(path).name for path in saving.best_k_models),
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "weights": weights(module),
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_decisions_are_those_of_a_plain_run(ranks: Ranks, layout: Layout) -> None:
    check(ranks, decisions, layout)


def averaged(site: Site) -> Any:
    module = Classifier()
    fit(site, module, StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2), max_epochs=4)
    return weights(module)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stochastic_weight_averaging_ends_with_the_average(ranks: Ranks, layout: Layout) -> None:
    check(ranks, averaged, layout)


def moving_average(site: Site) -> Any:
    """Validation runs on the average; training goes on with its own weights."""
    module = Classifier()
    trainer = fit(site, module, EMAWeightAveraging(decay=0.9), max_epochs=2)
    return {"val_loss": float(trainer.callback_metrics["val_loss"]), "weights": weights(module)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_f32_moving_average_of_shards_is_that_of_full_weights(ranks: Ranks, layout: Layout) -> None:
    check(ranks, moving_average, layout)


class WithBackbone(LightningModule):
    """A backbone that is frozen at first, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(8, 4)
        set_by_formula(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.head(self.backbone(batch["x"])), batch["y"])

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=0.1)


def finetuned(site: Site) -> Any:
    module = WithBackbone()
    trainer = fit(site, module, BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=double), max_epochs=3)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {"rates": rates, "weights": weights(module)}


def double(epoch: int) -> float:
    return 2.0


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_backbone_thaws_on_every_rank(ranks: Ranks, layout: Layout) -> None:
    plan = {"backbone.*.fc": "colwise", "backbone.*.out": "rowwise"}
    check(ranks, finetuned, layout, plan=plan)


class Searched(Classifier):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def searched(site: Site) -> Any:
    module = Searched()
    trainer = site.trainer(max_epochs=1)
    finder = Tuner(trainer).lr_find(module, site.loader(Samples(40), 4), num_training=8, min_lr=1e-4, max_lr=0.5)
    assert finder is not None
    return {"losses": [float(x) for x in finder.results["loss"]], "rates": finder.results["lr"]}


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_learning_rate_search_sees_the_same_curve(ranks: Ranks, layout: Layout) -> None:
    check(ranks, searched, layout, timeout=90)
