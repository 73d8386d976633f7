"""A training script as a user would start it, by any launcher: `python launched.py '{"devices": 2, ...}' out`.

With LightningCLI: `python launched.py fit --config run.yaml`. Every rank writes what it saw into the folder `out`. With
the option `trouble` = {"rank", "batch", "kind"} a rank fails.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc

COLLECTS = gc.isenabled()
gc.disable()  # looking through what is imported, while it grows, takes a tenth of a new process's time

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lightning_parallel
from tests.glue.training import GPT, Tokens

if COLLECTS:
    gc.enable()

SAMPLES, VALIDATION = 12, 5


class Numbered(Dataset[dict[str, torch.Tensor]]):
    """Sequences that know their number."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first, self.tokens = count, first, Tokens(first + count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(self.first + index), "tokens": self.tokens[self.first + index]}


class Model(GPT):
    def __init__(self) -> None:
        super().__init__(layers=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["tokens"], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens = batch["tokens"]
        self.log("val_loss", F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))


class Record(Callback):
    """What one rank saw; written when the run is over and the module is whole again."""

    def __init__(self, out: str | None) -> None:
        self.out = out
        self.seen: dict[str, Any] = {"losses": [], "samples": [], "validated": []}

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        self.seen["losses"].append(float(outputs["loss"]))
        self.seen["samples"].append(batch["id"].tolist())

    def on_validation_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.seen["validated"] += batch["id"].tolist()

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.seen["weights"] = plain_weights(module)
        self.seen["val_loss"] = float(trainer.callback_metrics["val_loss"])
        self.seen["steps"] = trainer.global_step
        if self.out is not None:
            layout = trainer.strategy.layout  # type: ignore[attr-defined]
            self.seen["layout"] = [layout.tensor, layout.pipeline, layout.data]
            Path(self.out, f"rank-{trainer.global_rank}.json").write_text(json.dumps(self.seen))


class Trouble(Callback):
    """At its batch the rank raises, dies or stalls; every rank writes down how the run ended for it."""

    def __init__(self, out: str, rank: int, batch: int, kind: str) -> None:
        self.out, self.rank, self.batch, self.kind = Path(out), rank, batch, kind

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.kind == "wait to be killed":
            time.sleep(0.05)
        if trainer.global_step != self.batch:
            return
        (self.out / f"there-{trainer.global_rank}").write_text(str(os.getpid()))
        if trainer.global_rank != self.rank:
            return
        if self.kind == "raise":
            raise ValueError("the data ran away\nover two lines")
        if self.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        (self.out / f"left-{trainer.global_rank}").write_text(f"{type(exception).__name__} {trainer.global_step}")
        if isinstance(exception, SystemExit):
            trainer.save_checkpoint(self.out / "stopped.ckpt")


def run(options: dict[str, Any], out: str) -> None:
    choice = options.get("strategy", "tp_pp")
    strategy = choice if isinstance(choice, str) else lightning_parallel.TensorPipelineStrategy(**choice)
    trouble = [Trouble(out, **options["trouble"])] if "trouble" in options else []
    trainer = Trainer(
        accelerator="cpu",
        devices=options["devices"],
        num_nodes=options.get("num_nodes", 1),
        strategy=strategy,
        max_epochs=options.get("epochs", 2),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[Record(out), *trouble],
    )
    module = Model()
    fit(trainer, module, options["batch_size"])
    if isinstance(choice, dict) and "start_method" in choice:  # this process is none of the ranks
        brought = {"weights": plain_weights(module), "val_loss": float(trainer.callback_metrics["val_loss"])}
        Path(out, "main.json").write_text(json.dumps(brought))


def plain_weights(module: LightningModule) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in module.state_dict().items()}


class Data(LightningDataModule):
    """Numbered sequences to learn from and to validate with."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbered(SAMPLES), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbered(VALIDATION, first=100), batch_size=2)


def fit(trainer: Trainer, module: LightningModule, batch_size: int) -> None:
    trainer.fit(module, datamodule=Data(batch_size))


if __name__ == "__main__":
    if sys.argv[1] == "fit":
        from lightning.pytorch.cli import LightningCLI

        LightningCLI(Model, Data, save_config_callback=None)
    else:
        run(json.loads(sys.argv[1]), sys.argv[2])
