"""Trains a small model once on GPUs and writes what was seen as JSON. Arguments: file, and a `Case` as JSON.

Where there is no GPU, it trains on the CPU, which shows that the script itself works.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, DistributedSampler

from lightning_parallel import AutoStrategy, TensorPipelineStrategy, ZeroStrategy
from lightning_parallel.planner.model_shape import ModelShape
from tests.glue.oracle import PLAN, QUIET, Classifier, Samples

STEPS = 10
BATCH = 8
# Not the classifier's: what is planned is given, but for the question whether it fits.
SHAPE = ModelShape(layers=2, hidden=8, heads=2, ffn=32, vocab=16, seq=8)


class Losses(Callback):
    """Keeps the loss of every batch on the device, so that looking at it costs no wait in the step.

    Args:
        averages: the mean over ranks, of a strategy under which each has its own.
    """

    def __init__(self, averages: bool) -> None:
        self.averages = averages
        self.values: list[torch.Tensor] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"].detach()
        self.values.append(trainer.strategy.reduce(loss, reduce_op="mean") if self.averages else loss)


class NoHiddenWait(Callback):
    """From the third batch on, anything that makes the host wait for the device inside a training step is an error."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        torch.cuda.set_sync_debug_mode("default")


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        tensor: ranks that share a layer; 0 is a plain Trainer on one GPU.
        pipeline: stages.
        devices: GPUs of each machine.
        machines: more than one pretend to be several, with one GPU each, which may be the same: over gloo, because NCCL
            refuses to have two ranks on one GPU.
        zero: arguments of a `ZeroStrategy`, instead of the sizes above.
        planned: ZeRO stage of a plan for data parallelism that Lightning's own strategy is to run, instead of these.
        schedule: of the pipeline.
        precision: of the Trainer.
        watch: make every hidden wait inside a step an error.
    """

    tensor: int = 0
    pipeline: int = 1
    devices: int = 1
    machines: int = 1
    zero: dict[str, Any] | None = None
    planned: int | None = None
    schedule: str = "1f1b"
    precision: Any = "32-true"
    watch: bool = False

    @property
    def replicas(self) -> int:
        """Ranks that see samples of their own."""
        return self.devices * self.machines // (max(self.tensor, 1) * self.pipeline)

    def strategy(self) -> Any:
        """For the Trainer."""
        backend = "gloo" if self.machines > 1 else None
        if self.zero is not None:
            return ZeroStrategy(**self.zero, process_group_backend=backend)
        if self.planned is not None:
            sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": self.planned}
            batch = BATCH // self.replicas
            return AutoStrategy(memory_gib=8, batch_size=batch, shape=SHAPE, **sizes)
        if self.tensor == 0:
            return "auto"
        options: dict[str, Any] = {"schedule": self.schedule, "plan": PLAN, "process_group_backend": backend}
        return TensorPipelineStrategy(self.tensor, self.pipeline, micro_batches=4, **options)

    def loader(self) -> DataLoader[Any]:
        """Global batches of 8 samples, in the same order for every case."""
        data, own = Samples(STEPS * BATCH), BATCH // self.replicas
        if self.planned is None:
            return DataLoader(data, batch_size=own)
        # Under strategies of Lightning's own, its sampler would shuffle.
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        return DataLoader(data, batch_size=own, sampler=DistributedSampler(data, self.replicas, rank, shuffle=False))


def train(case: Case) -> dict[str, Any]:
    """Losses and weights of a short run."""
    losses = Losses(averages=case.planned is not None)
    trainer = Trainer(
        accelerator="auto",
        devices=case.devices,
        num_nodes=case.machines,
        strategy=case.strategy(),
        precision=case.precision,
        max_steps=STEPS,
        use_distributed_sampler=case.planned is None,
        **QUIET,
        callbacks=[losses, NoHiddenWait()] if case.watch else [losses],
    )
    module = Classifier()
    trainer.fit(module, case.loader())
    # FSDP has its own way to whole weights; losses of later steps tell as much.
    whole = {} if case.planned is not None else module.state_dict()
    weights = {name: value.cpu().flatten().tolist() for name, value in whole.items()}
    return {
        "strategy": type(trainer.strategy).__name__,
        "losses": [float(v) for v in losses.values],
        "weights": weights,
    }


if __name__ == "__main__":
    seen = train(Case(**json.loads(sys.argv[2])))
    path = Path(sys.argv[1])
    if not path.exists():  # every rank runs this script; all of them saw the same
        path.write_text(json.dumps(seen))
