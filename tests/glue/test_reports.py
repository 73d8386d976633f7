"""What the planner expects of a run is what its ranks hold: model states by layout, ZeRO stage and precision."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_parallel import TensorPipelineStrategy, ZeroConfig
from lightning_parallel.callbacks import MemoryReport, PlanReport
from lightning_parallel.planner.hardware import GIB
from lightning_parallel.strategies import ZeroStrategy
from tests.glue.oracle import Site, shard
from tests.glue.training import GPT, Tokens
from tests.harness import Ranks

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Wide(GPT):
    """Enough elements that paddings and counters are below a thousandth of them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(layers=4, width=32)
        if tied:
            self.head.weight = self.tok.weight

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Sharded(Wide):
    """For FSDP as torch has it now."""

    def configure_model(self) -> None:
        shard(self, self.layers)


def compared(world_size: int, strategy: Any, module: type[Wide] = Wide, tied: bool = False, **options: Any) -> Any:
    """The reports of a run of four steps, and what it printed."""
    reports = [MemoryReport(), PlanReport(after_steps=4)]
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_steps=4,
        callbacks=reports,
        **QUIET,
        **options,
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.fit(module(tied), Site().loader(Tokens(32), 4))
    return reports[0].ranks, reports[1].ranks, printed.getvalue()


NUMBERS = 64 / GIB
NARROW = ZeroConfig(2, gradient_dtype="parameter")


def on_two(rank: int, world_size: int) -> dict[str, Any]:
    def split(tensor: int, pipeline: int, **options: Any) -> Any:
        return TensorPipelineStrategy(tensor, pipeline, plan="auto", **options)

    return {
        "tensor": compared(world_size, split(2, 1)),
        "pipeline": compared(world_size, split(1, 2)),
        "tied pipeline": compared(world_size, split(1, 2, schedule="gpipe"), tied=True),
        "data": compared(world_size, split(1, 1)),
        "zero 1": compared(world_size, ZeroStrategy(1)),
        "zero 2": compared(world_size, ZeroStrategy(2)),
        "zero 3": compared(world_size, ZeroStrategy(3)),
        "zero 1, offload": compared(world_size, ZeroStrategy(1, offload="cpu")),
        "zero 2, offload": compared(world_size, ZeroStrategy(2, offload="cpu"), precision="bf16-true"),
        "zero 3, offload": compared(world_size, ZeroStrategy(3, offload="cpu", offload_parameters=True)),
        "zero 3, states alone": compared(world_size, ZeroStrategy(3, offload="cpu")),
        "zero 2, half precision": compared(world_size, ZeroStrategy(2), precision="bf16-true"),
        "zero 2, narrow": compared(world_size, ZeroStrategy(NARROW), precision="bf16-true"),
        "autocast": compared(world_size, ZeroStrategy(1), precision="bf16-mixed"),
        "ddp": compared(world_size, "ddp"),
        "fsdp": compared(world_size, ModelParallelStrategy(2, 1, process_group_backend="gloo"), Sharded),
    }


def on_four(rank: int, world_size: int) -> dict[str, Any]:
    def split(tensor: int, pipeline: int, **options: Any) -> Any:
        return TensorPipelineStrategy(tensor, pipeline, plan="auto", **options)

    return {
        "tensor and pipeline": compared(world_size, split(2, 2)),
        "tensor": compared(world_size, split(2, 1)),
        "tensor, zero 1": compared(world_size, split(2, 1, zero_stage=1)),
        "tensor, zero 2": compared(world_size, split(2, 1, zero_stage=2)),
        "pipeline": compared(world_size, split(1, 2)),
        "pipeline, zero 1": compared(world_size, split(1, 2, zero_stage=1)),
        "pipeline, zero 2": compared(world_size, split(1, 2, zero_stage=2)),
    }


def on_eight(rank: int, world_size: int) -> dict[str, Any]:
    strategies = [TensorPipelineStrategy(2, 2, plan="auto", zero_stage=stage) for stage in (0, 1, 2)]
    return {f"every dimension, zero {s.zero_config.stage}": compared(world_size, s) for s in strategies}


@pytest.mark.parametrize(("count", "runs"), [(2, on_two), (4, on_four), (8, on_eight)])
def test_f33f_planned_states_are_held(ranks: Ranks, count: int, runs: Any) -> None:
    for rank, cases in enumerate(ranks(count, runs, launch="lightning", timeout=100)):
        for case, (memory, plan, printed) in cases.items():
            assert len(memory) == len(plan) == count, "every rank knows of all"
            for holder, figures in enumerate(memory):
                for kind, (planned, held) in figures.items():
                    # Parameters that are elsewhere share a single number.
                    near = pytest.approx(planned, rel=0.01, abs=NUMBERS)
                    assert held == near, f"{kind} of rank {holder}: {case}"
            assert all(seconds > 0 for figures in plan for seconds in figures["s/step"])
            assert ("planned / held" in printed and "planned / measured" in printed) == (rank == 0), case


def test_reports_say_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="after_steps=2 leaves no step to time"):
        PlanReport(after_steps=2)
    with pytest.raises(ValueError, match="after_steps=0 is before the first step"):
        MemoryReport(after_steps=0)

    class Odd(Wide):
        def configure_optimizers(self) -> Any:
            return torch.optim.RMSprop(self.parameters())

    trainer = Trainer(accelerator="cpu", devices=1, max_steps=2, callbacks=[MemoryReport()], **QUIET)
    with pytest.raises(ValueError, match="what RMSprop keeps is not known to the planner; it knows Adam"):
        trainer.fit(Odd(), Site().loader(Tokens(8), 4))
    assert trainer.global_step == 0, "before anything was trained"
