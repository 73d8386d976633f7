"""Checkpoint files: what a plain Trainer would have written, and all the ways to save, choose and load them.

Reference: the same scenario in one plain process, results and files compared (1e-5).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MaxMetric, MeanMetric

from tests.glue.checkpointing import on_layout, read, run_both
from tests.glue.oracle import (
    PAIRS,
    PLAN,
    WIDTH,
    Block,
    Classifier,
    Layout,
    Samples,
    Site,
    assert_same,
    set_by_formula,
)
from tests.glue.training import EVERY
from tests.harness import Ranks

WITHOUT_REPLICAS: list[Layout] = [(2, 1, 1), (1, 2, 1), (2, 2, 1)]


# ------------------------------------------------------------------------------------------------ whole files
class Learner(Classifier):
    """A classifier with hyperparameters, a schedule and a frozen part."""

    def __init__(self, rate: float = 0.01, name: str = "learner") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net.stem.bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.hparams["rate"], eps=1e-4)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Data(LightningDataModule):
    """Data with hyperparameters and a state."""

    def __init__(self, site: Site | None, count: int = 24) -> None:
        super().__init__()
        self.save_hyperparameters("count")
        self.site, self.epochs = site, 0

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.site is not None
        self.epochs += 1
        return self.site.loader(Samples(self.hparams["count"]), 8)

    def val_dataloader(self) -> DataLoader[Any]:
        assert self.site is not None
        return self.site.loader(Samples(8, first=50), 4)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "samples"}


def callbacks_of_a_run(site: Site, folder: Path) -> Any:
    best = ModelCheckpoint(folder / "best", "{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True)
    often = ModelCheckpoint(folder / "often", "{step}", every_n_train_steps=2, save_top_k=-1, save_weights_only=True)
    stop = EarlyStopping("val_loss", patience=5)
    trainer = site.trainer(max_epochs=3, callbacks=[best, often, stop], enable_checkpointing=True)
    trainer.fit(Learner(), datamodule=Data(site))
    trainer.save_checkpoint(folder / "after.ckpt")
    trainer.save_checkpoint(folder / "after-weights.ckpt", weights_only=True)
    paths = [best.best_model_path, best.last_model_path, *best.best_k_models, often.best_model_path]
    return [str(Path(path).relative_to(folder)) for path in paths], best.best_model_score


@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_every_file_of_a_run_is_what_a_plain_trainer_writes(ranks: Ranks, layout: Layout, tmp_path: Path) -> None:
    names = run_both(ranks, layout, tmp_path, callbacks_of_a_run)
    assert len(names) == 2 + 1 + 4 + 2
    file = read(tmp_path / "split" / "after.ckpt")
    assert {"Data", "hyper_parameters", "datamodule_hyper_parameters", "lr_schedulers"} <= set(file)
    assert len(file["callbacks"]) == 3


# ------------------------------------------------------------------------------------------------ states of modules
class KeepingBlock(Block):
    """A block with running statistics and a state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(self.norm(x))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Keeper(Learner):
    """Running statistics before, in and after the blocks; a buffer that is not saved; names of its own in files."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(KeepingBlock() for _ in range(4))
        for name in ("stem", "head"):
            setattr(self.net, name, nn.Sequential(nn.BatchNorm1d(WIDTH), getattr(self.net, name)))
        set_by_formula(self)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.net.register_state_dict_post_hook(add_total)
        self.net.register_load_state_dict_pre_hook(drop_total)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"saved.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({k.removeprefix("saved."): v for k, v in state_dict.items()}, *args, **kwargs)


def add_total(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook that computes with what it finds: right only over whole tensors."""
    state[f"{prefix}total"] = sum(v.sum() for v in state.values() if isinstance(v, torch.Tensor) and v.dim() == 2)


def drop_total(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    del state[f"{prefix}total"]


def statistics(site: Site, folder: Path) -> Any:
    double: Any = {"precision": "64-true"}  # normalizing small batches amplifies rounding
    first = site.trainer(max_epochs=1, **double)
    first.fit(Keeper(), datamodule=Data(site))
    first.save_checkpoint(folder / "after.ckpt")
    save = ModelCheckpoint(folder / "during", "{epoch}", save_top_k=-1)
    model = Keeper()
    second = site.trainer(callbacks=[save], enable_checkpointing=True, **double)
    second.fit(model, datamodule=Data(site), ckpt_path=folder / "after.ckpt")
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return state, [block.calls for block in model.net.blocks]


@pytest.mark.parametrize("layout", WITHOUT_REPLICAS, ids=str)
def test_buffers_hooks_and_extra_states_of_modules(ranks: Ranks, layout: Layout, tmp_path: Path) -> None:
    names = run_both(ranks, layout, tmp_path, statistics, micro_batches=1)
    assert names == ["after.ckpt", "during/epoch=1.ckpt"]
    state = read(tmp_path / "split" / "during" / "epoch=1.ckpt")["state_dict"]
    assert state["saved.net.blocks.3._extra_state"] == {"calls": 6}
    assert "saved.scratch" not in state
    assert "saved.net.total" in state


class Counting(Learner):
    """Metrics that are saved with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.every, self.largest, self.passing = MeanMetric(), CatMetric(), MaxMetric(), MeanMetric()
        for metric in (self.mean, self.every, self.largest):
            metric.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for metric in (self.mean, self.every, self.largest, self.passing):
            metric.update(batch["id"].float())
        return super().training_step(batch, batch_idx)


class Computed(Callback):
    """What metrics say at the end of every epoch."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, Counting)
        every = module.every.compute()
        self.values.append((module.mean.compute(), every.sort().values, module.largest.compute()))


def counting(site: Site, folder: Path) -> Any:
    computed = Computed()
    first = site.trainer(max_epochs=1, callbacks=[computed])
    first.fit(Counting(), datamodule=Data(site))
    save = ModelCheckpoint(folder, "during-{epoch}", save_top_k=-1)
    second = site.trainer(max_epochs=1, callbacks=[computed, save], enable_checkpointing=True)
    second.fit(Counting(), datamodule=Data(site))
    third = site.trainer(max_epochs=2, callbacks=[computed])
    third.fit(Counting(), datamodule=Data(site), ckpt_path=folder / "during-epoch=0.ckpt")
    return computed.values


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_metrics_that_are_saved_count_every_sample_once(ranks: Ranks, layout: Layout, tmp_path: Path) -> None:
    expected = on_layout(ranks, None, counting, tmp_path / "plain")[0]
    for rank, values in enumerate(on_layout(ranks, layout, counting, tmp_path / "split", plan=PLAN)):
        assert_same(values, expected, f"rank {rank} of {layout}")
    found, plain = (read(tmp_path / name / "during-epoch=0.ckpt")["state_dict"] for name in ("split", "plain"))
    for state in (found, plain):  # samples are kept in as many pieces as there were updates, by replica
        state["every.value"] = torch.cat(state["every.value"]).sort().values
    assert_same(found, plain, "state_dict")
    assert "mean.mean_value" in found
    assert "passing.mean_value" not in found


# ------------------------------------------------------------------------------------------------ hooks
class Editing(Learner):
    """Changes what is saved, and expects it when it is loaded."""

    loaded: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        assert {name: tuple(v.shape) for name, v in state.items()} == WHOLE_SHAPES
        rank = self.trainer.global_rank
        assert all(v.is_meta == (rank > 0) for v in state.values())
        assert bool(checkpoint["optimizer_states"][0]["state"]) == (rank == 0)
        state["net.head.weight"] = state["net.head.weight"].double() * 2
        del state["net.norm.bias"]
        checkpoint["note"] = {"from": "rank 0", "steps": self.trainer.global_step} if rank == 0 else rank

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["net.head.weight"] = state["net.head.weight"].float() / 2
        state["net.norm.bias"] = torch.zeros(WIDTH)
        self.loaded = checkpoint["note"]


WHOLE_SHAPES = {name: tuple(value.shape) for name, value in Learner().state_dict().items()}


class EditingToo(Callback):
    """The same, as a callback; with a state of its own."""

    def __init__(self) -> None:
        self.epochs = 0
        self.loaded: list[torch.Tensor] = []

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["stem"] = checkpoint["state_dict"]["net.stem.weight"].sum(0)

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.loaded.append(checkpoint["stem"])


def edited(site: Site, folder: Path) -> Any:
    save = ModelCheckpoint(folder, "edited")
    first = site.trainer(max_epochs=1, callbacks=[save, EditingToo()], enable_checkpointing=True)
    first.fit(Editing(), datamodule=Data(site))
    model, callback = Editing(), EditingToo()
    site.trainer(max_epochs=2, callbacks=[callback]).fit(model, datamodule=Data(site), ckpt_path=folder / "edited.ckpt")
    return model.loaded, callback.loaded, callback.epochs, model.state_dict()


@pytest.mark.parametrize("layout", [*PAIRS, (2, 1, 2)], ids=str)
def test_hooks_edit_what_the_first_rank_saves(ranks: Ranks, layout: Layout, tmp_path: Path) -> None:
    """Other ranks run the same hooks on tensors without data: they never hold the whole model."""
    assert run_both(ranks, layout, tmp_path, edited) == ["edited.ckpt"]
    assert read(tmp_path / "split" / "edited.ckpt")["note"] == {"from": "rank 0", "steps": 3}
