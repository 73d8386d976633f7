"""Offloaded shards under a Trainer: what a plain run shows, and what is left on the disk."""

from __future__ import annotations

import errno
import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_parallel import ZeroConfig, ZeroStrategy
from tests.glue.checkpointing import TiedGPT, assert_same_file, on_layout, train
from tests.glue.oracle import QUIET, Classifier, Layout, Samples, Scenario, Site, assert_same, check
from tests.glue.test_callbacks import finetuned
from tests.glue.test_evaluation import everything_predicted, validate_and_test_around_a_fit
from tests.glue.test_training_optimizers import WithAdamW, WithGroups, adversaries
from tests.glue.test_training_parameters import frozen, sometimes
from tests.glue.test_training_precision import overflows
from tests.glue.test_whole_view import everything, replacing
from tests.glue.test_zero import bursts, hooks, resumed
from tests.glue.test_zero3 import penalized
from tests.glue.training import fit
from tests.harness import Ranks


class Untrained(Classifier):
    def configure_optimizers(self) -> None:
        """Nothing is trained."""


def steps(site: Site) -> Any:
    """Groups on a schedule, windows with an uneven end, clipping, parameters that thaw or are unused; no optimizer."""
    return [
        fit(site, Untrained(), Samples(8), max_epochs=1),
        fit(site, WithGroups(), accumulate_grad_batches=2),
        fit(site, WithAdamW(), gradient_clip_val=0.2),
        finetuned(site),
        frozen(site),
        sometimes(site),
    ]


def decisions(site: Site) -> Any:
    """Two optimizers by hand, overflows under a loss scaler, gradients that hooks look at and change."""
    return [adversaries(site), overflows(site), bursts(site), hooks(site)]


def split(site: Site) -> Any:
    return [fit(site, WithGroups(), accumulate_grad_batches=2), fit(site, WithAdamW(), gradient_clip_val=0.2)]


def elsewhere(site: Site) -> Any:
    """What happens where parameters are seen: in windows, hooks, evaluations, `full_params`, thawing, overflows."""
    trained = [bursts(site), split(site), finetuned(site), penalized(site), everything(site), replacing(site)]
    trained.append(fit(site, Untrained(), Samples(8), max_epochs=1))
    return [*trained, everything_predicted(site), validate_and_test_around_a_fit(site)]


@pytest.mark.parametrize(
    ("scenario", "layout", "zero"),
    [
        (steps, (1, 1, 2), ZeroConfig(2, "cpu")),
        (steps, (1, 1, 2), ZeroConfig(1, "nvme")),
        (decisions, (1, 1, 2), ZeroConfig(2, "cpu")),
        (decisions, (1, 1, 2), ZeroConfig(2, "nvme")),
        (hooks, (1, 1, 1), ZeroConfig(2, "nvme")),
        (split, (1, 1, 1), ZeroConfig(3, "cpu")),
        (steps, (1, 1, 2), ZeroConfig(3, "cpu", offload_parameters=True)),
        (bursts, (1, 1, 2), ZeroConfig(3, "cpu")),
        (elsewhere, (1, 1, 2), ZeroConfig(3, "nvme", offload_parameters=True)),
        (bursts, (1, 1, 1), ZeroConfig(3, "nvme", offload_parameters=True)),
        (split, (1, 2, 2), ZeroConfig(1, "nvme")),
    ],
)
def test_training(ranks: Ranks, scenario: Scenario, layout: Layout, zero: ZeroConfig, tmp_path: Path) -> None:
    zero = replace(zero, nvme_path=str(tmp_path) if zero.offload == "nvme" else None)
    check(ranks, scenario, layout, plan="auto", zero_stage=zero, timeout=110)


# ------------------------------------------------------------------------------------------------ checkpoints
def test_f31_files_hold_what_is_in_memory_and_on_disk_and_runs_continue(ranks: Ranks, tmp_path: Path) -> None:
    """Saved in the middle, inside an accumulation window, and when the run is over."""
    plain, own, disk = tmp_path / "plain", tmp_path / "own", tmp_path / "disk"
    plain.mkdir()
    own.mkdir()
    kinds = ("window", "middle")
    expected = on_layout(ranks, None, resumed, plain, [plain / f"{kind}.ckpt" for kind in kinds])[0]
    sources = [origin / f"{kind}.ckpt" for origin, kind in zip((plain, own), kinds, strict=True)]
    zero = ZeroConfig(3, "nvme", str(disk), offload_parameters=True)
    for found in on_layout(ranks, (1, 1, 2), resumed, own, sources, zero_stage=zero):
        assert_same(found, expected, "nvme")
    for file in own.glob("*.ckpt"):
        assert_same_file(file, plain / file.name)
    other = tmp_path / "other"
    other.mkdir()
    (back,) = on_layout(ranks, (1, 1, 1), rest, other, own / "middle.ckpt", zero_stage=ZeroConfig(1, "cpu"))
    assert_same(back, expected[2], "one replica goes on in host memory")
    assert_same_file(other / "final.ckpt", plain / "final.ckpt")


def rest(site: Site, folder: Path, source: Path) -> Any:
    return train(site, folder, TiedGPT(), source, saves=False)


# ------------------------------------------------------------------------------------------------ folders
class Looks(Classifier):
    """Notes the files in the first step, and fails in the second if it is told to."""

    def __init__(self, folder: str, fails: bool) -> None:
        super().__init__()
        self.folder, self.fails = folder, fails

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.trainer.strategy.barrier()
            files = Path(self.folder).glob("*/state.bin")
            self.seen = sorted((file.parent.name.rsplit("-rank-")[1], file.stat().st_size) for file in files)
        elif self.fails:
            raise ArithmeticError("the second step went wrong")


def run(folder: str, fails: bool = False) -> list[tuple[str, int]]:
    module = Looks(folder, fails)
    strategy = ZeroStrategy(3, offload="nvme", nvme_path=folder, offload_parameters=True)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=2, **QUIET)
    try:
        trainer.fit(module, Site((1, 1, 2)).loader(Samples(16), 4))
    except ArithmeticError:
        assert fails
        assert not list(Path(folder).glob(f"*-rank-{trainer.global_rank}")), "nobody will ask for the state any more"
    return module.seen


class Fails(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        raise ArithmeticError("the first validation step went wrong")


def validate(folder: str) -> list[Path]:
    """What is left of this rank's files after a validation that failed, while its trainer is there."""
    strategy = ZeroStrategy(3, offload="nvme", nvme_path=folder, offload_parameters=True)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, **QUIET)
    with pytest.raises(ArithmeticError):
        trainer.validate(Fails(), Site((1, 1, 2)).loader(Samples(16), 4))
    return list(Path(folder).glob(f"*-rank-{trainer.global_rank}"))


def folders(rank: int, world_size: int, folder: str, file: str) -> Any:
    seen = []
    for fails in (False, True):
        seen.append(run(folder, fails))
        gc.collect()  # the trainer goes, whose checkpoints could have been asked for until now
        torch.distributed.barrier()
    failed = validate(folder)
    torch.distributed.barrier()
    left = os.listdir(folder)
    with pytest.raises(ValueError, match="cannot take the optimizer's state") as no_folder:
        run(f"{file}/below")
    with pytest.raises(ValueError, match="nvme_path='/proc/below' cannot take the optimizer's state"):
        run("/proc/below")
    reserve = os.posix_fallocate
    if rank == 1:  # a disk whose space somebody else has taken
        os.posix_fallocate = full
    try:
        with pytest.raises(ValueError, match="cannot take the optimizer's state") as no_space:
            run(folder)
    finally:
        os.posix_fallocate = reserve
    gc.collect()
    torch.distributed.barrier()
    return seen, [*left, *failed], str(no_folder.value), str(no_space.value), os.listdir(folder)


def full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_f31_folders_per_rank_are_gone_after_the_run_and_errors_come_first(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    for seen, left, no_folder, no_space, after in ranks(2, folders, str(folder), str(file), launch="lightning"):
        first, second = seen
        assert [label for label, _ in first] == ["0", "1"]
        assert first == second, "as many bytes in a second run"
        assert all(size > 0 for _, size in first)
        assert (left, after) == ([], [])
        assert f"nvme_path='{file}/below' cannot take the optimizer's state: replica 0 says: " in no_folder
        assert "replica 1 says: [Errno 28] No space left on device; free space there, give a folder on" in no_space


def test_files_stay_on_this_machine() -> None:
    offload = ZeroConfig(2, "nvme")
    with pytest.raises(ValueError, match="offload='nvme' needs a folder on a local disk, not 's3://bucket/run'; give"):
        offload.host_side("s3://bucket/run")
    assert replace(offload, nvme_path="/scratch").host_side("s3://bucket/run") is not None
