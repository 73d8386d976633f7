"""One rank fails, dies, stalls or receives SIGTERM: all ranks end together, soon, and name it."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_parallel.mesh import gradient_group
from lightning_parallel.strategies.failures import FailureWatch
from lightning_parallel.watch import WatchTimes
from tests.glue.oracle import Classifier, Layout, Samples, Site, assert_same, weights
from tests.harness import Ranks, RanksFailed, fork_script
from tests.harness.process import ROOT, end, worker_environment

SCRIPT = ROOT / "tests" / "glue" / "launched.py"
PAIRS: list[Layout] = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
QUICK = WatchTimes(grace=1.0, patience=1.5, notice=1.0)
BATCHES, STOP_IN = 5, 2


# ------------------------------------------------------------------------------------------------ inside of the workers
class Event(Callback):
    """Acts once on one rank, at a hook."""

    def __init__(self, hook: str, rank: int, action: Any) -> None:
        self.rank, self.action, self.count = rank, action, 0
        setattr(self, hook, self.act)

    def act(self, trainer: Trainer, *_: Any) -> None:
        self.count += 1
        if self.count == STOP_IN + 1 and trainer.global_rank == self.rank:
            self.action()


class SaveWhenStopped(Callback):
    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        trainer.save_checkpoint("stopped.ckpt")


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def loader(site: Site) -> DataLoader[Any]:
    return site.loader(Samples(BATCHES * 4), 4)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def run(trainer: Trainer, site: Site, kind: str, module: LightningModule) -> None:
    if kind == "fit":
        trainer.fit(module, loader(site), loader(site))
    elif kind == "validate":
        trainer.validate(module, loader(site), verbose=False)
    else:
        trainer.predict(module, loader(site))


def sigterm_worker(rank: int, world_size: int, layout: Layout, kind: str, hook: str, receiver: int) -> dict[str, Any]:
    """What SIGTERM to one rank came to, and whether the process is as before."""
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    site = Site(layout, rank)
    trainer = site.trainer(
        callbacks=[Event(hook, receiver, send_sigterm), SaveWhenStopped()], max_epochs=3, num_sanity_val_steps=0
    )
    trainer.test(Classifier(), loader(site), verbose=False)
    gradient_group(trainer.strategy.mesh)  # type: ignore[attr-defined] # which training would add, and which stays
    gc.collect()
    files, threads = open_files(), threading.active_count()
    found: dict[str, Any] = {"code": "did not stop"}
    try:
        run(trainer, site, kind, Classifier())
    except SystemExit as stop:
        found = {"code": stop.code, "type": type(stop).__name__}
    found["step"] = trainer.global_step
    found["heard"] = len(heard)
    found["clean"] = [
        signal.getsignal(signal.SIGTERM) is mine,
        signal.set_wakeup_fd(-1) == -1,
        threading.active_count() <= threads,
        open_files() <= files,
    ]
    trainer.strategy.barrier()
    if kind == "fit":
        found["saved"] = torch.load("stopped.ckpt", weights_only=False)["global_step"]
    return found


def fail() -> None:
    raise ValueError("the same on every rank")


def fit_twice(site: Site, callbacks: list[Callback]) -> Classifier:
    """The module of a run that follows a failed one: the failed one's own where no other rank has a part of it."""
    failed = Classifier()
    with pytest.raises(ValueError, match="^the same on every rank$"):
        site.trainer(callbacks=callbacks, enable_checkpointing=True).fit(failed, loader(site))
    assert [type(child) for child in failed.modules()] == [type(child) for child in Classifier().modules()]
    module = failed
    if site.layout is not None and site.layout[:2] != (1, 1):
        copied, batch, module = copy.deepcopy(failed), next(iter(loader(site))), Classifier()
        for use in (
            lambda: site.trainer(max_epochs=1).fit(failed, loader(site)),
            lambda: copied.net(batch["x"]),
            failed.state_dict,
            lambda: failed.load_state_dict(module.state_dict()),
        ):
            with pytest.raises(RuntimeError, match="left each rank's weights where they were.* built anew"):
                use()
    else:
        failed.load_state_dict(Classifier().state_dict())
    site.trainer(max_epochs=1).fit(module, loader(site))
    return module


def again_worker(rank: int, world_size: int, layout: Layout) -> dict[str, Any]:
    """The same exception on every rank, with a checkpoint; then the process trains again."""
    saving = ModelCheckpoint("saved", filename="{step}", every_n_train_steps=100, save_on_exception=True)
    began = time.monotonic()
    module = fit_twice(Site(layout, rank), [Event("on_train_batch_end", rank, fail), saving])
    return {"saved": os.listdir("saved"), "took": time.monotonic() - began, "weights": weights(module)}


def trouble_worker(rank: int, world_size: int, layout: Layout, kind: str) -> None:
    """Rank 1 dies or stalls in a step, or fails alone in its set-up."""

    class Fragile(Classifier):
        def configure_optimizers(self) -> Any:
            if kind == "set-up" and rank == 1:
                raise KeyError("lr")
            return super().configure_optimizers()

    actions = {"dies": lambda: os.kill(os.getpid(), signal.SIGKILL), "stalls": lambda: time.sleep(60)}
    site = Site(layout, rank)
    events = [Event("on_train_batch_start", 1, actions[kind])] if kind in actions else []
    if kind == "stalls":  # first: in the stalling hook rank 0 waits for rank 1, which might ask it for a weight
        events.insert(0, Event("on_train_batch_start", 0, send_sigterm))
    trainer = site.trainer(callbacks=events)
    trainer.strategy._watch = FailureWatch(QUICK)  # type: ignore[attr-defined]
    trainer.fit(Fragile(), loader(site))


# ------------------------------------------------------------------------------------------------ on workers
@pytest.mark.parametrize("receiver", [0, 1])
@pytest.mark.parametrize("layout", PAIRS)
def test_sigterm_stops_all_ranks_at_one_step(ranks: Ranks, layout: Layout, receiver: int) -> None:
    found = ranks(2, sigterm_worker, layout, "fit", "on_train_batch_start", receiver, launch="lightning")
    check_stop(found, receiver, [STOP_IN + 1, STOP_IN + 2])


@pytest.mark.parametrize(
    ("kind", "hook", "steps"),
    [
        ("fit", "on_validation_batch_start", [BATCHES]),
        ("fit", "on_train_epoch_end", [3 * BATCHES]),  # no step is left: the end of the run is where they stop
        ("validate", "on_validation_batch_end", [0]),
        ("predict", "on_predict_batch_start", [0]),
    ],
)
def test_sigterm_outside_of_training_batches(ranks: Ranks, kind: str, hook: str, steps: list[int]) -> None:
    found = ranks(2, sigterm_worker, (1, 2, 1), kind, hook, 1, launch="lightning")
    check_stop(found, 1, steps)


def check_stop(found: list[dict[str, Any]], receiver: int, steps: list[int]) -> None:
    first, second = found
    for rank, each in enumerate(found):
        assert (each["type"], each["code"]) == ("SIGTERMException", 143), each
        assert each["step"] in steps
        assert each.get("saved", each["step"]) == each["step"]
        assert each["heard"] == (rank == receiver), "the user's own handler runs where the signal arrived"
        assert each["clean"] == [True] * 4, "handler, wake-up descriptor, threads and files are as before"
    assert first["step"] == second["step"]


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_a_common_exception_leaves_a_checkpoint_and_a_usable_process(ranks: Ranks, layout: Layout) -> None:
    found = ranks(2, again_worker, layout, launch="lightning")
    module = Classifier()
    Site().trainer(max_epochs=1).fit(module, loader(Site()))
    for each in found:
        assert each["saved"] == [f"step={STOP_IN + 1}.ckpt"]
        assert each["took"] < 20
        assert_same(each["weights"], weights(module), "trained after the failure")


# These calls cost their workers' lives: new ones have to start.
def test_a_rank_that_dies_is_named_by_the_others(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as failure:
        ranks(2, trouble_worker, (1, 1, 2), "dies", launch="lightning")
    assert "the process ended with exit code -9" in str(failure.value)
    named = "this rank was stopped, because rank 1 (stage 0, tensor 0, replica 1) was lost: its process ended"
    assert f"RuntimeError: {named}" in str(failure.value)


def test_a_rank_that_fails_in_set_up_ends_the_others(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as failure:
        ranks(2, trouble_worker, (2, 1, 1), "set-up", launch="lightning")
    assert "KeyError: 'lr'" in str(failure.value)
    ended = (
        "rank 0 (stage 0, tensor 0, replica 0) is ended: rank 1 (stage 0, tensor 1, replica 0) failed: KeyError: 'lr'"
    )
    assert ended in str(failure.value)
    assert "the process ended with exit code 1\n" in str(failure.value)


def test_sigterm_while_a_rank_stalls_ends_all_with_its_code(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as failure:
        ranks(2, trouble_worker, (1, 2, 1), "stalls", launch="lightning")
    text = str(failure.value)
    assert re.findall(r"the process ended with exit code (\d+)", text) == ["143", "143"]
    assert "rank 0 (stage 0, tensor 0, replica 0) received SIGTERM, and no step began here within" in text


# ------------------------------------------------------------------------------------------------ whole scripts
@pytest.mark.parametrize(("layout", "failing"), [((1, 2), 0), ((2, 1), 1)])
def test_an_exception_ends_every_process_with_its_message(
    ranks: Ranks, tmp_path: Path, layout: tuple[int, int], failing: int
) -> None:
    tensor, pipeline = layout
    options = {
        "devices": 2,
        "batch_size": 4,
        "strategy": {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline},
        "trouble": {"rank": failing, "batch": 4, "kind": "raise"},
    }
    arguments = [json.dumps(options), str(tmp_path)]
    (done,) = ranks(1, fork_script, SCRIPT, arguments, tmp_path, launch="none", timeout=110)
    finished = time.time()
    # -9: on a busy machine the failing child may end first, and then Lightning's launcher kills its parent.
    assert done.returncode in (1, -9 if failing else 1), done.output
    assert "ValueError: the data ran away\n" in done.output
    coordinate = f"stage {failing * (pipeline - 1)}, tensor {failing * (tensor - 1)}, replica 0"
    message = f"rank {failing} ({coordinate}) failed: ValueError: the data ran away over two lines"
    assert re.search(rf"rank {1 - failing} \(.*\) is ended: {re.escape(message)}\n", done.output), done.output
    # Both ranks were in this batch; everything ended within 20 seconds of it.
    assert finished - (tmp_path / f"there-{failing}").stat().st_mtime < 20
    assert (tmp_path / f"left-{failing}").read_text() == "ValueError 4"
    wait_until_none_is_left(tmp_path)


@pytest.mark.parametrize(
    ("launcher", "receiver"), [([], 0), (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], 1)]
)
def test_sigterm_from_outside(tmp_path: Path, launcher: list[str], receiver: int) -> None:
    options = {
        "devices": 2,
        "batch_size": 4,
        "epochs": 1000,
        "strategy": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
        "trouble": {"rank": receiver, "batch": 5, "kind": "wait to be killed"},
    }
    with started([*launcher, str(SCRIPT), json.dumps(options), str(tmp_path)], tmp_path) as (process, output):
        pid = int(wait_for_file(tmp_path / f"there-{receiver}", process, output))
        os.kill(pid, signal.SIGTERM)
        killed = time.monotonic()
        code = process.wait(timeout=30)
        text = output()
        assert time.monotonic() - killed < 20
    left = [(tmp_path / f"left-{rank}").read_text() for rank in range(2)]
    assert left[0] == left[1]
    step = int(left[0].removeprefix("SIGTERMException "))
    assert step >= 5
    assert torch.load(tmp_path / "stopped.ckpt", weights_only=False)["global_step"] == step
    if launcher:  # the agent reports its workers' codes, and kills who has left the run but not yet exited
        assert set(codes := re.findall(r"exitcode +: (-?\d+)", text)) <= {"143", "-15"}, text
        assert codes[-1] == "143", f"the first to exit\n{text}"
    else:
        assert code == 143, text
    wait_until_none_is_left(tmp_path)


@contextlib.contextmanager
def started(arguments: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    """A running script and a function that returns what it has written so far."""
    with tempfile.TemporaryFile() as file:

        def output() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process, output
        finally:
            end(process.pid)
            process.wait()


def wait_for_file(path: Path, process: subprocess.Popen[bytes], output: Any) -> str:
    deadline = time.monotonic() + 90
    while not path.exists() or not path.read_text():
        assert process.poll() is None, output()
        assert time.monotonic() < deadline, output()
        time.sleep(0.05)
    return path.read_text()


def wait_until_none_is_left(folder: Path) -> None:
    """No process that was started with this folder as an argument lives on for more than a few seconds."""
    deadline = time.monotonic() + 5
    while living := processes_with(str(folder)):
        assert time.monotonic() < deadline, f"left behind: {living}"
        time.sleep(0.1)


def processes_with(argument: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = file.read_text()
            if argument in command:
                found.append(command.replace("\0", " "))
    return found
