"""Glue: adds a finished run to the table that a law can be fitted to."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_parallel.callbacks.counting import BatchCounter, TokenCallback, refuse_unwritable
from lightning_parallel.scaling.checks import COUNTS, check_range
from lightning_parallel.scaling.laws import FLOPS_PER_PARAM_AND_TOKEN
from lightning_parallel.scaling.runs import COLUMNS, Run, append_run

__all__ = ["ScalingLawRecorder"]


class ScalingLawRecorder(TokenCallback):
    """Appends parameters, tokens, FLOPs and final loss of a run to a CSV file for ``lightning-parallel scaling fit``.

    Written once, by rank 0, when training ends by itself; a run that failed leaves no row. A run that is resumed after
    its end leaves a second, longer one.

    Args:
        path: of the table; it is made if missing.
        loss: key of the final loss among the logged values, in nats per token.
        params: parameters of the whole model; counted if None.
        tokens_fn: tokens of a batch; see `lightning_parallel.callbacks.count_tokens`.
        flops_per_token: training FLOPs of one token; 6 per parameter of the whole model if None.
    """

    def __init__(
        self,
        path: str | Path,
        loss: str = "val_loss",
        params: float | None = None,
        tokens_fn: Callable[[Any], int] | None = None,
        flops_per_token: float | None = None,
    ) -> None:
        if flops_per_token is not None:
            check_range("flops_per_token", flops_per_token, COUNTS, "6e9")
        self.path = Path(path)
        self.loss = loss
        self.flops_per_token = flops_per_token
        self.tokens = 0.0
        self.run: Run | None = None
        self._counter = BatchCounter(params, tokens_fn)

    @property
    def state_key(self) -> str:
        """One trainer may record several losses."""
        return self._generate_state_key(loss=self.loss)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begins anew.

        Raises:
            ValueError: the table cannot be written, or another recorder records the same loss.
        """
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            refuse_unwritable(trainer, self.path, COLUMNS)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the parameters."""
        self._counter.start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts this replica's tokens."""
        self._counter.finish()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the row.

        Raises:
            ValueError: the loss was not logged, or is not a positive number.
        """
        self.tokens += self._counter.take(trainer)[0]
        observed = trainer.callback_metrics.get(self.loss)
        if not isinstance(observed, torch.Tensor):
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise ValueError(f"loss={self.loss!r} was not logged, only {logged}; log it or name one of these")
        if not 0 < float(observed) < math.inf:
            raise ValueError(f"loss={self.loss!r} ended at {float(observed)}, which no law describes; not recorded")
        per_token = self.flops_per_token or FLOPS_PER_PARAM_AND_TOKEN * self._counter.size
        self.run = Run(self._counter.size, self.tokens, float(observed), per_token * self.tokens)
        if trainer.is_global_zero:
            append_run(self.path, self.run)
            rank_zero_info(f"ScalingLawRecorder: {self.run} was added to {self.path}")
