"""Glue: the Lightning strategy that shards optimizer state and gradients over data replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        offload: None, "cpu" (the optimizer's side of the shards lies in host memory and is stepped there), or "nvme"
            (optimizer states in files, brought in bucket by bucket).
        nvme_path: folder for these files, on a local disk; the trainer's `default_root_dir` if None.
        offload_parameters: not available.
        loss_weight: how replicas of unequal content are combined: "samples", "valid_labels" (labels other than -100),
            or a function of the batch.
        non_finite: "ignore", "raise" or "skip" (counted in `skipped_steps`): what all ranks do together about
            gradients that are not finite.
        sync_logs: logged values are those of the global batch on every rank. False: each replica logs its own.
        bucket_bytes: size of the buckets in which gradients are reduced and offloaded shards travel.
        **kwargs: restore_weights, process_group_backend and timeout, as for `TensorPipelineStrategy`; accelerator,
            devices, plugins and start_method, as for Lightning's DDPStrategy.

    Raises:
        ValueError: an option is not understood or not available.
    """

    def __init__(
        self,
        stage: int | str = 2,
        offload: str | None = None,
        nvme_path: str | None = None,
        offload_parameters: bool = False,
        loss_weight: LossWeight = "samples",
        non_finite: str = "ignore",
        sync_logs: bool = True,
        bucket_bytes: int = 25 * 2**20,
        **kwargs: Any,
    ) -> None:
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

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Inside, every parameter of the module is whole on every rank, and changes to it count.

        To be entered on every rank, which all make the same changes. Of use in stage 3 alone, and there not needed in
        hooks, which see whole parameters one by one as they look at them; in steps, for parameters of blocks outside of
        these, and where many are used together. It takes the memory of the whole model.
        """
        units = None if self._partition is None or self._partition.restored else self._partition.units
        if units is None:
            yield
            return
        with self._sight.hidden(), units.gatherer.full():
            yield
