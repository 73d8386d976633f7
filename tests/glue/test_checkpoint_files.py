"""How checkpoint files are written: whole or not at all, by the user's plugin, in the background; averaged weights.

Reference: the same scenario in one plain process (1e-5).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_parallel.strategies.checkpoint_file import WholeFileIO
from tests.glue.checkpointing import on_layout, read, run_both
from tests.glue.oracle import PAIRS, PLAN, Classifier, Layout, Samples, Site, assert_same
from tests.glue.test_checkpoints import Data, Learner
from tests.harness import Ranks, RanksFailed


# ------------------------------------------------------------------------------------------------ whole or not there
class Breaks:
    """Cannot be pickled; by then a part of the file is written."""

    def __reduce__(self) -> Any:
        raise OSError("the disk is full")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    plugin, path = WholeFileIO(), tmp_path / "folder" / "last.ckpt"
    plugin.save_checkpoint({"state_dict": {"w": torch.arange(3)}}, path)
    with pytest.raises(OSError, match="the disk is full"):
        plugin.save_checkpoint({"state_dict": {"w": torch.zeros(1000)}, "later": Breaks()}, path)
    assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]
    assert torch.equal(plugin.load_checkpoint(path)["state_dict"]["w"], torch.arange(3))
    plugin.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, str(path))
    assert torch.equal(plugin.load_checkpoint(path)["state_dict"]["w"], torch.ones(2))
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, path, storage_options={"fast": True})


def killed_while_saving(rank: int, world_size: int, path: Path) -> None:
    """The process dies between the data and the end of the file."""
    write = torch.serialization._save

    def half(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    torch.serialization._save = half
    WholeFileIO().save_checkpoint({"state_dict": {"w": torch.zeros(100_000)}}, path)


def test_a_save_that_was_killed_is_never_picked_up(ranks: Ranks, tmp_path: Path) -> None:
    """`last` is the older, whole one."""
    site = Site()
    save = ModelCheckpoint(tmp_path, save_last=True)
    trainer = site.trainer(max_epochs=1, callbacks=[save], enable_checkpointing=True)
    trainer.fit(Learner(), datamodule=Data(site))
    before = (tmp_path / "last.ckpt").read_bytes()
    for name in ("last.ckpt", "last-v1.ckpt"):
        with pytest.raises(RanksFailed, match="the process ended with exit code -9"):
            ranks(1, killed_while_saving, tmp_path / name)
    assert len([entry for entry in tmp_path.iterdir() if entry.name.startswith(".unfinished-")]) == 2
    assert not (tmp_path / "last-v1.ckpt").exists()
    assert (tmp_path / "last.ckpt").read_bytes() == before
    again = ModelCheckpoint(tmp_path, save_last=True)
    resumed = site.trainer(max_epochs=2, callbacks=[again], enable_checkpointing=True)
    resumed.fit(Learner(), datamodule=Data(site), ckpt_path="last")
    assert resumed.global_step == 2 * trainer.global_step


# ------------------------------------------------------------------------------------------------ plugins
class Own(TorchCheckpointIO):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.saved: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.saved.append(os.path.basename(path))
        super().save_checkpoint({**checkpoint, "options": storage_options}, path)


def with_plugins(site: Site, folder: Path) -> list[str]:
    steps = []
    for name, plugin in (("own", Own()), ("async", AsyncCheckpointIO()), ("both", AsyncCheckpointIO(Own()))):
        save = ModelCheckpoint(folder, name)
        trainer = site.trainer(max_epochs=1, callbacks=[save], enable_checkpointing=True, plugins=[plugin])
        trainer.fit(Learner(), datamodule=Data(site))
        writer = plugin.checkpoint_io if isinstance(plugin, AsyncCheckpointIO) else plugin
        if isinstance(writer, Own):
            assert writer.saved == ([f"{name}.ckpt"] if site.rank == 0 else [])
        else:
            assert isinstance(writer, WholeFileIO) == (site.layout is not None)
        if name == "own":
            trainer.save_checkpoint(folder / "options.ckpt", storage_options={"kind": "cold"})
        steps.append(f"{name} after {trainer.global_step}")
    return steps


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1)], ids=str)
def test_the_users_plugins_write_on_the_first_rank(ranks: Ranks, layout: Layout, tmp_path: Path) -> None:
    names = run_both(ranks, layout, tmp_path, with_plugins)
    assert names == ["async.ckpt", "both.ckpt", "options.ckpt", "own.ckpt"]
    assert read(tmp_path / "split" / "options.ckpt")["options"] == {"kind": "cold"}


def scaled(site: Site, folder: Path) -> Any:
    def trainer(epochs: int, **kwargs: Any) -> Trainer:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        return site.trainer(max_epochs=epochs, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **kwargs)

    save = ModelCheckpoint(folder, "scaled")
    trainer(1, callbacks=[save], enable_checkpointing=True).fit(Learner(), datamodule=Data(site))
    second = trainer(2)
    second.fit(Learner(), datamodule=Data(site), ckpt_path=folder / "scaled.ckpt")
    return second.precision_plugin.state_dict()


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1)], ids=str)
def test_the_loss_scale_is_saved_under_the_plugins_name(ranks: Ranks, layout: Layout, tmp_path: Path) -> None:
    expected = on_layout(ranks, None, scaled, tmp_path / "plain")[0]
    assert expected["scale"] == 64.0 * 2**3
    for rank, found in enumerate(on_layout(ranks, layout, scaled, tmp_path / "split", plan=PLAN)):
        assert_same(found, expected, f"rank {rank} of {layout}")
    state, plain = (read(tmp_path / name / "scaled.ckpt") for name in ("split", "plain"))
    assert list(state) == list(plain)
    assert state["MixedPrecision"] == plain["MixedPrecision"]


# ------------------------------------------------------------------------------------------------ averages
def averaged(site: Site, folder: Path) -> Any:
    def callbacks(kind: str) -> list[Callback]:
        if kind == "ema":
            return [EMAWeightAveraging(decay=0.8)]
        return [StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)]

    loaders = site.loader(Samples(24), 8), site.loader(Samples(8, first=50), 8)
    seen = []
    for kind in ("ema", "swa"):
        save = ModelCheckpoint(folder, f"{kind}-{{epoch}}", save_top_k=-1)
        trainer = site.trainer(max_epochs=3, callbacks=[*callbacks(kind), save], enable_checkpointing=True)
        trainer.fit(model := Classifier(), *loaders)
        resumed = site.trainer(max_epochs=3, callbacks=callbacks(kind))
        resumed.fit(again := Classifier(), *loaders, ckpt_path=folder / f"{kind}-epoch=1.ckpt")
        assert_same(dict(again.state_dict()), dict(model.state_dict()), f"{kind}, resumed", atol=1e-6)
        seen.append((dict(model.state_dict()), resumed.validate(again, loaders[1], verbose=False)))
    return seen


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_averaged_weights_are_saved_and_continued(ranks: Ranks, layout: Layout, tmp_path: Path) -> None:
    names = run_both(ranks, layout, tmp_path, averaged)
    assert len(names) == 6


# ------------------------------------------------------------------------------------------------ weights left apart
def apart(site: Site, folder: Path) -> tuple[str, list[str]]:
    save = ModelCheckpoint(folder, "during")
    trainer = site.trainer(max_epochs=1, callbacks=[save], enable_checkpointing=True)
    trainer.fit(Learner(), datamodule=Data(site))
    with pytest.raises(RuntimeError, match="restore_weights=False") as caught:
        trainer.save_checkpoint(folder / "after.ckpt")
    return str(caught.value), sorted(entry.name for entry in folder.iterdir())


def test_weights_that_were_not_gathered_are_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    for text, names in on_layout(ranks, (2, 1, 1), apart, tmp_path, plan=PLAN, restore_weights=False):
        assert "save before the run ends" in text
        assert names == ["during.ckpt"]
    assert {k: v.shape for k, v in read(tmp_path / "during.ckpt")["state_dict"].items()} == {
        k: v.shape for k, v in Learner().state_dict().items()
    }
