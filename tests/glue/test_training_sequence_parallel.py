"""Training with activations split along the sequence: loss curve and weights of one plain process (1e-5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.distributed.tensor_models import Block, ViewAttention
from tests.glue.oracle import Layout, Site, check, observe, set_by_formula
from tests.glue.training import GPT, MLP, VOCABULARY, fit
from tests.harness import Ranks, RanksFailed


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


class Experts(nn.Module):
    """Every token through every expert, weighted by a router; or each through its best one, picked from all tokens."""

    def __init__(self, picks: bool) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(MLP(8) for _ in range(2))
        self.picks = picks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.router(x).softmax(-1)
        if not self.picks:
            return sum(share[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[return-value]
        flat, best = x.flatten(0, 1), share.flatten(0, 1).argmax(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            out[best == i] = expert(flat[best == i])
        return out.view(x.shape)


class Shared(GPT):
    """Blocks with modules in common, one of them with all of its modules; and one of experts."""

    def __init__(self, picks: bool = False) -> None:
        super().__init__(layers=6)
        first, second, third, fourth, _, last = self.layers
        second.mlp, third.attn, fourth.ln1 = first.mlp, second.attn, third.ln1  # type: ignore[union-attr]
        self.layers[4] = fourth
        last.mlp = Experts(picks)
        set_by_formula(self)


def shared(site: Site) -> Any:
    return fit(site, Shared(), EvenTokens(), max_epochs=1)


def test_modules_that_blocks_share(ranks: Ranks) -> None:
    """The bias of a layer that returns slices is one parameter by all of its names."""
    check(ranks, shared, (2, 1, 1), plan="auto", sequence_parallel=True)


def picking(site: Site) -> Any:
    return fit(site, Shared(picks=True), EvenTokens(), max_epochs=1)


def test_experts_that_pick_tokens_are_named(ranks: Ranks) -> None:
    options = {"plan": "auto", "sequence_parallel": True}
    text = r"ValueError: layers.5.mlp.experts.0 was given a tensor of shape \(\d+, 8\) instead of the 2 tokens along .*"
    with pytest.raises(RanksFailed, match=f"{text} use sequence_parallel=False, or keep the layers of"):
        ranks(2, observe, picking, (2, 1, 1), options, launch="lightning", timeout=20)
