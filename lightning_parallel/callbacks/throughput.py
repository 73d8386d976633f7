"""Glue: speed of training, with every sample and token counted once, however many ranks work on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_parallel.callbacks.counting import BatchCounter, CountingCallback, log_interval, refuse_unwritable
from lightning_parallel.scaling.checks import COUNTS, check_range
from lightning_parallel.scaling.laws import FLOPS_PER_PARAM_AND_TOKEN
from lightning_parallel.scaling.meter import RateWindow
from lightning_parallel.scaling.speeds import SPEED_COLUMNS, Speed, append_speed

__all__ = ["ThroughputMonitor"]


class ThroughputMonitor(CountingCallback):
    """Logs ``throughput/...``: steps, samples and tokens per second of the whole job and tokens per device.

    Lightning's own monitor multiplies by the number of processes, which counts a sample once per tensor rank and stage.
    Counts are summed over replicas every ``log_every_n_steps`` optimizer steps. Validation is left out of the time.

    Args:
        window: how many of these stretches to average over.
        tokens_fn: tokens of a batch; see `lightning_parallel.callbacks.count_tokens`.
        flops_per_token: training FLOPs of one token; 6 per parameter of the whole model if None.
        peak_flops: FLOPs per second of one device; with it ``throughput/mfu`` is logged.
        clock: reading of a clock in seconds.
        table: CSV file to which rank 0 adds the speed at the end of training, for a `SizingGoal` in device hours.

    Raises:
        ValueError: a number is not positive; at set-up: the file cannot be written, or there is another such monitor.
    """

    def __init__(
        self,
        window: int = 10,
        tokens_fn: Callable[[Any], int] | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        table: str | Path | None = None,
    ) -> None:
        for name, value in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops)):
            if value is not None:
                check_range(name, value, COUNTS, "6e9")
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.table = None if table is None else Path(table)
        self._per_token = flops_per_token
        self._counter = BatchCounter(tokens_fn=tokens_fn)
        self._window = RateWindow(window)
        self._clock = clock
        self._steps = 0
        self._paused = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begins anew."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self.table is not None:
            refuse_unwritable(trainer, self.table, SPEED_COLUMNS)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        if self.flops_per_token is None or self.table is not None:
            self._counter.start(trainer, pl_module)
        self._per_token = self.flops_per_token or FLOPS_PER_PARAM_AND_TOKEN * self._counter.size
        self._steps = trainer.global_step
        self._window.clear()
        self._window.add(self._clock(), 0, 0, 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts, and logs the rates when a stretch is over."""
        self._counter.finish()
        if trainer.global_step - self._steps < log_interval(trainer):
            return
        self._mark(trainer)
        rates = self.figures(trainer.world_size)
        pl_module.log_dict({f"throughput/{name}": value for name, value in rates.items()}, batch_size=1)

    def _mark(self, trainer: Trainer) -> None:
        """A stretch is over."""
        steps, self._steps = trainer.global_step - self._steps, trainer.global_step
        tokens, samples = self._counter.take(trainer)
        self._window.add(self._clock(), steps, samples, tokens)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds the speed to the table; a run without a step has none."""
        if self.table is None:
            return
        if trainer.global_step > self._steps:
            self._mark(trainer)
        rates = self.figures(trainer.world_size)
        if rates and trainer.is_global_zero:
            per_device, size = rates["tokens_per_second_per_device"], self._counter.size
            # In the FLOPs of the laws, whatever the user counts for the utilization: their budgets are 6ND.
            flops = FLOPS_PER_PARAM_AND_TOKEN * size * per_device
            append_speed(self.table, Speed(flops, size, trainer.world_size, rates["tokens_per_second"]))

    def figures(self, devices: int) -> dict[str, float]:
        """The latest rates of a job on so many devices; empty until a stretch is over."""
        rates = self._window.rates()
        if rates is None:
            return {}
        found = {
            "steps_per_second": rates.steps_per_second,
            "samples_per_second": rates.samples_per_second,
            "tokens_per_second": rates.tokens_per_second,
            "tokens_per_second_per_device": rates.tokens_per_second / devices,
        }
        if self.peak_flops is not None and self._per_token is not None:
            found["mfu"] = rates.tokens_per_second * self._per_token / (devices * self.peak_flops)
        return found

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A pause begins."""
        self._paused = self._clock()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A pause ends."""
        self._window.shift(self._clock() - self._paused)
