"""Modules that are refused before anything of them is divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from lightning_parallel.layout import ParallelLayout
from lightning_parallel.strategies.refusals import refuse_loggers, refuse_module


def test_a_lazy_layer_is_named() -> None:
    module = LightningModule()
    module.first = nn.LazyLinear(4)
    with pytest.raises(
        ValueError, match=r"LightningModule has a lazy layer with first.weight of unknown shape; run it"
    ):
        refuse_module(module, ParallelLayout(), 1, 1)


def test_hooks_that_run_after_every_micro_batch_are_named() -> None:
    module = LightningModule()
    module.first = nn.Linear(2, 2)
    handle = module.first.bias.register_post_accumulate_grad_hook(lambda p: None)
    refuse_module(module, ParallelLayout(), 1, 1)
    with pytest.raises(ValueError, match=r"first.bias has a hook .* for each of 4 micro-batches"):
        refuse_module(module, ParallelLayout(), 4, 1)
    with pytest.raises(ValueError, match=r"first.bias has a hook .* 1 micro-batches and 2 replicas"):
        refuse_module(module, ParallelLayout(data=2), 1, 1)
    handle.remove()
    refuse_module(module, ParallelLayout(), 4, 1)


def test_a_module_that_was_compiled_as_a_whole_has_no_stages() -> None:
    module = LightningModule()
    module._compiler_ctx = {"compiler": "dynamo"}  # as Lightning notes it in fit
    refuse_module(module, ParallelLayout(tensor=2), 1, 1)
    with pytest.raises(ValueError, match=r"compile the blocks instead .block.compile\(\)"):
        refuse_module(module, ParallelLayout(pipeline=2), 1, 1)


def test_modules_of_torchscript_have_no_parts() -> None:
    module = LightningModule()
    module.first = torch.jit.script(nn.Linear(2, 2))
    refuse_module(module, ParallelLayout(data=2), 1, 1)
    for layout in (ParallelLayout(tensor=2), ParallelLayout(pipeline=2)):
        with pytest.raises(ValueError, match=r"first is a module of TorchScript, .* 2 tensor and pipeline"):
            refuse_module(module, layout, 1, 1)


def test_loggers_that_run_a_shared_model_on_one_rank_are_refused(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=TensorBoardLogger(tmp_path, log_graph=True))
    trainer.strategy.connect(LightningModule())
    refuse_loggers(trainer, 2)  # Lightning draws nothing without an example
    trainer.lightning_module.example_input_array = torch.ones(1, 2)
    refuse_loggers(trainer, 1)
    with pytest.raises(ValueError, match="log_graph=True runs the model on the first rank alone, but 2 ranks share it"):
        refuse_loggers(trainer, 2)
