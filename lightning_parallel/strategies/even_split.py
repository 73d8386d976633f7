"""Glue: sizes left "auto" are the even split of a node, unless the planner knows one that runs, or runs faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_parallel import comm
from lightning_parallel.commands.modules import shape_of_module, tells_seq
from lightning_parallel.layout import ParallelLayout
from lightning_parallel.mesh import whole_world
from lightning_parallel.planner.choose import NOTABLE, Choice, choose
from lightning_parallel.planner.hardware import Cluster
from lightning_parallel.planner.job import TrainingJob
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.planner.search import SearchResult, rank_layouts
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.planning import (
    PlannedPipeline,
    device_memory,
    planned_gpu,
    planned_states,
    recomputation,
    why_not,
    zero_cases,
)

__all__ = ["EvenSplit", "even_or_planned"]

UNLIMITED_GIB = 1e9


def even_or_planned(strategy: Any, even: ParallelLayout, sizes: tuple[Any, Any]) -> ParallelLayout:
    """The even split, unless the planner can tell that it does not run, or what is faster. Collective over the world.

    Not every module shows its sizes: what cannot be read (layers built in `configure_model`, a plan of the user's own,
    unknown numbers of heads, of samples or of bytes, a precision that the device lacks) is not judged. What no layout
    runs stays with the even split, whose own error is the clearer one. Memory is judged where batch and length of
    sequences are known. Speeds are compared where the device is in the planner's catalogue and the batch
    and the length of sequences are known, among splits with as many replicas, so that the global batch stays.

    Args:
        strategy: a `TensorPipelineStrategy` whose processes have started; micro-batches that it left open are planned
            along with a layout.
        even: what `ParallelLayout.choose` makes of the sizes.
        sizes: tensor and pipeline, each a number or "auto"; one that is given is kept, and so is what follows from it.
    """
    if sizes != ("auto", "auto") or strategy.tensor_config.plan != "auto":
        return even
    module, precision = strategy._module(), str(strategy.precision_plugin.precision)
    try:
        shape = shape_of_module(module, heads_known=True)
        cluster = _cluster(strategy)
        TrainingJob(shape, cluster, 1, precision=planned_states(precision, 0)[0])
    except ValueError:
        return even
    batch = _compat.batch_size_of(strategy._trainer()) if tells_seq(module) else None
    parts, open_parts = strategy.pipeline_config.micro_batches_for(even.pipeline), _leaves_parts(strategy)
    split = EvenSplit(
        even, shape, cluster, batch, precision, _fixed(strategy), parts, open_parts, strategy.zero_config.gradient_dtype
    )
    reason = split.why_not()
    choice = None
    if reason:
        choice, why = split.what_runs(), f"does not run this model: {reason}"
    elif module.automatic_optimization:
        choice = split.what_is_faster()
        why = "" if choice is None else f"takes {split.seconds / choice.seconds_per_sequence:.2f} times as long"
    if choice is None:
        return even
    planned = choice.plan.split
    if open_parts and batch is not None:
        planned_parts = planned.micro_batches(choice.job)
        strategy.pipeline_config = PlannedPipeline.of(strategy.pipeline_config, planned.pipeline, planned_parts)
    times = planned.data / even.data
    reads = "" if times == 1 else f", whose replicas read {times:g} times as many samples a step"
    rank_zero_info(
        f"lightning_parallel: the even split, tensor {even.tensor} x pipeline {even.pipeline} x data {even.data}, "
        f"{why}; planned instead: tensor {planned.tensor} x pipeline {planned.pipeline} x data {planned.data}"
        f"{reads}"
    )
    return planned.layout


@dataclass(frozen=True)
class EvenSplit:
    """The even split of a run, beside what the planner would make of the same devices.

    Attributes:
        even: the layout.
        shape: of the model.
        cluster: the machines, with the memory of the smallest device.
        batch: sequences that the loader yields to a replica; None if nobody knows that, or how long they are.
        precision: as a Trainer names it.
        fixed: fields of `planner.job.Candidate` that the user's options give.
        parts: micro-batches that it would run.
        plans_parts: whether other layouts may run others.
        gradient_dtype: see `ZeroConfig`.
    """

    even: ParallelLayout
    shape: ModelShape
    cluster: Cluster
    batch: int | None
    precision: str
    fixed: Mapping[str, Any]
    parts: int
    plans_parts: bool
    gradient_dtype: str = "float32"

    def why_not(self) -> str:
        """The planner's reason against it; empty if there is none."""
        rejected = self._planned().rejected
        return rejected[0].reason if rejected else ""

    @property
    def seconds(self) -> float:
        """Planned seconds per sequence.

        Raises:
            IndexError: it does not run.
        """
        found = self._planned()
        return found.plans[0].time.total / found.job.global_batch

    def what_runs(self) -> Choice | None:
        """The fastest layout of as many replicas, which keeps the global batch, or else of any; None if none runs."""
        return self._fastest({"data": self.even.data}) or self._fastest({})

    def what_is_faster(self) -> Choice | None:
        """The fastest of as many replicas, if it gains notably on the even split and speeds are known at all."""
        if self.batch is None or self.cluster.gpu.is_host:
            return None
        found = self._fastest({"data": self.even.data})
        if found is None or found.plan.split.layout == self.even:
            return None
        return found if found.seconds_per_sequence <= (1 - NOTABLE) * self.seconds else None

    def _fastest(self, fixed: Mapping[str, Any]) -> Choice | None:
        batch = self.batch or 1
        given = {**self.fixed, **fixed}
        if not self.plans_parts:
            given["micro_batch"] = self._micro_batch
            batch = self._filled_batch
        cases = zero_cases(self.shape, self.cluster, batch, self.precision, given, self.gradient_dtype)
        return next(iter(choose(cases, why_not).ranked), None)

    @property
    def _micro_batch(self) -> int:
        batch = self.batch or 1
        return -(-batch // min(batch, self.parts))

    @property
    def _filled_batch(self) -> int:
        """As if all micro-batches were as large as the largest, which is what the planner knows."""
        return self._micro_batch * min(self.batch or 1, self.parts)

    def _planned(self) -> SearchResult:
        cluster = self.cluster
        if self.batch is None:
            cluster = replace(cluster, gpu=replace(cluster.gpu, memory_gib=UNLIMITED_GIB))
        stage = self.fixed["zero_stage"]
        products, kept = planned_states(self.precision, stage, self.gradient_dtype)
        job = TrainingJob(self.shape, cluster, self._filled_batch * self.even.data, precision=products, states=kept)
        even = {"tensor": self.even.tensor, "pipeline": self.even.pipeline, "data": self.even.data}
        return rank_layouts(job, {**self.fixed, **even, "micro_batch": self._micro_batch})


def _cluster(strategy: Any) -> Cluster:
    """The machines, with the memory of the smallest device, or without a limit where devices do not say."""
    known = device_memory(strategy.root_device)
    least = min(comm.gather_objects(UNLIMITED_GIB if known is None else known, whole_world()))
    return Cluster(planned_gpu(strategy.root_device, least), strategy.num_processes, strategy.num_nodes)


def _leaves_parts(strategy: Any) -> bool:
    return bool(strategy.pipeline_config.micro_batches == "auto")


def _fixed(strategy: Any) -> dict[str, Any]:
    return {
        "zero_stage": strategy.zero_config.stage,
        "offload": strategy.zero_config.offload or "none",
        "schedule": strategy.pipeline_config.schedule,
        "sequence_parallel": strategy.tensor_config.sequence_parallel,
        "recompute": recomputation(strategy._module()),
    }
