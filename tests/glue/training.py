"""A small language model as a user would write it, by formula, and what a training run of it shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.glue.oracle import Layout, Site, set_by_formula, weights

EVERY: list[Layout] = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2), (2, 2, 2)]
"""Every layout of one or two ranks per dimension."""
VOCABULARY, LENGTH = 11, 6
"""The vocabulary does not divide by two."""


class Tokens(Dataset[torch.Tensor]):
    """Sequences of LENGTH + 1 tokens by formula."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(LENGTH + 1) * (index + 3) + index * index) % VOCABULARY


class Attention(nn.Module):
    """Causal attention with one fused projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        q, k, v = (t.view(samples, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(samples, length, -1))


class MLP(nn.Module):
    """Two linears."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(LightningModule):
    """Embedding, layers and head; `configure_optimizers` is set by the scenario."""

    def __init__(self, layers: int = 2, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, width)
        self.pos = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        set_by_formula(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Notes:
    """What a module saw on its own rank; an object, because a list of the module's own would follow the last stage."""

    def __init__(self) -> None:
        self.entries: dict[str, list[Any]] = {}

    def add(self, name: str, value: Any) -> None:
        self.entries.setdefault(name, []).append(value)


class Record(Callback):
    """Loss, logged value, step count and learning rates after every batch."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        logged = {key: float(value) for key, value in sorted(trainer.callback_metrics.items())}
        self.batches.append((float(outputs["loss"]), logged, trainer.global_step, rates))


def fit(
    site: Site,
    module: LightningModule,
    data: Dataset[Any] | None = None,
    batch_size: int = 8,
    callbacks: Sequence[Callback] = (),
    **trainer: Any,
) -> Any:
    """Trains, by default two epochs of five batches with an uneven last one; all that the run showed."""
    record = Record()
    runner = site.trainer(callbacks=[record, *callbacks], **trainer)
    runner.fit(module, site.loader(Tokens(36) if data is None else data, batch_size))
    return {"batches": record.batches, "weights": weights(module), "steps": runner.global_step}
