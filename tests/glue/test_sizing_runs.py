"""Callbacks over more than one run: a measured speed sizes the next, resumes keep sizes, a second fit starts anew."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_parallel.callbacks import (
    ChinchillaSizer,
    ComputeBudget,
    ScalingLawRecorder,
    ScalingMonitor,
    ThroughputMonitor,
)
from lightning_parallel.scaling.plan import SizingGoal
from lightning_parallel.scaling.runs import read_runs
from lightning_parallel.scaling.speeds import Speed, append_speed, first_speed
from tests.clock import Clock
from tests.glue.test_sizing_refusals import LENGTH, RULE, Sized, Stream, built, parameters, trainer

STEP = 4 * LENGTH


def sized(goal: SizingGoal, resume: Path | None = None) -> tuple[Any, ChinchillaSizer, Sized]:
    sizer, module = ChinchillaSizer(goal, STEP, rule=RULE), Sized()
    run = trainer(sizer)
    run.fit(module, ckpt_path=resume)
    return run, sizer, module


def test_device_hours_become_a_budget_by_the_speed_of_an_earlier_run(tmp_path: Path) -> None:
    table = tmp_path / "deep" / "speeds.csv"
    # What the user counts for the utilization is not what the laws count.
    monitor = ThroughputMonitor(clock=Clock(), table=table, flops_per_token=1e9, peak_flops=1e12)
    trainer(monitor, max_steps=3, log_every_n_steps=2).fit(built())
    # Two stretches, the last one of a single step: 3 batches within 1 s.
    expected = Speed(6 * parameters(1) * 3 * STEP, parameters(1), 1.0, 3 * STEP)
    assert first_speed(table) == expected
    hours = 2e7 / expected.flops_per_second / 3600
    goal = SizingGoal(device_hours=hours, flops_per_second=table)
    run, sizer, module = sized(goal)
    by_hand = SizingGoal(flops=2e7)
    assert goal.budget == pytest.approx(2e7)
    assert goal.params() == pytest.approx(by_hand.params())
    assert sizer.plan is not None
    assert run.global_step == sizer.plan.steps == by_hand.plan(sizer.plan.params, STEP).steps
    assert sizer.speed == expected
    # Resumed after something faster was measured, the run is still the one that was begun; a new file makes a new one.
    saved = tmp_path / "sized.ckpt"
    run.save_checkpoint(saved)
    faster, other = Speed(1e3 * expected.flops_per_second, 1e6, 1.0, 1e6), tmp_path / "other.csv"
    append_speed(table, faster)
    append_speed(other, faster)
    again, resumed, same = sized(goal, saved)
    assert (resumed.chosen, resumed.plan) == (sizer.chosen, sizer.plan)
    assert again.global_step == run.global_step
    assert dict(same.hparams) == dict(module.hparams)
    with pytest.raises(RuntimeError, match="size mismatch"):
        sized(SizingGoal(device_hours=hours, flops_per_second=str(other)), saved)


def test_a_speed_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "speeds.csv"
    for text, message in (
        (None, r"the speed of an earlier run cannot be read .*ThroughputMonitor\(table="),
        ("", "holds no speed of a run; .* the columns flops_per_second, params, devices, tokens_per_second"),
        ("params,tokens,flops,loss\n1,1,6,2\n", "holds no speed of a run"),
        ("flops_per_second,params,devices,tokens_per_second\nnan,1,1,1\n", "first row: flops_per_second=nan is not"),
        ("flops_per_second,params,devices,tokens_per_second\n1e9,1\n", "first row: devices=nan is not"),
    ):
        if text is not None:
            table.write_text(text)
        with pytest.raises(ValueError, match=message):
            sized(SizingGoal(device_hours=1, flops_per_second=str(table)))
    with pytest.raises(ValueError, match="device_hours=inf is not within"):
        SizingGoal(device_hours=math.inf, flops_per_second=table)


def test_a_run_without_a_step_has_no_speed(tmp_path: Path) -> None:
    table = tmp_path / "speeds.csv"
    trainer(ThroughputMonitor(table=table), max_steps=0).fit(built())
    assert not table.exists()


def test_a_second_fit_of_the_same_callbacks_counts_its_own_run(tmp_path: Path) -> None:
    """Another model, another trainer: nothing of the first run is left in sizes, tokens, budgets or rates."""
    table = tmp_path / "runs.csv"
    budget, monitor = ComputeBudget(1e9), ScalingMonitor()
    recorder, speed = ScalingLawRecorder(table, loss="loss"), ThroughputMonitor(clock=Clock())
    for layers, steps in ((1, 3), (2, 2)):
        run = trainer(budget, monitor, recorder, speed, max_steps=steps, log_every_n_steps=1)
        run.fit(Sized(layers, 8 * layers, 1))
        assert budget.tokens == monitor.tokens == recorder.tokens == steps * STEP
        assert budget.spent == 6 * parameters(layers) * steps * STEP
        assert speed.figures(1)["steps_per_second"] == pytest.approx(2.0)
        assert monitor.outlook is not None
        assert monitor.outlook.params == parameters(layers)
    # The same trainer goes on: there the run is one.
    run.fit_loop.epoch_loop.max_steps = 4
    run.fit(run.lightning_module)
    assert budget.tokens == monitor.tokens == recorder.tokens == 4 * STEP
    assert [(row.params, row.tokens) for row in read_runs(table).runs] == [
        (parameters(1), 3 * STEP),
        (parameters(2), 2 * STEP),
        (parameters(2), 4 * STEP),
    ]


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"overfit_batches": 2, "max_epochs": 3}, 6),
        ({"max_steps": -1, "max_epochs": 2, "limit_train_batches": 3}, 6),
        ({"max_steps": 5, "max_epochs": -1}, 5),
    ],
)
def test_other_ways_to_end_a_run(options: dict[str, Any], seen: int) -> None:
    monitor = ScalingMonitor()
    trainer(monitor, log_every_n_steps=1, **options).fit(built())
    assert monitor.tokens == seen * STEP
    assert monitor.outlook is not None
    assert monitor.outlook.final is not None
    assert monitor.outlook.final.tokens == pytest.approx(seen * STEP)
    assert monitor.outlook.seconds_left == 0.0


def test_a_run_without_an_end_is_stopped_by_its_budget() -> None:
    budget, monitor = ComputeBudget(6.5e6 * STEP, flops_per_token=1e6), ScalingMonitor()
    run = trainer(budget, monitor, max_steps=-1, max_epochs=-1, log_every_n_steps=1)
    run.fit(built(), DataLoader(Stream(), batch_size=4))
    # Eleven samples per epoch: steps of 4, 4, 3, 4, 4, 3 are 22, and another 4 would be 26.
    assert run.global_step == 7
    assert monitor.tokens == budget.tokens == 26 * LENGTH


@pytest.mark.parametrize("kind", [ScalingMonitor, ThroughputMonitor])
def test_two_that_log_the_same_names_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"two {kind.__name__} callbacks write under the same names"):
        trainer(kind(), kind(), max_steps=1).fit(built())


def test_losses_are_recorded_apart_and_a_table_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    tables = [tmp_path / name for name in ("a.csv", "b.csv")]
    recorders = [ScalingLawRecorder(tables[0], loss="loss"), ScalingLawRecorder(tables[1], loss="other")]
    module = built()
    module.on_train_batch_end = lambda *args: module.log("other", 3.0)  # type: ignore[method-assign]
    run = trainer(*recorders, max_steps=2)
    run.fit(module)
    assert [read_runs(table).runs[0].tokens for table in tables] == [2 * STEP] * 2
    assert read_runs(tables[1]).runs[0].loss == 3.0
    file = tmp_path / "file"
    file.write_text("")
    for path in (tmp_path, file / "runs.csv"):
        for callback in (ScalingLawRecorder(path, loss="loss"), ThroughputMonitor(table=path)):
            module = built()
            with pytest.raises(ValueError, match="is a folder; name a file in it|cannot be written: check who may"):
                trainer(callback, max_steps=1).fit(module)
            assert module.sizes == [], "no step was taken"
