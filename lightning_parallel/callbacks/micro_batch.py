"""Glue: finds the largest micro-batch that fits on every rank, and keeps the global batch."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_parallel.callbacks.sizer import ChinchillaSizer
from lightning_parallel.scaling.checks import check_whole
from lightning_parallel.scaling.micro_batches import candidates, largest_that_fits
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.refusals import refuse_module
from lightning_parallel.strategies.tensor_pipeline import TensorPipelineStrategy

__all__ = ["MicroBatchSizer"]

OPTIMIZER_BYTES = 8
"""Two fp32 moments per parameter, which Adam allocates after the first backward pass."""
PARTS_PER_STAGE = 4
"""As with micro_batches="auto": the bubble stays below a fifth."""
SHARING = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


class MicroBatchSizer(Callback):
    """Tries training steps with growing micro-batches before training, on every rank by itself.

    A size counts as fitting if it fits on all ranks, also where the memory of one ends in the middle of a step. The
    number of samples of an optimizer step stays what the user set:

    - With this package's strategies each batch stays whole and is run in parts, as `micro_batches=` would do. Trials
      run on the split module, on the first batch; a pipeline keeps at least 4 parts per stage while there are samples,
      since its stages would idle otherwise. A resumed run keeps the size of the checkpoint where it still fits.
    - With others (a single device, ddp) the callback sets ``batch_size``, an attribute of the module or datamodule that
      its ``train_dataloader`` uses, and ``accumulate_grad_batches``, until the run ends. A trial takes a copy of the
      model. Where ranks share the model in another way (fsdp, deepspeed) a step on one of them says nothing about
      memory: refused. A `ChinchillaSizer` has to come first.

    Args:
        limit: largest micro-batch to try; the samples of an optimizer step if None.
        optimizer_bytes: memory per trainable parameter that is held during the trial for the optimizer's state.
    """

    def __init__(self, limit: int | None = None, optimizer_bytes: int = OPTIMIZER_BYTES) -> None:
        self.limit = None if limit is None else check_whole("limit", limit, 1, "64")
        self.optimizer_bytes = check_whole("optimizer_bytes", optimizer_bytes, 0, "8")
        self.micro_batch: int | None = None
        self._before: int | None = None
        self._of_user: tuple[Any, int, int] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what cannot be sized; where ranks hold whole models, searches and sets batch size and accumulation.

        Raises:
            ValueError: the batch size is not ours to change, or not even one sample fits.
        """
        if stage != "fit":
            return
        _refuse(trainer, pl_module)
        self.micro_batch = self._before = self._of_user = None
        if isinstance(trainer.strategy, TensorPipelineStrategy):
            return  # the module is not split yet
        self._refuse_later_sizer(trainer)
        holder = _holder(trainer, pl_module)
        self._of_user = (holder, holder.batch_size, trainer.accumulate_grad_batches)
        samples = holder.batch_size * trainer.accumulate_grad_batches
        best = self._search(trainer, samples, lambda size: self._try(trainer, pl_module, size))
        holder.batch_size = best
        trainer.accumulate_grad_batches = samples // best
        rank_zero_info(
            f"MicroBatchSizer: {samples} samples per replica and optimizer step in {samples // best} batches of {best}"
        )

    def _refuse_later_sizer(self, trainer: Trainer) -> None:
        callbacks = _compat.callbacks_of(trainer)
        if any(isinstance(later, ChinchillaSizer) and later.resize for later in callbacks[callbacks.index(self) :]):
            raise ValueError(
                "MicroBatchSizer would try a model whose size ChinchillaSizer has not chosen yet; put ChinchillaSizer "
                "before it in callbacks"
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives batch size and accumulation back, so that another run begins with the global batch of the user."""
        if self._of_user is not None:
            holder, size, accumulated = self._of_user
            holder.batch_size, trainer.accumulate_grad_batches = size, accumulated
            self._of_user = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Searches on the split module, and divides its batches.

        Raises:
            ValueError: not even one sample fits.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, TensorPipelineStrategy) or trainer.limit_train_batches == 0:
            return
        trial = strategy.trial()
        trial.get_ready()
        stages = strategy.layout.pipeline
        most = trial.samples if stages == 1 else max(1, trial.samples // PARTS_PER_STAGE // stages)
        best = self._search(
            trainer, trial.samples, lambda size: trial.run(size, self.optimizer_bytes), min(most, self._before or most)
        )
        trial.divide(best)
        rank_zero_info(f"MicroBatchSizer: batches of {trial.samples} samples per replica in micro-batches of {best}")

    def _search(self, trainer: Trainer, samples: int, attempt: Callable[[int], None], most: int | None = None) -> int:
        limits = [limit for limit in (self.limit, most) if limit is not None]
        sizes = candidates(samples, min(limits, default=None))
        self.micro_batch = largest_that_fits(sizes, lambda size: self._fits(trainer, lambda: attempt(size)))
        if self.micro_batch is None:
            raise ValueError(
                "not even one sample fits into the memory of every rank; use a smaller model, lower precision, "
                "activation checkpointing, or more tensor or pipeline ranks (strategy='tp_pp')"
            )
        return self.micro_batch

    def _fits(self, trainer: Trainer, attempt: Callable[[], None]) -> bool:
        """Whether a step fits on every rank. Every rank votes, also one whose trial failed otherwise."""
        fits = False
        try:
            fits = self._fits_here(trainer, attempt)
        finally:
            together = trainer.strategy.reduce_boolean_decision(fits, all=True)
        return bool(together)

    @staticmethod
    def _fits_here(trainer: Trainer, attempt: Callable[[], None]) -> bool:
        device = trainer.strategy.root_device
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                attempt()
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
        """Goes on with the same size, or refuses another one where the checkpoint counts batches of the old one."""
        self._before = state_dict["micro_batch"]
        if None not in (self._before, self.micro_batch) and self._before != self.micro_batch:
            raise ValueError(
                f"the checkpoint counts micro-batches of {self._before}, now {self.micro_batch} fit; resume with "
                f"MicroBatchSizer(limit={self._before}) on devices of at least the same memory"
            )


def _holder(trainer: Trainer, module: LightningModule) -> Any:
    """Who holds the batch size."""
    if _compat.has_given_loader(trainer):
        raise ValueError(
            "a DataLoader passed to fit() cannot be changed; leave it out and let train_dataloader() of the module or "
            "of a datamodule make it with the attribute batch_size"
        )
    datamodule = getattr(trainer, "datamodule", None)
    for holder in (datamodule, module):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return holder
    raise ValueError(
        "neither the module nor a datamodule has an attribute batch_size, a whole number that train_dataloader() uses"
    )


def _refuse(trainer: Trainer, module: LightningModule) -> None:
    strategy = trainer.strategy
    if any(cls.__name__ in SHARING for cls in type(strategy).__mro__):
        raise ValueError(
            f"with {type(strategy).__name__} several ranks share one copy of the model, so a trial on one rank says "
            "nothing about its memory; use this package's strategies, or divide batches by accumulate_grad_batches"
        )
    if not module.automatic_optimization:
        raise ValueError("with manual optimization the module accumulates itself; set its batch size by hand")
    if isinstance(strategy, TensorPipelineStrategy):
        if strategy.pipeline_config.micro_batches not in ("auto", 1):
            raise ValueError(
                f"micro_batches={strategy.pipeline_config.micro_batches} and MicroBatchSizer both divide the batch; "
                "leave out one of them"
            )
        refuse_module(module, strategy.layout, 2, strategy.pipeline_config.evaluation_micro_batches)
    elif any(isinstance(c, GradientAccumulationScheduler) for c in _compat.callbacks_of(trainer)):
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
