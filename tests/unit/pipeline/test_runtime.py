"""The runtime on one stage, without processes: which actions it tells its user about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lightning_parallel.layout import ParallelLayout
from lightning_parallel.pipeline.runtime import PipelineRuntime
from lightning_parallel.pipeline.schedules import build_schedule


class Calls:
    """Notes what the runtime asks for."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def forward(self, micro_batch: int) -> torch.Tensor:
        self.seen.append(f"F{micro_batch}")
        return torch.ones((), requires_grad=True) * 2

    def backward(self, output: Any, micro_batch: int) -> torch.Tensor:
        self.seen.append(f"B{micro_batch}")
        output.backward()
        return output  # type: ignore[no-any-return]

    def before_last_backward(self) -> None:
        self.seen.append("last")

    def reduce(self) -> None:
        self.seen.append("reduce")


def test_a_schedule_that_is_built_again_runs_like_the_first() -> None:
    """Built schedules are cached; once one fell out of the cache, its copy must not be mistaken for another."""
    layout = ParallelLayout(1, 1, 1)
    mesh: Any = SimpleNamespace(stage=0, layout=layout, boundary=None, control=None, device=torch.device("cpu"))
    runtime = PipelineRuntime(mesh, None)
    for _ in range(2):
        calls = Calls()
        runtime.run(build_schedule("1f1b", 1, 2), calls)
        assert calls.seen == ["F0", "B0", "F1", "last", "B1", "reduce"]
