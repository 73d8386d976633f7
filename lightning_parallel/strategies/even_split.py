"""Glue: sizes left "auto" are the even split of a node, or the planner's where a model cannot run or fit that way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_parallel import comm
from lightning_parallel.commands.modules import shape_of_module
from lightning_parallel.layout import ParallelLayout
from lightning_parallel.mesh import whole_world
from lightning_parallel.planner.choose import choose
from lightning_parallel.planner.hardware import Cluster
from lightning_parallel.planner.job import TrainingJob
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.planner.search import rank_layouts
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

__all__ = ["even_or_planned"]

UNLIMITED_GIB = 1e9


def even_or_planned(strategy: Any, even: ParallelLayout, sizes: tuple[Any, Any]) -> ParallelLayout:
    """The even split, unless the planner can tell that it does not run and what does. Collective over the world.

    Not every module shows its sizes: what cannot be read (layers built in `configure_model`, a plan of the user's own,
    unknown numbers of heads, of samples or of bytes) is not judged. What no layout runs stays with the even split,
    whose own error is the clearer one.

    Args:
        strategy: a `TensorPipelineStrategy` whose processes have started; micro-batches that it left open are planned
            along with a layout.
        even: what `ParallelLayout.choose` makes of the sizes.
        sizes: tensor and pipeline, each a number or "auto"; one that is given is kept, and so is what follows from it.
    """
    if sizes != ("auto", "auto") or strategy.tensor_config.plan != "auto":
        return even
    try:
        shape = shape_of_module(strategy._module(), heads_known=True)
        planned_states(str(strategy.precision_plugin.precision), 0)
        cluster = _cluster(strategy)
    except ValueError:
        return even
    reason = _why_not_even(strategy, shape, cluster, even)
    if not reason:
        return even
    batch = _compat.training_batch_size(strategy._trainer()) or 1
    precision = str(strategy.precision_plugin.precision)
    cases = zero_cases(shape, cluster, batch, precision, _fixed(strategy), strategy.zero_config.gradient_dtype)
    ranked = choose(cases, why_not).ranked
    if not ranked:
        return even
    split = ranked[0].plan.split
    if strategy.pipeline_config.micro_batches == "auto":
        planned = split.micro_batches(ranked[0].job)
        strategy.pipeline_config = PlannedPipeline.of(strategy.pipeline_config, split.pipeline, planned)
    rank_zero_info(
        f"lightning_parallel: the even split, tensor {even.tensor} x pipeline {even.pipeline} x data {even.data}, does "
        f"not run this model: {reason}; planned instead: tensor {split.tensor} x pipeline {split.pipeline} x data "
        f"{split.data}"
    )
    return split.layout


def _cluster(strategy: Any) -> Cluster:
    """The machines, with the memory of the smallest device, or without a limit where devices do not say."""
    known = device_memory(strategy.root_device)
    least = min(comm.gather_objects(UNLIMITED_GIB if known is None else known, whole_world()))
    return Cluster(planned_gpu(strategy.root_device, least), strategy.num_processes, strategy.num_nodes)


def _fixed(strategy: Any) -> dict[str, Any]:
    return {
        "zero_stage": strategy.zero_config.stage,
        "offload": strategy.zero_config.offload or "none",
        "schedule": strategy.pipeline_config.schedule,
        "sequence_parallel": strategy.tensor_config.sequence_parallel,
        "recompute": recomputation(strategy._module()),
    }


def _why_not_even(strategy: Any, shape: ModelShape, cluster: Cluster, even: ParallelLayout) -> str:
    """The planner's reason against the even split with the micro-batches that it would run; empty if there is none."""
    batch = _compat.training_batch_size(strategy._trainer())
    if batch is None:
        batch, cluster = 1, replace(cluster, gpu=replace(cluster.gpu, memory_gib=UNLIMITED_GIB))
    parts = min(batch, strategy.pipeline_config.micro_batches_for(even.pipeline))
    micro_batch = -(-batch // parts)
    zero = strategy.zero_config
    products, kept = planned_states(str(strategy.precision_plugin.precision), zero.stage, zero.gradient_dtype)
    job = TrainingJob(shape, cluster, micro_batch * parts * even.data, precision=products, states=kept)
    sizes = {"tensor": even.tensor, "pipeline": even.pipeline, "data": even.data, "micro_batch": micro_batch}
    rejected = rank_layouts(job, {**_fixed(strategy), **sizes}).rejected
    return rejected[0].reason if rejected else ""
