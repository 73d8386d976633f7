"""Lightning's own callbacks on every rank of a layout, against one plain process (fp32, 1e-5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import nn

from lightning_parallel.strategies.hooks import does_something
from tests.glue.checkpointing import ResumableLoader, SaveAt, read, run_both
from tests.glue.oracle import (
    LAYOUTS,
    PAIRS,
    Block,
    Classifier,
    Layout,
    Samples,
    Site,
    assert_same,
    check,
    set_by_formula,
    weights,
)
from tests.glue.training import Record
from tests.harness import Ranks

TRAINING, VALIDATION = 16, 6


def fit(site: Site, module: LightningModule, *callbacks: Any, **kwargs: Any) -> Trainer:
    trainer = site.trainer(callbacks=list(callbacks), **kwargs)
    trainer.fit(module, site.loader(Samples(TRAINING), 4), site.loader(Samples(VALIDATION, first=50), 4))
    return trainer


class Plateau(Classifier):
    """A learning rate that falls when the validation loss does not."""

    def __init__(self, lr: float = 0.4, patience: int = 0, threshold: float = 0.05) -> None:
        super().__init__()
        self.lr, self.patience, self.threshold = lr, patience, threshold

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=self.patience, threshold=self.threshold
        )
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
        "watched": {name: [float(rate) for rate in rates] for name, rates in watching.lrs.items()},
        "weights": weights(module),
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_decisions_are_those_of_a_plain_run(ranks: Ranks, layout: Layout) -> None:
    check(ranks, decisions, layout)


class Diverges(Classifier):
    """Its losses are no numbers from a batch of the second epoch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        loss = loss * float("nan") if (self.current_epoch, batch_idx) == (1, 2) else loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def divergence(site: Site) -> Any:
    """Both monitors stop at once, one after validation and one at the end of the training epoch."""
    found = []
    for monitor, late in (("val_loss", False), ("loss_epoch", True)):
        stopping = EarlyStopping(monitor, patience=9, check_finite=True, check_on_train_epoch_end=late)
        saving = ModelCheckpoint(Path.cwd() / monitor, "{epoch}", monitor, save_top_k=2, save_on_train_epoch_end=late)
        trainer = fit(site, Diverges(), stopping, saving, max_epochs=6, enable_checkpointing=True)
        kept = sorted(Path(path).name for path in saving.best_k_models)
        found.append((trainer.current_epoch, stopping.stopped_epoch, stopping.stopping_reason_message, kept))
    assert [run[1] for run in found] == [1, 1]
    return found


@pytest.mark.parametrize("layout", [(1, 2, 2)], ids=str)
def test_losses_that_are_no_numbers_stop_every_rank(ranks: Ranks, layout: Layout) -> None:
    check(ranks, divergence, layout)


def decided_again(site: Site, folder: Path) -> Any:
    """A run that stops early, and the same run continued where epochs without progress had been counted."""

    def run(source: str | None) -> Any:
        stopping = EarlyStopping("val_loss", patience=3, min_delta=5e-4)
        module = Plateau(0.1, 1, 1e-4)
        saving = SaveAt(folder, {} if source else {(1, None): "counting", (7, 1): "inside"})
        trainer = site.trainer(max_epochs=12, callbacks=[stopping, saving])
        training = ResumableLoader(Samples(TRAINING), batch_size=4 // site.replicas)
        path = None if source is None else folder / f"{source}.ckpt"
        trainer.fit(module, training, site.loader(Samples(VALIDATION, first=50), 4), ckpt_path=path)
        trainer.save_checkpoint(folder / f"final-{source}.ckpt")
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        return {"stopped": stopping.stopped_epoch, "waited": stopping.wait_count, "rate": rate, "is": weights(module)}

    whole = run(None)
    assert whole["stopped"] == 8
    assert whole["rate"] == 0.1 / 4
    # Around the edge of an epoch Lightning itself leaves out a step of this scheduler when it resumes.
    return whole, run("counting"), run("inside")


@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 2, 1)], ids=str)
def test_decisions_go_on_after_resuming(ranks: Ranks, layout: Layout, tmp_path: Path) -> None:
    assert len(run_both(ranks, layout, tmp_path, decided_again)) == 5
    waiting = read(tmp_path / "split" / "inside.ckpt")
    assert [state["wait_count"] for name, state in waiting["callbacks"].items() if "Stopping" in name] == [1]
    assert waiting["lr_schedulers"][0]["num_bad_epochs"] == 1


class SavesInside(Callback):
    """Saves while the average validates and, after the first batch of an epoch, while own weights train."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.save_checkpoint(self.folder / f"validating-{trainer.current_epoch}.ckpt")


def averaged(site: Site, folder: Path, kind: str) -> Any:
    """Losses of every training batch and validation, the weights at the end, and both again for resumed runs."""

    def run(source: str | None) -> Any:
        average = EMAWeightAveraging(decay=0.8) if kind == "ema" else StochasticWeightAveraging(0.05, 2)
        own = [SaveAt(folder, {(0, 1): "early", (2, 1): "inside"}), SavesInside(folder)] if source is None else []
        module, record, losses = Classifier(), Record(), Losses()
        trainer = site.trainer(max_epochs=3, callbacks=[average, record, losses, *own])
        training = ResumableLoader(Samples(TRAINING), batch_size=4 // site.replicas)
        path = None if source is None else folder / f"{source}.ckpt"
        trainer.fit(module, training, site.loader(Samples(VALIDATION, first=50), 4), ckpt_path=path)
        trainer.save_checkpoint(folder / f"final-{source}.ckpt")
        return {"batches": record.batches, "validation": losses.seen, "weights": weights(module)}

    found = {str(source): run(source) for source in (None, "early", "inside")}
    for source in ("early", "inside"):
        assert_same(found[source]["weights"], found["None"]["weights"], source, atol=1e-6)
    return found


class Losses(Callback):
    """What each validation of a run came to."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["val_loss"]))


@pytest.mark.parametrize("layout", [(1, 2, 2), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages_of_shards_are_those_of_full_weights(ranks: Ranks, layout: Layout, kind: str, tmp_path: Path) -> None:
    """Validation sees the average (of "ema"), training its own weights; files hold both; resumed runs go on alike."""
    assert len(run_both(ranks, layout, tmp_path, averaged, kind)) == 8


def test_only_hooks_that_do_something_are_shown_shares() -> None:
    """Of an average's hooks most are empty, and several run in every step."""
    average = EMAWeightAveraging()
    assert does_something(average, "on_train_batch_end")
    assert not does_something(average, "on_train_batch_start")
    average.on_train_batch_start = print  # type: ignore[method-assign]
    assert does_something(average, "on_train_batch_start")


class NormalizedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


class Normalized(Classifier):
    """Statistics in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(NormalizedBlock() for _ in range(3))
        set_by_formula(self)


def averaged_statistics(site: Site) -> Any:
    """After the last epoch the averaged weights see the data once more, forward only, for their statistics."""
    module, record = Normalized(), Record()
    fit(site, module, StochasticWeightAveraging(0.05, 2), record, max_epochs=3)
    return {"batches": record.batches, "weights": weights(module)}


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1)], ids=str)
def test_statistics_of_averaged_weights(ranks: Ranks, layout: Layout) -> None:
    check(ranks, averaged_statistics, layout, micro_batches=1)


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
    """The curve, the suggestion, and all that must be as before the search; then a run with the found rate."""
    module = Searched()
    loader = site.loader(Samples(40), 4)
    trainer = site.trainer(max_epochs=1, callbacks=[watching := Record()])
    before = weights(module)
    finder = Tuner(trainer).lr_find(module, loader, num_training=8, min_lr=1e-4, max_lr=0.5, update_attr=True)
    assert finder is not None
    assert_same(weights(module), before, "weights after the search", atol=0)
    state = {
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "limit": trainer.max_steps,
        "seen": len(watching.batches),
        "stops": trainer.should_stop,
        "rate": module.lr,
    }
    losses, rates = [float(x) for x in finder.results["loss"]], finder.results["lr"]
    trainer.fit(module, loader)
    curve = {"losses": losses, "rates": rates, "suggestion": finder.suggestion(skip_begin=1, skip_end=1)}
    return {**curve, **state, "batches": watching.batches, "weights": weights(module)}


@pytest.mark.parametrize("layout", [*PAIRS, (2, 2, 1)], ids=str)
def test_learning_rate_search_finds_the_same_and_leaves_no_trace(ranks: Ranks, layout: Layout) -> None:
    check(ranks, searched, layout, timeout=90)


def searched_at_start(site: Site) -> Any:
    """The callback searches after the module was split and optimizers were made, and training follows at once."""
    finder = LearningRateFinder(min_lr=1e-4, max_lr=0.5, num_training_steps=8)
    module, record = Searched(), Record()
    trainer = fit(site, module, finder, record, max_epochs=1)
    return {"rate": module.lr, "steps": trainer.global_step, "batches": record.batches, "weights": weights(module)}


@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 1, 2)], ids=str)
def test_learning_rate_search_at_the_start_of_a_fit(ranks: Ranks, layout: Layout) -> None:
    check(ranks, searched_at_start, layout)
