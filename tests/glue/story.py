"""A training job and what its user does next, with a Trainer that a site makes: what was seen on the way."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch.nn import functional as F

from lightning_parallel.planner.model_shape import ModelShape
from tests.glue.oracle import Site
from tests.glue.training import GPT, Tokens

EPOCHS, BATCH = 2, 8
SHAPE = ModelShape(layers=8, hidden=1024, heads=2, ffn=4096, vocab=1000, seq=8)
"""100 million parameters, not the module's: what is planned for them needs no larger module to run."""
TIGHT = 3.0
"""GiB of a GPU that holds their training on up to two only if states are in host memory."""
Weights = Callable[[str], dict[str, torch.Tensor]]
"""Whole weights of a checkpoint."""


class Model(GPT):
    """Learns with a schedule and is validated; what it validates is logged for all ranks together."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Adam(Model):
    """Takes steps that its states in host memory take, of ranks that have such, and torch's."""

    offloads = False

    def configure_optimizers(self) -> Any:
        options: Any = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.01}
        if self.offloads:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(self.parameters(), **options)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), **options)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class OffloadedAdam(Adam):
    offloads = True


def of_file(path: str) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint as plain Trainers and FSDP write it."""
    return torch.load(path, map_location="cpu", weights_only=False)["state_dict"]


def of_folder(path: str) -> dict[str, torch.Tensor]:
    """By Lightning's own tool, in the order of the module."""
    out = f"whole-of-{os.getpid()}.ckpt"
    convert_zero_checkpoint_to_fp32_state_dict(path, out)
    found = of_file(out)
    return {name: found[name] for name in Model().state_dict()}


def in_folder(folder: Path, run: Callable[[], Any]) -> Any:
    """Runs in a folder that is made if need be."""
    before = os.getcwd()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    try:
        return run()
    finally:
        os.chdir(before)


class Seen(Callback):
    """Means over ranks of losses and of what each rank logged, learning rates and validations since it was asked."""

    def __init__(self) -> None:
        self.now: dict[str, list[float]] = {}
        self.own: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
        own = float(trainer.callback_metrics["loss"])
        self.own.append(own)
        self._add("loss", trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean"))
        self._add("logged", trainer.strategy.reduce(outputs["loss"].new_tensor(own), reduce_op="mean"))
        self._add("rate", trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._add("validation", trainer.callback_metrics["val_loss"])

    def _add(self, name: str, value: Any) -> None:
        self.now.setdefault(name, []).append(float(value))

    def taken(self) -> dict[str, list[float]]:
        """What there was since the last time."""
        taken, self.now = self.now, {}
        return taken


def story(site: Site, make: Callable[[], LightningModule], weights_of: Weights, **options: Any) -> dict[str, Any]:
    """Fits with checkpoints, saves, validates, fits on, and resumes in a new trainer.

    Returns:
        "same" is to be that of one plain process; "own" what this rank logged; "trainer" and "module" are those that
        fitted last.
    """
    seen, module = Seen(), make()
    train, validation = (site.loader(Tokens(count * BATCH), BATCH) for count in (4, 2))
    kept = ModelCheckpoint("kept", filename="{epoch}", save_top_k=-1)
    trainer = site.trainer(max_epochs=EPOCHS, callbacks=[seen, kept], enable_checkpointing=True, **options)
    trainer.fit(module, train, validation)
    same: dict[str, Any] = {"fit": seen.taken(), "kept": weights_of(f"kept/epoch={EPOCHS - 1}.ckpt")}
    own = seen.own[:]
    trainer.save_checkpoint("after.ckpt")
    same["saved after"] = weights_of("after.ckpt")
    same["validated"] = trainer.validate(module, validation, verbose=False)
    trainer.fit_loop.max_epochs = EPOCHS + 1
    seen.taken()
    trainer.fit(module, train, validation)
    trainer.save_checkpoint("again.ckpt")
    same["fitted on"] = {**seen.taken(), "weights": weights_of("again.ckpt")}
    further = Seen()
    resumed = site.trainer(max_epochs=EPOCHS + 1, callbacks=[further], **options)
    resumed.fit(make(), train, validation, ckpt_path=f"kept/epoch={EPOCHS - 1}.ckpt")
    resumed.save_checkpoint("resumed.ckpt")
    same["resumed"] = {**further.taken(), "weights": weights_of("resumed.ckpt")}
    return {"same": same, "own": own, "trainer": trainer, "module": module}


class Fails(Callback):
    """Raises in the second batch."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            raise ArithmeticError("the second batch")
