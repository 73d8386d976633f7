"""Glue: speed of training, with every sample and token counted once, however many ranks work on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_parallel.callbacks.counting import BatchCounter, CountingCallback, log_interval
from lightning_parallel.scaling.laws import FLOPS_PER_PARAM_AND_TOKEN
from lightning_parallel.scaling.meter import RateWindow

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
    """

    def __init__(
        self,
        window: int = 10,
        tokens_fn: Callable[[Any], int] | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        for name, value in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r} must be positive, such as 6e9")
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._counter = BatchCounter(tokens_fn=tokens_fn)
        self._window = RateWindow(window)
        self._clock = clock
        self._steps = 0
        self._paused = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        if self.flops_per_token is None:
            self._counter.start(trainer, pl_module)
            self.flops_per_token = FLOPS_PER_PARAM_AND_TOKEN * self._counter.size
        self._steps = trainer.global_step
        self._window.add(self._clock(), 0, 0, 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts, and logs the rates when a stretch is over."""
        self._counter.finish()
        steps = trainer.global_step - self._steps
        if steps < log_interval(trainer):
            return
        self._steps = trainer.global_step
        tokens, samples = self._counter.take(trainer)
        self._window.add(self._clock(), steps, samples, tokens)
        rates = self.figures(trainer.world_size)
        pl_module.log_dict({f"throughput/{name}": value for name, value in rates.items()}, batch_size=1)

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
        if self.peak_flops is not None and self.flops_per_token is not None:
            found["mfu"] = rates.tokens_per_second * self.flops_per_token / (devices * self.peak_flops)
        return found

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A pause begins."""
        self._paused = self._clock()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A pause ends."""
        self._window.shift(self._clock() - self._paused)
