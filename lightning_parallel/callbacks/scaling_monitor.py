"""Glue: tells while a run trains whether its size and length fit together, and what loss to expect at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_parallel.callbacks.compute_budget import last_step_of_budgets
from lightning_parallel.callbacks.counting import BatchCounter, TokenCallback, last_step, log_interval
from lightning_parallel.scaling.laws import DEFAULT_LAW, Law, get_law
from lightning_parallel.scaling.meter import RateWindow
from lightning_parallel.scaling.outlook import Outlook, caveat, loss_band, outlook

__all__ = ["ScalingMonitor"]


class ScalingMonitor(TokenCallback):
    """Logs ``scaling/...``: tokens, tokens per parameter, FLOPs, expected loss now and at the end, and the time left.

    At the end it says in one sentence whether the run was undertrained, near-optimal or overtrained, and how the
    observed loss compares. The end is that of the Trainer, or of a `ComputeBudget` beside this if it is nearer. A run
    whose end nobody knows (iterable data without a size and no ``max_steps``, accumulation that changes between epochs)
    is judged by what it has seen, without a prediction of its end.

    Args:
        law: name of a law, or a `Law` of a fit of one's own; the loss of published laws is that of their data and
            tokenizer.
        loss: key of the observed loss among the logged values, compared at the end if it is there.
        params: parameters of the whole model; counted if None.
        tokens_fn: tokens of a batch; see `lightning_parallel.callbacks.count_tokens`.
    """

    def __init__(
        self,
        law: str | Law = DEFAULT_LAW,
        loss: str = "val_loss",
        params: float | None = None,
        tokens_fn: Callable[[Any], int] | None = None,
    ) -> None:
        self.law = get_law(law)
        self.loss = loss
        self.tokens = 0.0
        self.outlook: Outlook | None = None
        self._counter = BatchCounter(params, tokens_fn)
        self._window = RateWindow(10)
        self._steps = 0

    def restart(self) -> None:
        """Nothing was seen yet."""
        super().restart()
        self.outlook = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the parameters."""
        self._counter.start(trainer, pl_module)
        self._steps = trainer.global_step
        self._window.clear()
        self._window.add(time.perf_counter(), 0, 0, 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Every ``log_every_n_steps`` optimizer steps, counts and logs."""
        self._counter.finish()
        if trainer.global_step - self._steps >= log_interval(trainer):
            self._look(trainer)
            if self.outlook is not None:
                figures = self.outlook.figures().items()
                pl_module.log_dict({f"scaling/{name}": value for name, value in figures}, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says how the run was sized."""
        self._look(trainer)
        if self.outlook is not None:
            rank_zero_info(
                f"ScalingMonitor: {self.outlook.now}{self._comparison(trainer, self.outlook.now.loss)}"
                f"{caveat(self.outlook.flops, self.law)}"
            )

    def _look(self, trainer: Trainer) -> None:
        before, steps = self.tokens, trainer.global_step - self._steps
        tokens, samples = self._counter.take(trainer)
        self.tokens, self._steps = before + tokens, trainer.global_step
        self._window.add(time.perf_counter(), steps, samples, tokens)
        if self.tokens < 1:
            return
        rates = self._window.rates()
        speed = None if rates is None else rates.tokens_per_second
        self.outlook = outlook(self._counter.size, self.tokens, self._planned(trainer), speed, self.law)

    def _planned(self, trainer: Trainer) -> float | None:
        by_itself = last_step(trainer)
        if by_itself is None or trainer.global_step == 0:
            return None
        steps = min(by_itself, last_step_of_budgets(trainer))
        return None if math.isinf(steps) else self.tokens * max(1.0, steps / trainer.global_step)

    def _comparison(self, trainer: Trainer, expected: float) -> str:
        observed = trainer.callback_metrics.get(self.loss)
        if not isinstance(observed, torch.Tensor):
            return ""
        text = f"; observed {self.loss} {float(observed):.4f}, {float(observed) - expected:+.4f} from the expected one"
        low, high = loss_band(self._counter.size, self.tokens, self.law)
        return text if low == high else f"{text} (published fits: {low:.4f} .. {high:.4f})"
