"""Runs that end, pause or begin where nobody expects it: in mid-accumulation, by epochs, with other sizes than said."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader

from lightning_parallel.callbacks import (
    ChinchillaSizer,
    ComputeBudget,
    MicroBatchSizer,
    ScalingLawRecorder,
    ScalingMonitor,
    ThroughputMonitor,
    count_tokens,
)
from lightning_parallel.scaling.plan import SizingGoal
from tests.glue.test_sizing_refusals import LENGTH, RULE, Sized, Stream, built, three_layers, trainer

STEP = 4 * LENGTH
GOAL = SizingGoal(flops=2e7, law="twenty")


def budget_of(steps: float, **options: Any) -> ComputeBudget:
    return ComputeBudget(1e6 * STEP * steps, flops_per_token=1e6, **options)


class At(Callback):
    """Does something at the end of the fifth batch, before the callbacks after it hear of that end."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.action(run)


def stop(run: Any) -> None:
    run.should_stop = True


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_batch_counts_once_over_a_resume_in_the_middle_of_a_step(accumulate: int, tmp_path: Path) -> None:
    path, counted = tmp_path / "middle.ckpt", []
    for resume in (None, path):
        budget, monitor = budget_of(100), ScalingMonitor()
        save = At(lambda run: run.save_checkpoint(path))
        run = trainer(save, budget, monitor, accumulate_grad_batches=accumulate, max_epochs=1)
        run.fit(built(), ckpt_path=resume)
        counted.append((budget.tokens, monitor.tokens, budget.spent, budget._meter.largest_step))
    assert counted == [(16 * STEP, 16 * STEP, 16e6 * STEP, accumulate * STEP)] * 2


def test_batches_that_training_left_without_a_step_were_spent(tmp_path: Path) -> None:
    budget, monitor = budget_of(100), ScalingMonitor()
    recorder = ScalingLawRecorder(tmp_path / "runs.csv", loss="loss")
    run = trainer(budget, monitor, recorder, At(stop), accumulate_grad_batches=3, max_epochs=1)
    run.fit(built())
    assert run.global_step == 1
    assert budget.tokens == monitor.tokens == recorder.tokens == 5 * STEP


class Skipping(Sized):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


def test_a_batch_at_which_the_module_ends_its_epoch_is_not_counted() -> None:
    module, callbacks = Skipping(1, 8, 1), (budget_of(100), ScalingMonitor())
    module.configure_model()
    trainer(*callbacks, max_epochs=2).fit(module)
    assert [callback.tokens for callback in callbacks] == [6 * STEP] * 2


@pytest.mark.parametrize("least", [{"min_steps": 10}, {"min_epochs": 2}])
def test_a_trainer_that_would_go_on_after_the_budget_is_refused(least: dict[str, int]) -> None:
    module = built()
    with pytest.raises(ValueError, match=r"makes the Trainer go on when ComputeBudget stops it; leave out one"):
        trainer(budget_of(3), max_epochs=4, **least).fit(module)
    assert module.sizes == []


def test_a_checkpoint_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    module = built()
    with pytest.raises(ValueError, match="is a folder; name a file in it"):
        trainer(budget_of(3, checkpoint=tmp_path), max_epochs=1).fit(module)
    assert module.sizes == []


def test_a_smaller_budget_than_was_spent_ends_a_resumed_run_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(budget_of(5), max_epochs=1)
    run.fit(built())
    run.save_checkpoint(tmp_path / "five.ckpt")
    again = trainer(budget_of(3), max_epochs=2)
    with caplog.at_level("INFO"):
        again.fit(built(), ckpt_path=tmp_path / "five.ckpt")
    assert again.global_step == 5
    assert "1.6e+08 of 9.6e+07 FLOPs were spent before this run" in caplog.text


def test_the_monitor_expects_the_end_that_comes_first() -> None:
    for options, steps in (({"max_epochs": -1}, 5), ({"max_steps": 4}, 4), ({"max_epochs": 3}, 5)):
        monitor = ScalingMonitor()
        run = trainer(monitor, budget_of(5.5), log_every_n_steps=2, **options)
        run.fit(built())
        assert run.global_step == steps
        assert monitor.outlook is not None
        assert monitor.outlook.final is not None
        assert monitor.outlook.final.tokens == steps * STEP
    schedule = GradientAccumulationScheduler({0: 1, 1: 4})
    trainer(monitor, schedule, max_epochs=2, log_every_n_steps=1).fit(built())
    assert (monitor.tokens, monitor.outlook.final) == (32 * STEP, None)


def test_a_small_run_is_not_compared_with_large_ones_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    module = built()
    module.on_train_batch_end = lambda *args: module.log("val_loss", 2.5)  # type: ignore[method-assign]
    with caplog.at_level("INFO"):
        trainer(ScalingMonitor(), max_steps=1).fit(module)
    assert "observed val_loss 2.5000" in caplog.text
    assert "(published fits: " in caplog.text
    assert "FLOPs are far less than 'besiroglu' was fitted to: its losses mean nothing there" in caplog.text


def test_epochs_that_end_a_sized_run_early_are_said_at_its_start() -> None:
    run = trainer(ChinchillaSizer(GOAL, STEP, rule=RULE), limit_train_batches=2, max_epochs=3)
    with pytest.warns(UserWarning, match=r"max_epochs=3 ends the run after 6 of the \d+ steps chosen; set"):
        run.fit(Sized())


def test_a_rehearsal_takes_the_size_and_its_own_steps(recwarn: pytest.WarningsRecorder) -> None:
    module = Sized()
    run = trainer(ChinchillaSizer(SizingGoal(tokens=9 * STEP), STEP, rule=three_layers), fast_dev_run=2)
    run.fit(module)
    assert (run.global_step, module.hparams["layers"]) == (2, 3)
    assert not [warning for warning in recwarn if "steps chosen" in str(warning.message)]


@pytest.mark.parametrize(("accumulate", "said"), [(2, STEP), (1, 2 * STEP)])
def test_a_step_of_another_size_than_said_is_noticed(
    accumulate: int, said: int, recwarn: pytest.WarningsRecorder
) -> None:
    sizer = ChinchillaSizer(SizingGoal(tokens=4 * said), said, rule=three_layers)
    trainer(sizer, accumulate_grad_batches=accumulate, max_epochs=-1).fit(Sized())
    (text,) = (str(warning.message) for warning in recwarn if "tokens_per_step" in str(warning.message))
    assert f"the first step had {accumulate * STEP} tokens, not tokens_per_step={said}" in text


def test_a_step_of_the_size_said_is_not_spoken_of(recwarn: pytest.WarningsRecorder) -> None:
    for tokens_fn in (None, len):  # one that counts, one that cannot be right: samples instead of tokens
        sizer = ChinchillaSizer(SizingGoal(tokens=4 * STEP), STEP, rule=three_layers, tokens_fn=tokens_fn)
        trainer(sizer, max_epochs=-1).fit(Sized())
        found = [str(warning.message) for warning in recwarn if "tokens_per_step" in str(warning.message)]
        assert len(found) == (0 if tokens_fn is None else 1)


class Evaluated(Sized):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        assert self.net is not None
        self.log("mean", self.net(batch).mean())

    def test_dataloader(self) -> Any:
        return self.train_dataloader()


def test_a_sized_checkpoint_is_tested_in_a_new_process(tmp_path: Path) -> None:
    def sizer() -> ChinchillaSizer:
        return ChinchillaSizer(SizingGoal(tokens=2 * STEP), STEP, rule=three_layers)

    run = trainer(sizer(), max_epochs=-1)
    run.fit(Evaluated())
    expected = run.test(run.lightning_module, verbose=False)
    run.save_checkpoint(tmp_path / "sized.ckpt")
    assert trainer(sizer()).test(Evaluated(), ckpt_path=tmp_path / "sized.ckpt", verbose=False) == expected


def test_a_model_without_a_size_is_not_tried() -> None:
    sizer = ChinchillaSizer(GOAL, STEP, rule=RULE)
    with pytest.raises(ValueError, match="put ChinchillaSizer before it in callbacks"):
        trainer(MicroBatchSizer(), sizer).fit(Sized())
    tried = MicroBatchSizer()
    trainer(ChinchillaSizer(SizingGoal(tokens=2 * STEP), STEP, rule=three_layers), tried, max_epochs=-1).fit(Sized())
    assert tried.micro_batch == 4


def test_rows_are_not_added_under_the_names_of_others(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    for header in ("flops_per_second,params,devices,tokens_per_second", "N,loss,D,note", "params;tokens;flops;loss"):
        table.write_text(f"{header}\n1,1,1,1\n")
        callbacks: list[Callback] = [ScalingLawRecorder(table, loss="loss")]
        callbacks += [] if header.startswith("flops_per") else [ThroughputMonitor(table=table)]
        for callback in callbacks:
            module = built()
            with pytest.raises(ValueError, match=r"table.csv has the columns .*, not .*; name another file"):
                trainer(callback, max_steps=1).fit(module)
            assert module.sizes == []
        assert table.read_text() == f"{header}\n1,1,1,1\n"
    table.write_bytes(b"\xef\xbb\xbfparams,tokens,flops,loss\r\n1,2,12,3\r\n")
    trainer(ScalingLawRecorder(table, loss="loss"), max_steps=1).fit(built())
    assert table.read_text().count("\n") == 3


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (lambda value: MicroBatchSizer(limit=value), ("8", 2.5, math.nan, math.inf, True)),
        (lambda value: MicroBatchSizer(optimizer_bytes=value), (None, math.nan, -1)),
        (lambda value: ThroughputMonitor(window=value), (None, 0, 2.0, "5")),
        (lambda value: ChinchillaSizer(value, 4), (None, 1e18)),
        (lambda value: ChinchillaSizer(GOAL, 4, rule=value), (64, "aspect")),
        (lambda value: ScalingMonitor(tokens_fn=value), (5, "numel")),
        (ComputeBudget, (10**400, "1e18", None, True)),
    ],
)
def test_values_of_another_kind_are_refused_at_once(kind: Any, wrong: tuple[Any, ...]) -> None:
    for value in wrong:
        with pytest.raises(ValueError, match=r"must be a|is not within"):
            kind(value)


@pytest.mark.parametrize(
    "batch", [torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.bool), torch.zeros(4).long()]
)
def test_images_masks_and_classes_are_no_tokens(batch: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="cannot tell the number of tokens"):
        count_tokens(batch)


def test_streams_end_by_epochs_that_nobody_knows_or_by_the_budget() -> None:
    loader = DataLoader(Stream(), batch_size=4)
    for epochs, final in ((1, None), (-1, 3)):
        monitor = ScalingMonitor()
        trainer(monitor, budget_of(3), max_epochs=epochs, log_every_n_steps=1).fit(built(), loader)
        assert monitor.outlook is not None
        assert (monitor.outlook.final is None) == (final is None)
