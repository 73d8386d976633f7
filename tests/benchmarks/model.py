"""The model, data and optimizer that every job trains: a GPT without dropout, with equal start weights everywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the global batch.

    Attributes:
        pause: seconds that each block sleeps in its forward pass, in its backward pass, and when a weight's gradient is
            computed, which may be apart.
    """

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    batch: int
    pause: float = 0.0


CONFIGS = {
    "mid": Sizes(layers=8, width=384, heads=8, length=32, vocabulary=1024, batch=16),
    "tiny": Sizes(layers=4, width=128, heads=4, length=64, vocabulary=1024, batch=16),
    # Sleeping needs no core: what a schedule adds to its work shows even on a machine that is busy with other things.
    "paced": Sizes(layers=4, width=32, heads=2, length=8, vocabulary=64, batch=16, pause=0.02),
}


class Pause(torch.autograd.Function):
    """Hands a tensor on, late."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Embedding(nn.Module):
    """Tokens and positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class Attention(nn.Module):
    """Causal attention whose projections are separate linears, as DTensor plans need them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.width // sizes.heads
        self.q_proj = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k_proj = nn.Linear(sizes.width, sizes.width, bias=False)
        self.v_proj = nn.Linear(sizes.width, sizes.width, bias=False)
        self.o_proj = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Two linears around a GELU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up_proj = nn.Linear(sizes.width, 4 * sizes.width, bias=False)
        self.down_proj = nn.Linear(4 * sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.mlp = FeedForward(sizes)
        self.pause = sizes.pause
        if self.pause:
            self.mlp.up_proj.weight.register_hook(self._rest)

    def _rest(self, grad: Tensor) -> None:
        time.sleep(self.pause)

    def forward(self, x: Tensor) -> Tensor:
        if self.pause:
            x = Pause.apply(x, self.pause)
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """The whole model, or the part of it that a hand-made pipeline stage holds.

    Args:
        sizes: sizes of the whole model.
        stage: index of the stage.
        stages: number of stages; blocks are divided evenly.
    """

    def __init__(self, sizes: Sizes, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding: nn.Module = Embedding(sizes)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm: nn.Module = nn.LayerNorm(sizes.width)
        self.head: nn.Module = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        with torch.no_grad():
            for p in self.parameters():
                if p.dim() == 2:
                    p.copy_(torch.randn(p.shape, generator=generator) * 0.02)
        if stages > 1:
            share = sizes.layers // stages
            self.blocks = self.blocks[stage * share : (stage + 1) * share]
            if stage > 0:
                self.embedding = nn.Identity()
            if stage < stages - 1:
                self.norm, self.head = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batches(sizes: Sizes, steps: int, part: int = 0, parts: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of every step, the same in every job; of `parts` replicas each gets its samples."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(1234 + step)
        ids = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=generator)
        mine = ids.chunk(parts)[part]
        yield mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every job."""
    return torch.optim.Adam(module.parameters(), lr=1e-3)
