"""Glue: the planner's job and split that a running trainer amounts to, under this package's strategies and others."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_parallel.layout import ParallelLayout
from lightning_parallel.planner.hardware import Cluster, Gpu
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.strategies.chosen import planned_for
from lightning_parallel.strategies.planning import device_memory, planned_gpu, planned_states
from lightning_parallel.strategies.tensor_pipeline import TensorPipelineStrategy

__all__ = ["layout_of", "running_job", "running_split"]

_OPTIMIZERS = {"Adam": "adam", "AdamW": "adamw", "AdamW8bit": "adam-8bit", "Adam8bit": "adam-8bit", "Lion": "lion"}
_FSDP_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}


def layout_of(trainer: Trainer) -> ParallelLayout:
    """How the ranks of a trainer are arranged."""
    strategy: Any = trainer.strategy
    if isinstance(strategy, TensorPipelineStrategy):
        return strategy.layout
    tensor = strategy.device_mesh["tensor_parallel"].size() if "ModelParallelStrategy" in _kinds(strategy) else 1
    return ParallelLayout(data=trainer.world_size // tensor, tensor=tensor)


def running_split(trainer: Trainer, batch_size: int, recompute: str = "none") -> Candidate:
    """The split that a trainer runs.

    Args:
        trainer: while it trains.
        batch_size: samples of a replica's batch.
        recompute: what the model repeats in its backward pass.

    Raises:
        ValueError: a strategy whose sharding is not known here.
    """
    strategy, layout = trainer.strategy, layout_of(trainer)
    options: dict[str, Any] = {"recompute": recompute, "micro_batch": batch_size}
    if isinstance(strategy, TensorPipelineStrategy):
        parts, zero = min(batch_size, strategy.micro_batches), strategy.zero_config
        options |= {
            "micro_batch": max(1, batch_size // parts),
            "schedule": strategy.pipeline_config.schedule,
            "sequence_parallel": strategy.tensor_config.sequence_parallel and layout.tensor > 1,
            # What is offloaded is sharded, if only over one replica.
            "zero_stage": zero.stage if layout.data > 1 or zero.offload else 0,
            "offload": zero.offload or "none",
        }
    else:
        options["zero_stage"] = _foreign_stage(strategy)
    return Candidate(tensor=layout.tensor, pipeline=layout.pipeline, data=layout.data, **options)


def _foreign_stage(strategy: Any) -> int:
    """The ZeRO stage that a strategy of Lightning amounts to."""
    kinds = _kinds(strategy)
    if "ModelParallelStrategy" in kinds:
        return 3  # what its modules do with `fully_shard`
    if "FSDPStrategy" in kinds:
        return _FSDP_STAGES.get(strategy.sharding_strategy.name, 3)
    if kinds & {"DDPStrategy", "SingleDeviceStrategy"}:
        return 0
    raise ValueError(f"what {type(strategy).__name__} keeps on a rank is not known; use ddp, fsdp or tp_pp")


def _kinds(strategy: Any) -> set[str]:
    return {kind.__name__ for kind in type(strategy).__mro__}


def running_job(trainer: Trainer, shape: ModelShape, split: Candidate, batch_size: int) -> TrainingJob:
    """The job that a trainer runs, on devices like this rank's.

    Raises:
        ValueError: a precision or an optimizer that the planner does not know.
    """
    strategy = trainer.strategy
    sums = strategy.zero_config.gradient_dtype if isinstance(strategy, TensorPipelineStrategy) else "float32"
    products, kept = planned_states(str(trainer.precision), split.zero_stage, sums)
    nodes = trainer.num_nodes
    return TrainingJob(
        shape,
        Cluster(_device(trainer), trainer.world_size // nodes, nodes),
        batch_size * split.data * trainer.accumulate_grad_batches,
        precision=products,
        optimizer=_optimizer(trainer),
        states=kept,
    )


def _device(trainer: Trainer) -> Gpu:
    strategy = trainer.strategy
    choices = planned_for(strategy)
    if choices is not None:
        return choices.best.job.cluster.gpu
    return planned_gpu(strategy.root_device, device_memory(strategy.root_device) or 1.0)


def _optimizer(trainer: Trainer) -> str:
    optimizer = trainer.optimizers[0]
    name = type(optimizer).__name__
    if name == "SGD":
        return "sgd-momentum" if optimizer.param_groups[0]["momentum"] else "sgd"
    if name not in _OPTIMIZERS:
        raise ValueError(f"what {name} keeps is not known to the planner; it knows {', '.join([*_OPTIMIZERS, 'SGD'])}")
    return _OPTIMIZERS[name]
