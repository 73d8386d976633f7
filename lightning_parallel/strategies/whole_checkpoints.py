"""Glue: checkpoints of the strategies that train a part of the module on each rank: those of a plain run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from lightning_parallel.checkpoint.optimizer_states import (
    full_optimizer_state,
    local_optimizer_state,
    outline_optimizer_state,
)
from lightning_parallel.strategies import _compat, metric_states
from lightning_parallel.strategies.base import PartitionedStrategy
from lightning_parallel.strategies.parted import reading_parts
from lightning_parallel.strategies.partition import materialize

__all__ = ["WholeCheckpointStrategy"]


class WholeCheckpointStrategy(PartitionedStrategy):
    """Base of the strategies that save and load whole modules and optimizers, whatever part of them a rank has."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """How checkpoints are written and read: in whole files, unless the user chose a plugin."""
        return _compat.whole_file_io(self)

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: CheckpointIO) -> None:
        _compat.set_checkpoint_io(self, plugin)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights go into the whole module before it is split, as callbacks that restore copies of it expect."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model as a plain run would save it; on ranks other than 0 without data.

        Raises:
            RuntimeError: the run has ended and its weights were not gathered, or ranks failed at different steps.
        """
        self._watch.check_collective("a checkpoint")
        if not self._is_split:
            if self._partition is not None and self._partition.left_apart:
                raise RuntimeError(self._partition.left_apart)
            return super().lightning_module_state_dict()
        partition = self._split_module()
        with self._sight.hidden(), metric_states.summed_over_replicas(partition.module, self.mesh.data):
            if self.mesh.data_rank != 0:
                return partition.shards.outline()
            return partition.shards.full_state_dict(keep=self.is_global_zero)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads a plain checkpoint, before or after the module was split."""
        state = checkpoint["state_dict"]
        if self._is_split:
            with self._sight.hidden():
                self._split_module().shards.load_full_state_dict(state, strict)
        else:
            materialize(self._module(), torch.device("cpu"), given=state)
            super().load_model_state_dict(checkpoint, strict)
            metric_states.keep_once(self._module(), self.mesh.data_rank)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of a plain optimizer; on ranks other than 0 without data."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self._trained is None:
            return optimizer.state_dict()
        with reading_parts(optimizer), self._sight.hidden(), self._whole_state(optimizer):
            if self.mesh.data_rank != 0:
                return outline_optimizer_state(optimizer)
            return full_optimizer_state(self._trained.shards, optimizer, self._trained.names, self.is_global_zero)

    def _whole_state(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Inside, an optimizer of replica 0 holds all of its state."""
        return nullcontext() if self._sharding is None else self._sharding.whole_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this rank's part of plain optimizer states."""
        partition = self._split_module()
        for optimizer, full in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            local = local_optimizer_state(partition.shards, optimizer, partition.names, full)
            if self._sharding is None:
                optimizer.load_state_dict(local)
            else:
                self._sharding.load(optimizer, local)
