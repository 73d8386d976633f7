"""Trains a small model once on GPUs and writes what was seen as JSON. Arguments: file, tensor, pipeline, devices."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_parallel import TensorPipelineStrategy
from tests.glue.oracle import PLAN, QUIET, Classifier, Samples

STEPS = 10
BATCH = 8


class Losses(Callback):
    """Keeps the loss of every batch on the device, so that looking at it costs no wait in the step."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.values.append(outputs["loss"].detach())


class NoHiddenWait(Callback):
    """From the third batch on, anything that makes the host wait for the device inside a training step is an error."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        torch.cuda.set_sync_debug_mode("default")


def train(tensor: int, pipeline: int, devices: int, watch: bool = False) -> dict[str, Any]:
    """Losses and weights of a short run; `tensor == 0` is a plain single-GPU Trainer."""
    losses = Losses()
    strategy: Any = "auto"
    replicas = 1
    if tensor:
        replicas = devices // (tensor * pipeline)
        strategy = TensorPipelineStrategy(tensor, pipeline, micro_batches=4, plan=PLAN)
    trainer = Trainer(
        accelerator="gpu",
        devices=devices,
        strategy=strategy,
        max_steps=STEPS,
        **QUIET,
        callbacks=[losses, NoHiddenWait()] if watch else [losses],
    )
    module = Classifier()
    trainer.fit(module, DataLoader(Samples(STEPS * BATCH), batch_size=BATCH // replicas))
    weights = {name: value.cpu().flatten().tolist() for name, value in module.state_dict().items()}
    return {"losses": [float(v) for v in losses.values], "weights": weights}


if __name__ == "__main__":
    out, *sizes = sys.argv[1:]
    seen = train(*map(int, sizes[:3]), watch=len(sizes) > 3)
    path = Path(out)
    if not path.exists():  # every rank runs this script; all of them saw the same
        path.write_text(json.dumps(seen))
