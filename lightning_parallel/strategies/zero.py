"""Glue: the Lightning strategy that shards optimizer state and gradients over data replicas."""

from __future__ import annotations

from typing import Any

from lightning_parallel.strategies.config import LossWeight, ZeroConfig
from lightning_parallel.strategies.tensor_pipeline import TensorPipelineStrategy

__all__ = ["ZeroStrategy"]

_FIXED = frozenset({"tensor_parallel_size", "pipeline_parallel_size", "micro_batches", "zero_stage"})


class ZeroStrategy(TensorPipelineStrategy):
    """Data parallel training of an unmodified LightningModule with sharded model state (Rajbhandari et al. 2020).

    Stage 1 shards the optimizer's state over the replicas, stage 2 also the gradients, stage 3 also the parameters.
    Loss, gradients, logged values and checkpoints are those of one plain process on the same global batch. Any torch
    optimizer works that treats elements alone or parameters alone; each rank's part of it steps on its shards.

    Args:
        stage: 0 (plain data parallel), 1, 2 or 3; or FSDP's names "NO_SHARD", "SHARD_GRAD_OP" and "FULL_SHARD"; or a
            `ZeroConfig`, which then holds the offload options too.
        offload: None, "cpu" (the optimizer's side of the shards lies in host memory and is stepped there), or "nvme"
            (optimizer states in files, brought in bucket by bucket).
        nvme_path: folder for these files, on a local disk; the trainer's `default_root_dir` if None.
        offload_parameters: shares of stage 3's parameters lie there, too, and are borrowed for each gather.
        loss_weight: how replicas of unequal content are combined: "samples", "valid_labels" (labels other than -100),
            or a function of the batch.
        non_finite: "ignore", "raise" or "skip" (counted in `skipped_steps`): what all ranks do together about
            gradients that are not finite.
        sync_logs: logged values are those of the global batch on every rank. False: each replica logs its own.
        bucket_bytes: size of the buckets in which gradients are reduced and offloaded shards travel.
        **kwargs: blocks (what stage 3 gathers one by one), restore_weights, process_group_backend and timeout, as for
            `TensorPipelineStrategy`; accelerator, devices, plugins and start_method, as for Lightning's DDPStrategy.

    Raises:
        ValueError: an option is not understood or not available, or sizes of tensor or pipeline parallelism are given.
    """

    def __init__(
        self,
        stage: int | str | ZeroConfig = 2,
        offload: str | None = None,
        nvme_path: str | None = None,
        offload_parameters: bool = False,
        loss_weight: LossWeight = "samples",
        non_finite: str = "ignore",
        sync_logs: bool = True,
        bucket_bytes: int = 25 * 2**20,
        **kwargs: Any,
    ) -> None:
        taken = sorted(_FIXED & kwargs.keys())
        if taken:
            raise ValueError(
                f"ZeroStrategy has no {' and no '.join(taken)}: its ranks are all replicas; use "
                f"TensorPipelineStrategy(zero_stage={stage if isinstance(stage, int) else 1}, ...)"
            )
        zero = ZeroConfig.of(stage, offload=offload, nvme_path=nvme_path, offload_parameters=offload_parameters)
        super().__init__(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            micro_batches=1,
            zero_stage=zero,
            loss_weight=loss_weight,
            non_finite=non_finite,
            sync_logs=sync_logs,
            bucket_bytes=bucket_bytes,
            **kwargs,
        )
