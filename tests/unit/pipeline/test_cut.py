"""A cut stage without processes: what it says when the step needs more than this stage has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_parallel.pipeline.cut import StageCut
from lightning_parallel.pipeline.placeholder import PipelineCutError
from lightning_parallel.pipeline.trace import CutPlan


class Remembers(nn.Module):
    """Stores a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.extra = x.square().mean()
        return x


def test_what_a_foreign_block_stores_on_itself_is_missed_clearly() -> None:
    root = nn.Sequential(Remembers(), Remembers())
    owners = {name: (int(name[0]),) for name, _ in root.named_parameters()}
    cut = StageCut(root, CutPlan(("0", "1"), ((0, 1), (1, 2)), owners), 1, torch.device("cpu"))
    cut.apply()

    def step() -> torch.Tensor:
        return root(torch.ones(3, 2)).mean() + sum(block.extra for block in root)  # type: ignore[misc]

    with pytest.raises(PipelineCutError, match="no attribute 'extra'.*exists only on the stage that runs it"):
        cut.run(step, torch.ones(3, 2))
    cut.restore()
