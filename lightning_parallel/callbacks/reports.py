"""Glue: what the planner expects of a run, beside what each rank measures: memory and time of a step."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_parallel import comm
from lightning_parallel.callbacks.expected import layout_of, running_job, running_split
from lightning_parallel.commands.answer import show_parts, standard_console, table
from lightning_parallel.commands.modules import shape_of_module
from lightning_parallel.mesh import whole_world
from lightning_parallel.pipeline.batch import batch_size
from lightning_parallel.planner.cost import step_time
from lightning_parallel.planner.hardware import GIB
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.memory import StageMemory, host_states_by_stage, memory_by_stage
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.strategies.chosen import planned_for
from lightning_parallel.strategies.held import held_bytes
from lightning_parallel.strategies.tensor_pipeline import TensorPipelineStrategy

__all__ = ["MemoryReport", "PlanReport"]

Figures = Mapping[str, tuple[float, float]]


class _Report(Callback, ABC):
    """Compares (expected, measured) figures of every rank once, after some optimizer steps.

    Args:
        after_steps: optimizer steps of this run before it measures.
        shape: sizes of the model; those that `AutoStrategy` plans with, or read off the module when training is set
            up, if None.
        recompute: what the model repeats in its backward pass: "none", "selective" or "full".

    Raises:
        ValueError: fewer than one step. When training is set up: the module's sizes cannot be read.
    """

    title = ""

    def __init__(self, after_steps: int, shape: ModelShape | None = None, recompute: str = "none") -> None:
        if after_steps < 1:
            raise ValueError(f"after_steps={after_steps} is before the first step; use 1 or more")
        self.after_steps = after_steps
        self.shape = shape
        self.recompute = recompute
        self.ranks: tuple[Figures, ...] = ()
        """One entry per rank, on every rank: name -> (expected, measured)."""
        self._first = 0
        self._batch = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reads the model's sizes while it is whole."""
        if self.shape is None and stage == "fit":
            self.shape = self._shape_of(trainer, pl_module)

    def _shape_of(self, trainer: Trainer, module: LightningModule) -> ModelShape:
        """What was planned with, else what the module shows before `configure_model`."""
        choices = planned_for(trainer.strategy)
        if choices is not None:
            return choices.best.job.shape
        try:
            return shape_of_module(module)
        except ValueError as error:
            raise ValueError(
                f"the sizes of {type(module).__name__} cannot be read off it ({error}); build its layers in __init__, "
                f"or pass {type(self).__name__}(shape=ModelShape(...))"
            ) from error

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts steps from here. What the planner does not know is refused now, not after some steps."""
        self._first = trainer.global_step
        self._planned_run(trainer, 1)

    def _planned_run(self, trainer: Trainer, batch: int) -> tuple[TrainingJob, Candidate]:
        assert self.shape is not None, "setup() reads the sizes"
        split = running_split(trainer, batch, self.recompute)
        return running_job(trainer, self.shape, split, batch), split

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Looks at the size of this replica's batch."""
        self._batch = max(self._batch, batch_size(batch) or 1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measures, and tells once."""
        steps = trainer.global_step - self._first
        if self.ranks or steps < self.after_steps:
            return
        job, split = self._planned_run(trainer, self._batch)
        found = self.figures(trainer, pl_module, job, split)
        trainer.strategy.barrier("report")  # some rank may still serve what another one reads in its hook
        self.ranks = tuple(comm.gather_objects(found, whole_world()))
        _print(self.title, self.ranks)

    @abstractmethod
    def figures(self, trainer: Trainer, module: LightningModule, job: TrainingJob, split: Candidate) -> Figures:
        """This rank's figures."""


class MemoryReport(_Report):
    """Tells, for every rank, the GiB of model states that the planner expects and those that are held.

    Under every strategy: weights, gradients, and the optimizer with its 32-bit weights, as memory that tensors own on
    the device; with an offload also what of these lies in host memory, and on GPUs the peak of all tensors. Padding of
    shards is measured and not expected.
    """

    title = "model states (GiB): planned / held"

    def __init__(self, after_steps: int = 2, shape: ModelShape | None = None, recompute: str = "none") -> None:
        super().__init__(after_steps, shape, recompute)

    def figures(self, trainer: Trainer, module: LightningModule, job: TrainingJob, split: Candidate) -> Figures:
        """States by kind."""
        planned, held = _stage_memory(trainer, job, split), held_bytes(trainer, module)
        found = {
            "weights": (planned.weights / GIB, held.weights / GIB),
            "gradients": (planned.gradients / GIB, held.gradients / GIB),
            "optimizer": ((planned.optimizer + planned.master_weights) / GIB, held.optimizer / GIB),
        }
        if split.offload != "none":
            found["host"] = (_host_states(trainer, job, split) / GIB, held.host / GIB)
        return found | _peak(trainer, planned)


class PlanReport(_Report):
    """Tells, for every rank, the seconds of a step that the planner expects and those that it takes.

    Steps are timed from the third one of the run on, data loading included. On GPUs also the peak memory is compared;
    on CPUs the planner's seconds are of the right order at best.
    """

    title = "plan and run: planned / measured"

    def __init__(self, after_steps: int = 10, shape: ModelShape | None = None, recompute: str = "none") -> None:
        super().__init__(after_steps, shape, recompute)
        if after_steps < 3:
            raise ValueError(f"after_steps={after_steps} leaves no step to time after two slow first ones; use 10")
        self._started = (0, 0.0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts the clock at the third step."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        steps = trainer.global_step - self._first
        if steps == 2 and self._started[0] == 0:
            self._started = (steps, _now(trainer))

    def figures(self, trainer: Trainer, module: LightningModule, job: TrainingJob, split: Candidate) -> Figures:
        """Seconds of a step, and its peak."""
        steps, start = self._started
        seconds = (_now(trainer) - start) / (trainer.global_step - self._first - steps)
        return {"s/step": (step_time(job, split).total, seconds)} | _peak(trainer, _stage_memory(trainer, job, split))


def _stage_of(trainer: Trainer) -> int:
    return layout_of(trainer).coordinate(trainer.global_rank).pipeline


def _stage_memory(trainer: Trainer, job: TrainingJob, split: Candidate) -> StageMemory:
    planned = memory_by_stage(job, split)[_stage_of(trainer)]
    return replace(planned, weights=planned.weights + _kept_weights(trainer, job, split))


def _host_states(trainer: Trainer, job: TrainingJob, split: Candidate) -> float:
    moved = host_states_by_stage(job, split)[_stage_of(trainer)]
    return moved - (_kept_weights(trainer, job, split) if split.offload == "cpu" else 0.0)


def _kept_weights(trainer: Trainer, job: TrainingJob, split: Candidate) -> float:
    """Bytes of weights that stay on the device where plans would move them: stage 3 without `offload_parameters`."""
    strategy = trainer.strategy
    if not isinstance(strategy, TensorPipelineStrategy) or split.offload == "none" or split.zero_stage < 3:
        return 0.0
    if strategy.zero_config.offload_parameters:
        return 0.0
    return memory_by_stage(job, replace(split, offload="none"))[_stage_of(trainer)].weights


def _peak(trainer: Trainer, planned: StageMemory) -> dict[str, tuple[float, float]]:
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return {}
    return {"peak": ((planned.total - planned.overhead) / GIB, torch.cuda.max_memory_allocated(device) / GIB)}


def _now(trainer: Trainer) -> float:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@rank_zero_only
def _print(title: str, ranks: tuple[Figures, ...]) -> None:
    names = list(ranks[0])
    grid = table("", "rank", *names)
    for rank, figures in enumerate(ranks):
        grid.add_row(str(rank), *(f"{figures[name][0]:.3g} / {figures[name][1]:.3g}" for name in names))
    # A title of the table would be as narrow as the table.
    show_parts([title, grid], standard_console())
