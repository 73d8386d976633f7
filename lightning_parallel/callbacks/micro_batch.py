"""Glue: finds the largest micro-batch that fits on every rank, and keeps the global batch by accumulation."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_parallel.scaling.micro_batches import candidates, largest_that_fits
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.base import PartitionedStrategy

__all__ = ["MicroBatchSizer"]

OPTIMIZER_BYTES = 8
"""Two fp32 moments per parameter, which Adam allocates after the first backward pass."""


class MicroBatchSizer(Callback):
    """Tries a training step on a copy of the model with growing batches, before training and without communication.

    Every rank tries on its own device; a size counts as fitting if it fits on all of them. The batch size that the user
    set, times ``accumulate_grad_batches``, stays the number of samples per replica and optimizer step.

    The module or datamodule has an attribute ``batch_size`` that its ``train_dataloader`` uses. Where several ranks
    share one copy of the model (tensor or pipeline parallel, fsdp) a step on one rank alone says nothing about its
    memory; there the callback refuses, and `TensorPipelineStrategy(micro_batches=...)` divides the batch.

    Args:
        limit: largest micro-batch to try; the samples of an optimizer step if None.
        optimizer_bytes: memory per trainable parameter that is held during the trial for the optimizer's state.
    """

    def __init__(self, limit: int | None = None, optimizer_bytes: int = OPTIMIZER_BYTES) -> None:
        if limit is not None and (isinstance(limit, bool) or limit < 1) or optimizer_bytes < 0:
            raise ValueError(
                f"limit={limit!r} and optimizer_bytes={optimizer_bytes!r} must be at least 1 and 0, such as 64 and 8"
            )
        self.limit = limit
        self.optimizer_bytes = optimizer_bytes
        self.micro_batch: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Searches, and sets the batch size and the accumulation.

        Raises:
            ValueError: the batch size is not ours to change, or not even one sample fits.
        """
        if stage != "fit":
            return
        holder = _holder(trainer, pl_module)
        _refuse(trainer, pl_module)
        samples = holder.batch_size * trainer.accumulate_grad_batches
        best = largest_that_fits(candidates(samples, self.limit), lambda size: self._fits(trainer, pl_module, size))
        if best is None:
            raise ValueError(
                "not even one sample fits into the memory of every rank; use a smaller model, lower precision, "
                "activation checkpointing, or strategy='tp_pp'"
            )
        self.micro_batch = best
        holder.batch_size = best
        trainer.accumulate_grad_batches = samples // best
        rank_zero_info(
            f"MicroBatchSizer: {samples} samples per replica and optimizer step in {samples // best} batches of {best}"
        )

    def _fits(self, trainer: Trainer, module: LightningModule, size: int) -> bool:
        """Whether a step fits on every rank. Every rank votes, also one whose trial failed otherwise."""
        fits = False
        try:
            fits = self._fits_here(trainer, module, size)
        finally:
            together = trainer.strategy.reduce_boolean_decision(fits, all=True)
        return bool(together)

    def _fits_here(self, trainer: Trainer, module: LightningModule, size: int) -> bool:
        device = trainer.strategy.root_device
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                self._try(trainer, module, size)
        except torch.OutOfMemoryError:
            return False
        except RuntimeError as error:
            if "can't allocate memory" not in str(error) and "out of memory" not in str(error):
                raise
            return False
        finally:
            if device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
        return True

    def _try(self, trainer: Trainer, module: LightningModule, size: int) -> None:
        """A forward and backward pass of a copy, with room for the optimizer held."""
        device = trainer.strategy.root_device
        batch = _first_batch(trainer, module, size)
        clone = copy.deepcopy(module)
        clone.configure_model()
        clone.to(device).train()
        clone.trainer = trainer
        numel = sum(p.numel() for p in clone.parameters() if p.requires_grad)
        room = torch.empty(self.optimizer_bytes * numel, dtype=torch.uint8, device=device)
        batch = clone.transfer_batch_to_device(batch, device, 0)

        def step() -> Any:
            with trainer.precision_plugin.train_step_context():
                return clone.training_step(*_compat.step_arguments(clone.training_step, batch))

        output = _compat.run_without_logging(clone, step)
        loss = output["loss"] if isinstance(output, dict) else output
        loss.backward()
        del room

    def state_dict(self) -> dict[str, Any]:
        """The size that was found."""
        return {"micro_batch": self.micro_batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses to go on with another size: the checkpoint counts batches."""
        before = state_dict["micro_batch"]
        if before is not None and self.micro_batch is not None and before != self.micro_batch:
            raise ValueError(
                f"the checkpoint counts micro-batches of {before}, now {self.micro_batch} fit; resume with "
                f"MicroBatchSizer(limit={before}) on devices of at least the same memory"
            )


def _holder(trainer: Trainer, module: LightningModule) -> Any:
    """Who holds the batch size."""
    datamodule = getattr(trainer, "datamodule", None)
    for holder in (datamodule, module):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return holder
    raise ValueError(
        "neither the module nor a datamodule has an attribute batch_size, a whole number that train_dataloader() uses; "
        "a DataLoader passed to fit() cannot be changed"
    )


def _refuse(trainer: Trainer, module: LightningModule) -> None:
    strategy = trainer.strategy
    shared = isinstance(strategy, PartitionedStrategy) and strategy.layout.tensor * strategy.layout.pipeline > 1
    if shared or type(strategy).__name__ in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"):
        raise ValueError(
            f"with {type(strategy).__name__} several ranks share one copy of the model, so a trial on one rank says "
            "nothing about its memory; divide the batch with TensorPipelineStrategy(micro_batches=...) or "
            "accumulate_grad_batches"
        )
    if not module.automatic_optimization:
        raise ValueError("with manual optimization the module accumulates itself; set its batch size by hand")
    schedulers = [c for c in _compat.callbacks_of(trainer) if isinstance(c, GradientAccumulationScheduler)]
    if schedulers:
        raise ValueError(
            "GradientAccumulationScheduler and MicroBatchSizer both set accumulate_grad_batches; use one of them"
        )


def _first_batch(trainer: Trainer, module: LightningModule, size: int) -> Any:
    """A batch of so many samples, from a loader of its own."""
    holder = _holder(trainer, module)
    before = holder.batch_size
    holder.batch_size = size
    try:
        source = getattr(trainer, "datamodule", None) or module
        return next(iter(source.train_dataloader()))
    finally:
        holder.batch_size = before
