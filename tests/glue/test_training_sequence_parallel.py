"""Training with activations split along the sequence: loss curve and weights of one plain process (1e-5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.distributed.tensor_models import Block, ViewAttention
from tests.glue.oracle import Layout, Site, check, set_by_formula
from tests.glue.training import GPT, VOCABULARY, fit
from tests.harness import Ranks


class EvenTokens(Dataset[torch.Tensor]):
    """Sequences of 4 tokens and their successors, by formula."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(5) * (index + 3) + index * index) % VOCABULARY


class Separate(GPT):
    """The same model with attention and MLP in modules of their own."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.layers = nn.ModuleList(Block(ViewAttention(8, 2), 8) for _ in range(3))
        set_by_formula(self)


def steps(site: Site) -> Any:
    return fit(site, Separate(), EvenTokens())


@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 1, 2), (2, 2, 1)])
def test_sequence_parallel(ranks: Ranks, layout: Layout) -> None:
    check(ranks, steps, layout, plan="auto", sequence_parallel=True, micro_batches=2 if layout[1] > 1 else 1)
