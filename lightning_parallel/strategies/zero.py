"""Glue: the Lightning strategy that shards optimizer state and gradients over data replicas."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning_parallel.strategies.config import LossWeight, ZeroConfig
from lightning_parallel.strategies.tensor_pipeline import TensorPipelineStrategy

__all__ = ["ZeroStrategy"]


class ZeroStrategy(TensorPipelineStrategy):
    """Data parallel training of an unmodified LightningModule with sharded model state (Rajbhandari et al. 2020).

    Stage 1 shards the optimizer's state over the replicas, stage 2 also the gradients. Loss, gradients, logged values
    and checkpoints are those of one plain process on the same global batch. Any torch optimizer works that treats
    elements alone or parameters alone; each rank's part of it steps on its shards.

    Args:
        stage: 0 (plain data parallel), 1 or 2; or FSDP's names "NO_SHARD" and "SHARD_GRAD_OP".
        loss_weight: how replicas of unequal content are combined: "samples", "valid_labels" (labels other than -100),
            or a function of the batch.
        non_finite: "ignore", "raise" or "skip" (counted in `skipped_steps`): what all ranks do together about
            gradients that are not finite.
        sync_logs: logged values are those of the global batch on every rank. False: each replica logs its own.
        restore_weights: leave the trained weights in the module on every rank when the trainer is done.
        bucket_bytes: size of the buckets in which gradients are reduced.
        process_group_backend: "gloo", "nccl", ...; chosen by device if None.
        timeout: how long a collective may wait.
        **kwargs: accelerator, devices, plugins and start_method, as for Lightning's DDPStrategy.

    Raises:
        ValueError: an option is not understood or not available.
    """

    def __init__(
        self,
        stage: int | str = 2,
        loss_weight: LossWeight = "samples",
        non_finite: str = "ignore",
        sync_logs: bool = True,
        restore_weights: bool = True,
        bucket_bytes: int = 25 * 2**20,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        **kwargs: Any,
    ) -> None:
        _refuse_offload(kwargs)
        super().__init__(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            micro_batches=1,
            zero_stage=ZeroConfig.of(stage).stage,
            loss_weight=loss_weight,
            non_finite=non_finite,
            sync_logs=sync_logs,
            restore_weights=restore_weights,
            bucket_bytes=bucket_bytes,
            process_group_backend=process_group_backend,
            timeout=timeout,
            **kwargs,
        )


def _refuse_offload(options: dict[str, Any]) -> None:
    """Takes options of other ZeRO implementations out that are switched off, and refuses them switched on."""
    for name in ("offload", "offload_parameters", "nvme_path"):
        value = options.pop(name, None)
        if value not in (None, False):
            raise ValueError(f"{name}={value!r} is not available: shards stay on the device; leave it out")
