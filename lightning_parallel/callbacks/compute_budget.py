"""Glue: stops training when a budget of FLOPs is spent."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_parallel.callbacks.counting import BatchCounter, CountingCallback, refuse_unwritable
from lightning_parallel.scaling.checks import BUDGETS, check_range
from lightning_parallel.scaling.laws import FLOPS_PER_PARAM_AND_TOKEN
from lightning_parallel.scaling.meter import ROUNDING, ComputeMeter
from lightning_parallel.strategies import _compat

__all__ = ["ComputeBudget", "last_step_of_budgets"]


def last_step_of_budgets(trainer: Trainer) -> float:
    """The optimizer step after which a `ComputeBudget` of the trainer is going to stop it; infinite without one."""
    budgets = (callback for callback in _compat.callbacks_of(trainer) if isinstance(callback, ComputeBudget))
    return min((budget.last_step for budget in budgets), default=math.inf)


class ComputeBudget(CountingCallback):
    """Counts the FLOPs that training spends and stops before the optimizer step that would exceed the budget.

    All ranks stop after the same step: once per optimizer step the replicas add up how many tokens they had, which is
    one small message. What a resumed run had spent before counts, batches of an unfinished step included. The next step
    is taken to be as large as the largest so far: with batches of one size, the last one of an epoch excepted, the
    budget is never exceeded.

    Args:
        flops: the budget.
        flops_per_token: training FLOPs of one token; 6 per parameter of the whole model if None.
        tokens_fn: tokens of a batch; see `lightning_parallel.callbacks.count_tokens`.
        checkpoint: file to save when the budget is spent; None saves nothing, `ModelCheckpoint` still does.

    Raises:
        ValueError: the budget is no number, negative or absurd, or the first step alone exceeds it; at set-up: the
            Trainer has min_steps or min_epochs, or the checkpoint cannot be written.
    """

    def __init__(
        self,
        flops: float,
        flops_per_token: float | None = None,
        tokens_fn: Callable[[Any], int] | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        self.budget = check_range("flops", flops, BUDGETS, "1e18")
        if flops_per_token is not None:
            check_range("flops_per_token", flops_per_token, (1.0, 1e18), "6e9")
        self.flops_per_token = flops_per_token
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self._counter = BatchCounter(tokens_fn=tokens_fn)
        self._meter = ComputeMeter(flops_per_token or 0.0, self.budget)
        self._steps = self._judged = 0

    @property
    def spent(self) -> float:
        """FLOPs spent so far, by all replicas."""
        return self._meter.flops

    @property
    def tokens(self) -> float:
        """Tokens seen so far, by all replicas."""
        return self._meter.tokens + self._meter.unfinished

    @property
    def last_step(self) -> float:
        """The optimizer step after which training is going to stop; infinite before the first one."""
        return self._steps + self._meter.steps_left

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begins anew.

        Raises:
            ValueError: see the class.
        """
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        for name, least in (("min_steps", trainer.min_steps), ("min_epochs", trainer.min_epochs)):
            if least:
                raise ValueError(
                    f"{name}={least} makes the Trainer go on when ComputeBudget stops it; leave out one of them"
                )
        if self.checkpoint is not None:
            refuse_unwritable(trainer, self.checkpoint)

    def restart(self) -> None:
        """Nothing is spent yet."""
        self._meter.clear()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the parameters."""
        if self.flops_per_token is None:
            self._counter.start(trainer, pl_module)
            self._meter.flops_per_token = FLOPS_PER_PARAM_AND_TOKEN * self._counter.size
        self._steps = self._judged = trainer.global_step
        if self._meter.tokens and not self._meter.fits_another:
            rank_zero_info(f"ComputeBudget: {self.spent:.6g} of {self.budget:.6g} FLOPs were spent before this run")
            trainer.should_stop = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step, adds up over replicas what it cost."""
        self._counter.finish()
        if trainer.global_step == self._judged:
            return
        self._add_up(trainer)
        self._judged = self._steps
        if self._meter.fits_another:
            return
        if self.spent > self.budget * (1 + ROUNDING) and self._meter.tokens == self._meter.largest_step:
            raise ValueError(
                f"the first optimizer step spent {self.spent:.4g} of {self.budget:.4g} FLOPs; use smaller batches or a "
                f"budget of at least {self.spent:.4g}"
            )
        rank_zero_info(
            f"ComputeBudget: {self.spent:.6g} of {self.budget:.6g} FLOPs are spent after {self._steps} steps"
        )
        trainer.should_stop = True
        if self.checkpoint is not None:
            trainer.save_checkpoint(self.checkpoint)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds batches that training left without a step."""
        self._add_up(trainer)

    def _add_up(self, trainer: Trainer) -> None:
        """Adds the tokens of all replicas since the last call, to the step that they belong to. Collective."""
        self._meter.add(self._counter.take(trainer)[0])
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._meter.end_step()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """What all replicas spent goes into the checkpoint, also in the middle of a step."""
        self._add_up(trainer)
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """What was spent."""
        meter = self._meter
        return {"tokens": meter.tokens, "largest_step": meter.largest_step, "unfinished": meter.unfinished}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from what was spent."""
        self._meter.tokens, self._meter.largest_step = state_dict["tokens"], state_dict["largest_step"]
        self._meter.unfinished = state_dict.get("unfinished", 0.0)
