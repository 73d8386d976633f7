"""Glue: tries training steps of one rank without the others: does a micro-batch fit into its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_parallel import comm
from lightning_parallel.alone import Alone
from lightning_parallel.pipeline.batch import batch_size, slice_batch
from lightning_parallel.pipeline.runtime import PipelineRuntime
from lightning_parallel.pipeline.schedules import build_schedule, forward_only_schedule
from lightning_parallel.pipeline.stand_in import Arrival, StandInLink, arrival_of
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.partition import Partition
from lightning_parallel.strategies.sight import Sight
from lightning_parallel.strategies.steps import StepRunner
from lightning_parallel.zero.sharder import ZeroSharder

__all__ = ["StepTrial"]


class StepTrial:
    """Runs this rank's share of a step, forward and backward, with nobody else taking part.

    The module is a copy that shares the parameters; collectives end at once, neighbouring stages are stood in for, and
    as many micro-batches are under way as in a real step. So a rank that runs out of memory leaves nobody waiting.

    Args:
        trainer: before its first step.
        partition: the split module.
        runner: of its steps.
        sight: what hooks see, which a trial must not.
        batch: of this replica, as `training_step` sees it.
    """

    def __init__(self, trainer: Trainer, partition: Partition, runner: StepRunner, sight: Sight, batch: Any) -> None:
        self.trainer = trainer
        self.mesh = partition.mesh
        self.batch = batch
        self._partition = partition
        self._runner = runner
        self._sight = sight
        self._arrivals: tuple[Arrival, Arrival] | None = None
        if partition.units is not None:
            raise ValueError(
                "a rank cannot try a step alone while replicas share parameters (stage 3 of ZeRO); set the batch size "
                "yourself, or use stage 1 or 2"
            )
        sizes = comm.gather_objects(batch_size(batch), self.mesh.world_control)
        if None in sizes:
            raise ValueError(
                f"the number of samples in a batch of type {type(batch).__name__} cannot be told, so it cannot be "
                "divided; use a batch of tensors with one row per sample"
            )
        self.samples: int = max(sizes)

    def get_ready(self) -> None:
        """Lets every stage see what arrives for one sample and for two, and connects groups that were not used yet.

        Collective over the world; only forward, so that it takes less memory than any step.
        """
        mesh = self.mesh
        for group in (mesh.tensor, mesh.data, mesh.pipeline, mesh.model, *mesh.stage_pairs.values()):
            comm.all_reduce_(torch.zeros(1, device=mesh.device), group)
        if mesh.pipeline is None:
            return
        schedule = forward_only_schedule(mesh.layout.pipeline, 1)
        link, seen = self._runner.runtime.link, []
        with self._sight.hidden():
            for samples in (1, min(2, self.samples)):
                with torch.set_grad_enabled(samples == 1):
                    self._runner.runtime.run(schedule, self._walk(samples))
                seen.append(link.latest)
        if seen[0] is not None and seen[1] is not None:
            self._arrivals = seen[0], seen[1]

    def run(self, samples: int, optimizer_bytes: int = 0) -> None:
        """A step of micro-batches of so many samples, of which nothing remains.

        Args:
            samples: of a micro-batch.
            optimizer_bytes: memory per trained parameter that is held for the state of the optimizer.
        """
        mesh, options = self.mesh, self._runner.options
        stages, parts = mesh.layout.pipeline, self.samples // samples
        if options.schedule != "gpipe":
            parts = min(parts, stages + 1)  # never more are under way, and one follows
        runtime = PipelineRuntime(mesh, self._partition.cut)
        if stages > 1:
            arrival = None if self._arrivals is None else arrival_of(*self._arrivals, samples)
            runtime.link = StandInLink(runtime.link, arrival)
        room = torch.empty(optimizer_bytes * self._trained_here(), dtype=torch.uint8, device=mesh.device)
        try:
            with self._sight.hidden(), Alone():
                runtime.run(build_schedule(options.schedule, stages, parts), self._walk(samples))
        finally:
            del room
            self._runner.forget_gradients()
            for p in self._partition.local_parameters.values():
                p.grad = None

    def divide(self, samples: int) -> None:
        """From now on steps run in micro-batches of so many samples."""
        runner = self._runner
        runner.options = replace(runner.options, micro_batches=self.samples // samples)
        if isinstance(runner.reducer, ZeroSharder):
            runner.reducer.options = replace(runner.reducer.options, zero_clears_all=runner.is_direct)

    def _trained_here(self) -> int:
        """Parameters whose optimizer state lies on this device."""
        numel = sum(p.numel() for p in self._partition.local_parameters.values() if p.requires_grad)
        sharder = self._runner.reducer
        if not isinstance(sharder, ZeroSharder):
            return numel
        return 0 if sharder.options.offload is not None else -(-numel // self.mesh.layout.data)

    def _walk(self, samples: int) -> _TrialWalk:
        shared = {**{id(p): p for p in self._partition.module.parameters()}, **self.mesh.groups_by_id()}
        clone: Any = _compat.copy_module(self._partition.module, shared)
        clone.trainer = self.trainer
        clone.train()
        part = slice_batch(self.batch, 0, samples, batch_size(self.batch) or 1)
        plugin, random = self.trainer.precision_plugin, self._runner.random_scope

        def step() -> Any:
            with random("trial"), plugin.train_step_context():
                return clone.training_step(*_compat.step_arguments(clone.training_step, part))

        return _TrialWalk(clone, step)


class _TrialWalk:
    """What the pipeline runtime calls back during a trial."""

    def __init__(self, module: LightningModule, step: Callable[[], Any]) -> None:
        self.module = module
        self.step = step

    def forward(self, micro_batch: int) -> Any:
        return _compat.run_without_logging(self.module, self.step)

    def backward(self, output: Any, micro_batch: int) -> torch.Tensor:
        loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output
        loss.backward()
        return loss

    def before_last_backward(self) -> None:
        """Gradients are not reduced."""

    def reduce(self) -> None:
        """Gradients are not reduced."""
