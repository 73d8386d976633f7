"""Tied, frozen, unused and root parameters: loss curve, weights and gradients of one plain process (1e-5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional as F

from tests.glue.oracle import (
    WIDTH,
    Classifier,
    Layout,
    Samples,
    Site,
    check,
    held,
    observe,
    readable,
    reference,
    set_by_formula,
)
from tests.glue.training import EVERY, GPT, VOCABULARY, Tokens, fit
from tests.harness import Ranks


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.3)


# ------------------------------------------------------------------------------------------------ tied
class Tied(GPT):
    """Head and embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tok.weight

    def configure_optimizers(self) -> Any:
        return adamw(self)


class TwiceTied(Tied):
    """Two ties, met in one order before the blocks and in the other one after them; and two blocks share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = nn.Embedding(VOCABULARY, 8)
        self.kind_head = nn.Linear(8, VOCABULARY, bias=False)
        first, last = self.layers[0], self.layers[-1]
        last.mlp.fc1.weight = first.mlp.fc1.weight  # type: ignore[union-attr]
        set_by_formula(self)
        self.kind_head.weight = self.kind.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) + self.kind(tokens.flip(1))
        for layer in self.layers:
            x = layer(x)
        x = self.ln(x)
        return self.kind_head(x) - self.head(x.flip(-1))


class Copies(Callback):
    """What a rank itself holds of the tied parameters after every step, past what hooks are shown."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        assert module.head.weight is module.tok.weight
        assert module.kind_head.weight is module.kind.weight  # type: ignore[union-attr]
        mine = held(trainer, module).items()
        self.steps.append({n: p.detach().clone() for n, p in mine if n in ("tok.weight", "kind.weight")})


def tied(site: Site) -> Any:
    copies = Copies()
    seen = fit(site, Tied(), gradient_clip_val=1.0, max_epochs=1)
    return {"seen": seen, "twice": fit(site, TwiceTied(), callbacks=[copies]), "copies": copies.steps}


@pytest.mark.parametrize("layout", EVERY[:6])
def test_f18_tied_parameters_stay_tied(ranks: Ranks, layout: Layout) -> None:
    expected = reference(tied)
    found = ranks(math.prod(layout), observe, tied, layout, {"plan": "auto"}, launch="lightning")
    for rank, each in enumerate(found):
        for part in ("seen", "twice"):
            for one, other in zip(each[part]["batches"], expected[part]["batches"], strict=True):
                assert one[0] == pytest.approx(other[0], abs=1e-5), f"loss on rank {rank}"
            for name, value in expected[part]["weights"].items():
                torch.testing.assert_close(each[part]["weights"][name], value, atol=1e-5, rtol=1e-5)
    tensor = layout[0]
    for rank, each in enumerate(found):
        twin = found[rank % tensor]["copies"]
        for mine, theirs in zip(each["copies"], twin, strict=True):
            assert set(mine) == {"tok.weight", "kind.weight"}
            assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


# ------------------------------------------------------------------------------------------------ frozen
class Watch(Callback):
    """Names of the parameters with a gradient before each optimizer step, among those that this rank holds."""

    def __init__(self) -> None:
        self.named: list[set[str]] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.named.append({n for n, p in readable(trainer, module).items() if p.grad is not None})


class FrozenStart(GPT):
    """Everything up to the first layers is frozen, which is all of the first stage."""

    def __init__(self, until: int) -> None:
        super().__init__(4)
        self.frozen = [self.tok, self.pos, *self.layers[:2]]
        self.until = until
        for part in self.frozen:
            part.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch >= self.until:
            for part in self.frozen:
                part.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return adamw(self)


class FrozenEnd(GPT):
    """Everything from the third layer on is frozen: the last stage only hands gradients through."""

    def __init__(self) -> None:
        super().__init__(4)
        for part in (*self.layers[2:], self.ln, self.head):
            part.requires_grad_(False)


def frozen(site: Site) -> Any:
    watch = Watch()
    thawed = fit(site, FrozenStart(1), callbacks=[watch])
    early, late = watch.named[:5], watch.named[5:]
    start = ("tok", "pos", "layers.0", "layers.1")
    assert not any(name.startswith(start) for names in early for name in names)
    if site.layout is None:
        assert all(any(name.startswith(part) for name in names) for names in late for part in start)
    return [thawed, fit(site, FrozenEnd(), max_epochs=1)]


@pytest.mark.parametrize("layout", [*EVERY[:6], (1, 4, 1)])
def test_f19_frozen_stages_and_late_unfreezing(ranks: Ranks, layout: Layout) -> None:
    check(ranks, frozen, layout, plan="auto")


# ------------------------------------------------------------------------------------------------ unused, at the root
class Sometimes(GPT):
    """A second head takes part in odd batches only, a third never; scale and shift hang on the module itself."""

    def __init__(self, odd: int = 1) -> None:
        super().__init__(layers=3)
        self.second = nn.Linear(8, VOCABULARY)
        self.third = nn.Linear(8, VOCABULARY)
        self.never = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.shift = nn.Parameter(torch.zeros(VOCABULARY))
        self.odd = odd
        set_by_formula(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.ln(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self(batch[:, :-1])
        logits = self.head(x) + self.shift
        if batch_idx % 2 == self.odd:
            logits = logits + self.second(x)
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return adamw(self)


def sometimes(site: Site) -> Any:
    watch = Watch()
    runs = [
        fit(site, Sometimes(), callbacks=[watch]),
        fit(site, Sometimes(0), max_epochs=1),
        fit(site, Sometimes(), accumulate_grad_batches=2, max_epochs=1),
    ]
    assert not any(name.startswith(("third", "never")) for names in watch.named for name in names)
    return runs


@pytest.mark.parametrize("layout", [*EVERY[:6], (1, 3, 1)])
def test_f19_unused_parameters_and_parameters_of_the_root(ranks: Ranks, layout: Layout) -> None:
    check(ranks, sometimes, layout, plan="auto")


class BySample(Sometimes):
    """Of every eight samples one goes through the second head: most micro-batches and some replicas never do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self(batch[:, :-1])
        chosen = batch[:, 0] == 4
        logits = self.head(x) + self.shift
        if chosen.any():
            logits = logits + torch.zeros_like(logits).index_put((chosen.nonzero()[:, 0],), self.second(x[chosen]))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def by_sample(site: Site) -> Any:
    return fit(site, BySample())


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 1, 2), (1, 2, 2)])
def test_f19_parameters_that_some_replicas_do_not_use(ranks: Ranks, layout: Layout) -> None:
    check(ranks, by_sample, layout)


# ------------------------------------------------------------------------------------------------ hooks of gradients
class Masked(Classifier):
    """Hooks that are linear in the gradient: a mask and a factor."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(WIDTH) % 2
        self.net.stem.weight.register_hook(lambda gradient: gradient * mask)
        self.net.blocks[2].fc.bias.register_hook(lambda gradient: gradient * 3)


def masked(site: Site) -> Any:
    return fit(site, Masked(), Samples(12), max_epochs=1)


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 1, 2)])
def test_linear_hooks_of_gradients(ranks: Ranks, layout: Layout) -> None:
    check(ranks, masked, layout, micro_batches=2)


class Gathered(Classifier):
    """Its graph gathers features of all replicas, and sends their gradients back; some replicas do not use `side`."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)
        set_by_formula(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.net.stem(batch["x"])
        everyone: Any = self.all_gather(features, sync_grads=True)
        spread = everyone.flatten(0, -2).square().mean(0).square().sum()
        odd = batch["id"] % 2 == 1
        if odd.any():
            features = torch.where(odd[:, None], torch.tanh(self.side(features)), features)
        return F.cross_entropy(self.net.head(self.net.norm(features)), batch["y"]) + 0.1 * spread


def gathered(site: Site) -> Any:
    return fit(site, Gathered(), Samples(16), batch_size=8)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_collectives_of_the_users_graph_do_not_meet_those_of_buckets(ranks: Ranks, zero_stage: int) -> None:
    """Where the former come between the latter depends on what a rank has used."""
    check(ranks, gathered, (1, 1, 2), plan="auto", zero_stage=zero_stage, bucket_bytes=1, timeout=20)


class Skipping(nn.Module):
    """Passes a second tensor on, which only the last block of the model looks at, and one that nobody does."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 16), nn.Linear(16, 8)
        self.last = last

    def forward(self, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, skip, idle, ids = parts
        x = x + self.out(torch.tanh(self.fc(x)))
        return (x * skip if self.last else x), skip, idle, ids


class Skips(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Skipping(i == 2) for i in range(3))
        set_by_formula(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens)
        parts = (x, x.sigmoid(), x * 2, tokens)
        for layer in self.layers:
            parts = layer(parts)
        return self.head(self.ln(parts[0])) + F.one_hot(parts[3], VOCABULARY)


def skips(site: Site) -> Any:
    return fit(site, Skips(), Tokens(20))


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 3, 1)])
def test_f19_tensors_passed_through_a_stage(ranks: Ranks, layout: Layout) -> None:
    check(ranks, skips, layout, plan="auto")
