"""What Lightning's own strategies do not do, or do otherwise than a plain process: found before they are taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from lightning_parallel import AutoStrategy
from lightning_parallel.callbacks import MicroBatchSizer
from lightning_parallel.strategies.lacking import refuse_monitors, what_lacks
from tests.glue.oracle import QUIET
from tests.glue.training import GPT, Tokens

AMPLE = 1.0


class ReadsGradients(GPT):
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


class Nameless(GPT):
    """Its blocks are no list."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.first, self.second = self.layers
        del self.layers


def _frozen() -> GPT:
    module = GPT(layers=2)
    next(module.parameters()).requires_grad_(False)
    return module


def _by_hand() -> GPT:
    module = GPT(layers=2)
    module.automatic_optimization = False
    return module


def _tied_blocks() -> GPT:
    module = GPT(layers=2)
    module.layers[1].ln1.weight = module.layers[0].ln1.weight
    return module


def _with(change: Callable[[GPT], Any]) -> Callable[[], GPT]:
    """A module that something was done to."""

    def make() -> GPT:
        module = GPT(layers=2)
        change(module)
        return module

    return make


class Thaws(GPT):
    def on_train_epoch_start(self) -> None:
        self.tok.weight.requires_grad = self.trainer.current_epoch > 0


class FreezesByAHelper(GPT):
    def setup(self, stage: str) -> None:
        freeze_all_but(self, "head")


def freeze_all_but(module: LightningModule, name: str) -> None:
    module.requires_grad_(False)
    getattr(module, name).requires_grad_(True)


class Follows(GPT):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


def _by_command_line(module: GPT) -> None:
    """As LightningCLI gives a module the optimizer and the scheduler that it made."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    scheduler = ReduceLROnPlateau(optimizer, monitor="loss")
    made = partial(LightningCLI.configure_optimizers, optimizer=optimizer, lr_scheduler=scheduler)
    module.configure_optimizers = MethodType(update_wrapper(made, LightningCLI.configure_optimizers), module)


class EndsEpochs(GPT):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch.sum() > 1e3 else None


class Stops(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.should_stop = bool(trainer.callback_metrics["loss"] < 0.1)


class Decays(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + sum(p.pow(2).sum() for p in self.parameters())


class GroupsByShape(GPT):
    def configure_optimizers(self) -> Any:
        groups = [[p for p in self.parameters() if (p.ndim < 2) == flat] for flat in (False, True)]
        return torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}])


class WholeMatrices(GPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Offloads(GPT):
    def configure_optimizers(self) -> Any:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(self.parameters())


class OwnBackward(Offloads):
    def backward(self, loss: Any, *args: Any) -> None:
        loss.backward()


class LooksAtGradients(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        trainer.norms = [p.grad for p in module.parameters()]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Tokens(4))


@pytest.mark.parametrize(
    ("runtimes", "make", "options", "lack"),
    [
        ("ddp fsdp", lambda: GPT(layers=2), {}, ""),
        ("ddp fsdp deepspeed", _by_hand, {}, "steps by hand"),
        ("ddp fsdp deepspeed", _frozen, {}, "parameters are frozen"),
        ("ddp fsdp deepspeed", lambda: GPT(layers=2), {"callbacks": [BackboneFinetuning()]}, "parameters are frozen"),
        (
            "ddp fsdp deepspeed",
            lambda: GPT(layers=2),
            {"callbacks": [MicroBatchSizer()]},
            "MicroBatchSizer cuts batches",
        ),
        ("ddp", ReadsGradients, {}, ""),
        ("fsdp deepspeed", ReadsGradients, {}, "on_before_optimizer_step would see gradients in shards"),
        ("fsdp deepspeed", lambda: GPT(layers=2), {"callbacks": [StochasticWeightAveraging(0.1)]}, "average shards"),
        ("fsdp deepspeed", lambda: GPT(layers=2), {"callbacks": [EMAWeightAveraging()]}, "average shards"),
        ("fsdp", lambda: GPT(layers=2), {"gradient_clip_val": 1.0}, "FSDP does not clip by norm"),
        ("deepspeed", Offloads, {"gradient_clip_val": 1.0}, ""),
        ("fsdp", lambda: GPT(layers=2), {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, ""),
        (
            "deepspeed",
            lambda: GPT(layers=2),
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            "by value",
        ),
        ("ddp", lambda: GPT(layers=2), {"callbacks": [LearningRateMonitor(), Callback()], "logger": True}, ""),
        ("ddp fsdp", Thaws, {}, "parameters are frozen or unfrozen on the way"),
        ("ddp fsdp", FreezesByAHelper, {}, "parameters are frozen or unfrozen on the way"),
        ("ddp fsdp", Follows, {}, "ReduceLROnPlateau goes by a logged value"),
        ("ddp", _with(_by_command_line), {}, "ReduceLROnPlateau goes by a logged value"),
        ("ddp", EndsEpochs, {}, "leave an epoch on its own"),
        ("ddp", lambda: GPT(layers=2), {"callbacks": [Stops()]}, "leave an epoch on its own"),
        (
            "ddp",
            lambda: GPT(layers=2),
            {"callbacks": [EarlyStopping("loss")]},
            "EarlyStopping goes by the logged 'loss'",
        ),
        (
            "ddp",
            lambda: GPT(layers=2),
            {"callbacks": [ModelCheckpoint(monitor="loss")], "enable_checkpointing": True},
            "ModelCheckpoint goes by the logged 'loss'",
        ),
        ("ddp", lambda: GPT(layers=2), {"callbacks": [ModelCheckpoint()], "enable_checkpointing": True}, ""),
        ("ddp", lambda: GPT(layers=2), {"use_distributed_sampler": False}, "own samplers"),
        ("ddp", _with(lambda module: setattr(module.tok, "max_norm", 1.0)), {}, "tok has max_norm=1.0"),
        (
            "ddp",
            _with(lambda module: module.head.weight.register_post_accumulate_grad_hook(print)),
            {},
            "head.weight has a hook",
        ),
        ("fsdp deepspeed", lambda: GPT(layers=2), {"callbacks": [LooksAtGradients()]}, "a hook would see gradients"),
        ("fsdp deepspeed", Decays, {}, "goes through the parameters"),
        (
            "fsdp deepspeed",
            lambda: GPT(layers=2),
            {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]},
            "prune",
        ),
        ("fsdp", _with(lambda module: module.head.double()), {}, "several dtypes"),
        ("fsdp", GroupsByShape, {}, "goes by shapes or names"),
        ("fsdp", WholeMatrices, {}, "no optimizer is named"),
        ("deepspeed", lambda: GPT(layers=2), {}, "its own DeepSpeedCPUAdam only"),
        ("deepspeed", OwnBackward, {}, "a backward of its own"),
        ("deepspeed", Offloads, {"precision": "bf16-mixed"}, "in 16 bit where autocast"),
        ("fsdp", Nameless, {}, "no repeated blocks"),
        ("fsdp", _tied_blocks, {}, "no repeated blocks"),
    ],
)
def test_lightning_is_left_what_it_does_alike(runtimes: str, make: Any, options: dict[str, Any], lack: str) -> None:
    trainer = Trainer(accelerator="cpu", strategy=AutoStrategy(memory_gib=AMPLE), devices=1, **{**QUIET, **options})
    trainer.strategy.connect(make())
    for runtime in runtimes.split():
        found = what_lacks(runtime, trainer)
        assert lack in found, found
        assert bool(lack) == bool(found), found


@pytest.mark.parametrize(
    ("loader", "lack"),
    [(DataLoader(Tokens(8), 4), ""), (DataLoader(Endless(), 4), "no length"), (iter(Tokens(8)), "no length")],
)
def test_data_that_may_end_on_one_rank_alone(loader: Any, lack: str) -> None:
    trainer = Trainer(accelerator="cpu", strategy=AutoStrategy(memory_gib=AMPLE), devices=1, **QUIET)
    module = GPT(layers=2)
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, train_dataloaders=loader)
    found = what_lacks("ddp", trainer)
    assert lack in found
    assert bool(lack) == bool(found)


def test_deepspeed_takes_the_first_gpus_of_a_node() -> None:
    trainer = Trainer(accelerator="cpu", strategy=AutoStrategy(memory_gib=AMPLE), devices=2, **QUIET)
    strategy: Any = trainer.strategy
    strategy.connect(Offloads(layers=2))
    for numbers, lack in (
        ((0, 1), ""),
        ((1, 3), "takes the first GPUs of a node, not those numbered [1, 3]; set CUDA"),
    ):
        strategy.parallel_devices = [torch.device("cuda", number) for number in numbers]
        found = what_lacks("deepspeed", trainer)
        assert lack in found
        assert bool(lack) == bool(found)
    assert what_lacks("ddp", trainer) == ""


def test_shards_come_home_from_no_spawned_process() -> None:
    strategy = AutoStrategy(memory_gib=AMPLE, start_method="spawn")
    trainer = Trainer(accelerator="cpu", strategy=strategy, devices=1, **QUIET)
    strategy.connect(GPT(layers=2))
    assert what_lacks("ddp", trainer) == ""
    assert "spawned or forked" in what_lacks("fsdp", trainer)


def test_schedulers_that_no_text_shows_are_refused_when_they_are_there() -> None:
    configs = [SimpleNamespace(reduce_on_plateau=False)]
    refuse_monitors(SimpleNamespace(lr_scheduler_configs=configs), "ddp")
    configs.append(SimpleNamespace(reduce_on_plateau=True))
    with pytest.raises(ValueError, match="each rank of ddp would have its own, and with it its own learning rate; use"):
        refuse_monitors(SimpleNamespace(lr_scheduler_configs=configs), "ddp")
