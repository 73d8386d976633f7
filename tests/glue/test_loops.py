"""The training loop of every rank of a layout against one plain process: hooks, counters, limits and gradients."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from tests.glue.oracle import LAYOUTS, Classifier, Layout, Samples, Site, check, weights
from tests.harness import Ranks

MODULE_HOOKS = [
    "setup",
    "teardown",
    "prepare_data",
    "configure_model",
    "configure_optimizers",
    "configure_callbacks",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
]


def hook_names(owner: type) -> list[str]:
    own = [name for name in dir(owner) if name.startswith("on_") and callable(getattr(owner, name))]
    return [*own, *(name for name in MODULE_HOOKS if hasattr(owner, name))]


def recording(base: Any, owner: type, journal: list[Any]) -> Any:
    """A subclass of `base` whose hooks enter themselves in a journal."""

    def recorder(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            numbers = [x for x in (*args, *kwargs.values()) if isinstance(x, int | str)]
            journal.append(f"{owner.__name__}.{name}{numbers or ''}")
            return getattr(super(derived, self), name)(*args, **kwargs)

        return hook

    derived = type(base.__name__, (base,), {name: recorder(name) for name in hook_names(owner)})
    return derived


class Complete(Classifier):
    """Uses every phase: schedulers, clipping, all loaders."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]

    def train_dataloader(self) -> Any:
        return self.site.loader(Samples(20), 4)

    def val_dataloader(self) -> Any:
        return self.site.loader(Samples(6, first=50), 4)

    def test_dataloader(self) -> Any:
        return self.site.loader(Samples(6, first=60), 4)

    def predict_dataloader(self) -> Any:
        return self.site.loader(Samples(8, first=70), 4)


def order_of_hooks(site: Site) -> Any:
    journal: list[Any] = []
    module = recording(Complete, LightningModule, journal)(site)
    callback = recording(Callback, Callback, journal)()
    trainer = site.trainer(callbacks=[callback], accumulate_grad_batches=2, gradient_clip_val=0.5, max_epochs=2)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    trainer.predict(module)
    assert journal.count("LightningModule.prepare_data") == 4 * (site.rank == 0)
    # Where a pipeline is planned, the training data is set up and one batch is looked at before the fit starts.
    start = journal.index("Callback.on_fit_start")
    early = ["LightningModule.train_dataloader", *(x for x in journal[:start] if "batch_transfer" in x)]
    if site.layout is not None and site.layout[1] > 1:
        assert journal.count(early[0]) == 1
        assert early[1:] == [
            "LightningModule.on_before_batch_transfer[0]",
            "LightningModule.on_after_batch_transfer[0]",
        ]
    before = [x for x in journal[:start] if x not in early]
    return [x for x in [*before, *journal[start:]] if x not in (early[0], "LightningModule.prepare_data")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hooks_run_in_lightnings_order(ranks: Ranks, layout: Layout) -> None:
    check(ranks, order_of_hooks, layout)


class Schedule(Classifier):
    """Reports what a run's length depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.estimated: Any = None
        self.seen: list[Any] = []

    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = max(2, int(self.estimated))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        where = (self.current_epoch, batch_idx, self.global_step, self.trainer.is_last_batch)
        self.seen.append(("train", *where, rate, outputs["loss"]))

    def on_validation_end(self) -> None:
        progress = self.trainer.fit_loop.epoch_loop.val_loop.batch_progress
        self.seen.append(("validation", self.trainer.sanity_checking, progress.current.ready, self.global_step))


LENGTHS: list[dict[str, Any]] = [
    {"limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1},
    {"limit_train_batches": 0.5, "limit_val_batches": 0.5, "accumulate_grad_batches": 2},
    {"overfit_batches": 1, "max_epochs": 3},
    {"fast_dev_run": 2},
    {"max_steps": 4, "max_epochs": -1, "val_check_interval": 2},
    {"val_check_interval": 3, "check_val_every_n_epoch": None, "limit_val_batches": 1},
    {"val_check_interval": 7, "check_val_every_n_epoch": None, "inference_mode": False, "profiler": "simple"},
    {"barebones": True},
    {"detect_anomaly": True, "max_epochs": 1},
    {"max_time": timedelta(0), "max_epochs": 5},
    {"limit_train_batches": 0},
    {"min_epochs": 1, "max_epochs": 1, "reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": -1},
]


def lengths_of_runs(site: Site) -> Any:
    found = []
    for length in LENGTHS:
        module = Schedule()
        trainer = site.trainer(**length)
        trainer.fit(module, site.loader(Samples(18), 4), site.loader(Samples(11, first=100), 4))
        counts = (trainer.global_step, trainer.current_epoch, trainer.num_training_batches, trainer.num_val_batches)
        found.append({"estimated": module.estimated, "seen": module.seen, "counts": counts, "weights": weights(module)})
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_have_the_length_of_a_plain_run(ranks: Ranks, layout: Layout) -> None:
    check(ranks, lengths_of_runs, layout)


class StopsOnOneRank(Callback):
    """Asks for the end of the run on a single rank, from a hook of its own choice."""

    def __init__(self, hook: str, me: bool) -> None:
        self.hook, self.me = hook, me

    def ask(self, hook: str, trainer: Trainer) -> None:
        if self.me and hook == self.hook and trainer.global_step >= 2 and not trainer.sanity_checking:
            trainer.should_stop = True

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.ask("on_train_batch_start", trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.ask("on_train_batch_end", trainer)

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self.ask("on_validation_end", trainer)

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        self.ask("on_train_epoch_end", trainer)


def stop_on_one_rank(site: Site) -> Any:
    found = []
    last = 0 if site.layout is None else site.layout[0] * site.layout[1] * site.layout[2] - 1
    for hook in ("on_train_batch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end"):
        module = Schedule()
        trainer = site.trainer(callbacks=[StopsOnOneRank(hook, site.rank == last)], max_epochs=3)
        trainer.fit(module, site.loader(Samples(16), 4), site.loader(Samples(8, first=100), 4))
        found.append((hook, trainer.global_step, trainer.current_epoch, module.seen))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_single_rank_can_end_the_run(ranks: Ranks, layout: Layout) -> None:
    check(ranks, stop_on_one_rank, layout)


class EndsEpoch(Schedule):
    """Ends an epoch before one of its batches, on a single rank; inside a window of accumulation, too."""

    def __init__(self, batch: int, me: bool) -> None:
        super().__init__()
        self.batch, self.me = batch, me

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.seen.append(("start", self.current_epoch, batch_idx))
        return -1 if self.me and (self.current_epoch, batch_idx) == (0, self.batch) else None


def end_of_an_epoch_on_one_rank(site: Site) -> Any:
    found = []
    last = 0 if site.layout is None else site.layout[0] * site.layout[1] * site.layout[2] - 1
    for batch, who, accumulated in ((0, last, 1), (2, last, 1), (3, 0, 2)):
        module = EndsEpoch(batch, site.rank == who)
        trainer = site.trainer(accumulate_grad_batches=accumulated)
        trainer.fit(module, site.loader(Samples(20), 4), site.loader(Samples(8, first=100), 4))
        # The hook is the user's again, as it was.
        assert "on_train_batch_start" not in vars(module)
        found.append((trainer.global_step, trainer.current_epoch, module.seen, weights(module)))
    assert [run[0] for run in found] == [5, 7, 4]
    return found


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 2)], ids=str)
def test_a_single_rank_can_end_the_epoch(ranks: Ranks, layout: Layout) -> None:
    check(ranks, end_of_an_epoch_on_one_rank, layout)


class Clocks(Callback):
    """Lets the time of a run, or the time until the next validation, be over on one rank; notes where it validates."""

    def __init__(self, stops_at: int | None = None, validates_at: int | None = None) -> None:
        self.stops_at, self.validates_at = stops_at, validates_at
        self.validated: list[int] = []

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        limit = self.stops_at
        for timer in (c for c in trainer.callbacks if isinstance(c, Timer)):  # type: ignore[attr-defined]
            over = lambda *_: 1e9 if limit is not None and trainer.global_step >= limit else 0.0  # noqa: E731
            timer.time_elapsed = over  # type: ignore[method-assign]

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.validates_at:
            trainer._last_val_time = -1e9  # type: ignore[attr-defined]

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.validated.append(trainer.global_step)


def clocks(site: Site) -> Any:
    """Rank 0 has the clock of `max_time`; whose validation is due first makes all validate."""
    last = 0 if site.layout is None else site.layout[0] * site.layout[1] * site.layout[2] - 1
    runs: list[tuple[Clocks, dict[str, Any]]] = [
        (Clocks(stops_at=3 if site.rank == 0 else 99), {"max_time": timedelta(hours=1)}),
        (Clocks(stops_at=2 if site.rank == last > 0 else 5), {"max_time": timedelta(hours=1)}),
        (
            Clocks(validates_at=3 if site.rank == last else None),
            {"val_check_interval": timedelta(hours=1), "check_val_every_n_epoch": None},
        ),
    ]
    found = []
    for clock, options in runs:
        trainer = site.trainer(callbacks=[clock], num_sanity_val_steps=0, **options)
        module = Classifier()
        trainer.fit(module, site.loader(Samples(16), 4), site.loader(Samples(8, first=100), 4))
        found.append((trainer.global_step, trainer.current_epoch, clock.validated, weights(module)))
    assert [run[0] for run in found] == [3, 5, 8]
    assert found[2][2] == [3]
    return found


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 2)], ids=str)
def test_clocks_that_disagree_make_no_difference(ranks: Ranks, layout: Layout) -> None:
    check(ranks, clocks, layout)
