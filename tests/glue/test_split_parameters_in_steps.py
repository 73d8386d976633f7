"""A step that takes a tensor rank's part of a parameter for the whole is refused; every other use passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from tests.glue.oracle import Classifier, Samples, Site, check, observe, set_by_formula, weights
from tests.harness import Ranks, RanksFailed


class Penalized(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 1e-3 * sum(p.square().sum() for p in self.parameters())


class Counted(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("size", float(self.net.blocks[0].fc.weight.numel()))


class Functional(Classifier):
    """A head that shares its weight without being a layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.linear(self.net(batch["x"]), self.net.blocks[0].fc.weight[:, :4]).square().mean()


class ByHand(Classifier):
    """Clips by its own norm between backward and step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        self.log("norm", norm)
        optimizer.step()


class Storing(nn.Module):
    """A feed-forward layer that keeps its activations for a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 16)
        self.out = nn.Linear(16, 8)
        self.kept = torch.zeros(())
        self.share = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = torch.tanh(self.fc(x))
        return x + self.out(self.kept)


class Sparse(Classifier):
    """A penalty on activations between a pair of split layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(Storing() for _ in range(2))
        set_by_formula(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 0.1 * self.net.blocks[0].kept.abs().mean()


class Reading(Storing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.share = float(self.kept.detach().mean())
        return out


class ReadsInside(Sparse):
    """Looks at such an activation as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(Reading() for _ in range(2))
        set_by_formula(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


def fit(site: Site, module: LightningModule) -> None:
    loader = site.loader(Samples(8), 4)
    site.trainer(max_epochs=1, num_sanity_val_steps=0).fit(module, loader, loader)


def refused(site: Site) -> None:
    fit(Site(site.layout, site.rank, {"micro_batches": 1}), site.options["kind"]())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Penalized, "training_step uses net.blocks.0.fc.weight outside of net.blocks.0.fc .in square.*'replicate'"),
        (Counted, "validation_step uses net.blocks.0.fc.weight outside of net.blocks.0.fc .in numel"),
        (Functional, "training_step uses net.blocks.0.fc.weight outside of net.blocks.0.fc .in __getitem__"),
        (Sparse, "a value computed from the output of net.blocks.0.fc outside of the module that holds it .in abs"),
        (ReadsInside, "a value computed from the output of net.blocks.0.fc as a number"),
        (ByHand, "training_step uses the gradient of net.blocks.0.fc.weight outside"),
    ],
    ids=["penalty", "count", "functional", "activation", "number", "by hand"],
)
def test_a_part_is_not_taken_for_the_whole(ranks: Ranks, kind: Any, text: str) -> None:
    with pytest.raises(RanksFailed, match=text):
        ranks(2, observe, refused, (2, 1, 1), {"kind": kind}, launch="lightning")


class Allowed(Classifier):
    """Uses whole parameters as it likes, and of split ones what is the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(4))
        set_by_formula(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        split = self.net.blocks[0].fc.weight
        x = batch["x"].to(split.device, split.dtype)
        loss = F.cross_entropy(self.net(x) * self.scale, batch["y"]) + self.net.stem.weight.square().sum() * 1e-2
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        self.log("loss", loss)


def allowed(site: Site) -> Any:
    module = Allowed()
    fit(site, module)
    return weights(module)


def test_what_is_the_same_on_every_rank_passes(ranks: Ranks) -> None:
    check(ranks, allowed, (2, 1, 1), micro_batches=1)
