"""Start weights: bit-identical for every layout with the same seed, equal on every rank with any seeds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional as F

from tests.glue.oracle import Layout, Site, check, held, observe
from tests.glue.training import EVERY, LENGTH, VOCABULARY, Layer, Tokens, fit
from tests.harness import Ranks


class Sprinkled(nn.Module):
    """A layer of the user's own, which starts its weights in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(8))
        self.register_buffer("ramp", torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain, mean=1.0)
        self.ramp = torch.arange(8, device=self.gain.device, dtype=self.gain.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.ramp


class Net(nn.Module):
    """Starts as torch and `Sprinkled` start it; head and embedding are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, 8)
        self.pos = nn.Embedding(LENGTH, 8)
        self.layers = nn.ModuleList(Layer(8, 2) for _ in range(3))
        self.own = Sprinkled()
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.own(x))


class Module(LightningModule):
    """Built in `__init__`, in `configure_model`, or there on the meta device."""

    def __init__(self, when: str, rate: float = 0.0) -> None:
        super().__init__()
        self.when, self.rate = when, rate
        self.net: nn.Module | None = Net() if when == "init" else None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        with torch.device("meta" if self.when == "meta" else "cpu"):
            self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.net is not None
        return F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)


class Pieces(Callback):
    """Copies of what a rank itself holds when training starts."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        assert module.trainer.strategy.optimizers[0].param_groups[0]["params"]
        self.held = {name: p.detach().clone() for name, p in held(trainer, module).items()}


def start(site: Site, module: LightningModule) -> Any:
    """Weights after a run whose learning rate is 0, and what this rank held."""
    pieces = Pieces()
    seen = fit(site, module, Tokens(8), callbacks=[pieces], max_epochs=1)
    return seen["weights"], pieces.held


def seeded(site: Site) -> Any:
    seed_everything(7)
    built = start(site, Module("init"))[0]
    seed_everything(7)
    configured = start(site, Module("configure"))[0]
    assert all(torch.equal(built[name], configured[name]) for name in built)
    return configured


@pytest.mark.parametrize("layout", EVERY)
def test_f8_the_same_seed_starts_every_layout_alike(ranks: Ranks, layout: Layout) -> None:
    check(ranks, seeded, layout, atol=0, plan="auto")


def seeded_by_rank(site: Site) -> Any:
    torch.manual_seed(100 + site.rank)
    return [start(site, Module("init")), start(site, Module("configure")), start(site, Module("meta"))]


def seeded_by_rank_0(site: Site) -> Any:
    torch.manual_seed(100)
    return start(site, Module("init"))[0]


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)])
def test_f8_replicas_start_alike_however_ranks_were_seeded(ranks: Ranks, layout: Layout) -> None:
    found = ranks(math.prod(layout), observe, seeded_by_rank, layout, {"plan": "auto"}, launch="lightning")
    for way in range(3):
        weights = [each[way][0] for each in found]
        for other in weights[1:]:
            assert all(torch.equal(weights[0][name], other[name]) for name in weights[0])
        assert_no_copies(weights[0], [each[way][1] for each in found], layout)
    expected = seeded_by_rank_0(Site())
    assert all(torch.equal(value, found[-1][0][0][name]) for name, value in expected.items())


def assert_no_copies(weights: dict[str, torch.Tensor], held: list[dict[str, torch.Tensor]], layout: Layout) -> None:
    """Parts that ranks or layers hold are parts of the whole, not copies of one part."""
    first, second = weights["net.layers.0.mlp.fc1.weight"].chunk(2)
    assert not torch.equal(first, second)
    assert not torch.equal(weights["net.layers.0.mlp.fc1.weight"], weights["net.layers.1.mlp.fc1.weight"])
    assert torch.equal(weights["net.tok.weight"], weights["net.head.weight"])
    assert weights["net.own.ramp"].tolist() == list(range(8))
    tensor, pipeline, _ = layout
    if tensor == 2:
        assert torch.equal(held[0]["net.layers.0.mlp.fc1.weight"], first)
        assert torch.equal(held[1]["net.layers.0.mlp.fc1.weight"], second)
        assert torch.equal(held[0]["net.layers.0.ln1.weight"], held[1]["net.layers.0.ln1.weight"])
    if pipeline == 2:
        assert "net.layers.0.mlp.fc1.weight" in held[0]
        assert "net.layers.0.mlp.fc1.weight" not in held[-1]
        assert "net.layers.2.mlp.fc1.weight" in held[-1]


# ------------------------------------------------------------------------------------------------ meta device
def meta(site: Site) -> Any:
    """Start weights drawn from the meta device in both ways, and training from them."""
    seed_everything(5)
    configured = start(site, Module("meta"))[0]
    trainer = site.trainer(max_steps=1)
    seed_everything(5)
    with trainer.init_module(empty_init=True):
        module = Module("init")
    assert site.layout is not None
    assert all(p.is_meta for p in module.parameters())
    trainer.fit(module, site.loader(Tokens(8), 8))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    assert all(torch.equal(configured[name], weights[name]) for name in configured)
    assert 0.05 < float(weights["net.layers.0.mlp.fc1.weight"].std()) < 0.5
    seed_everything(5)
    trained = fit(site, Module("meta", rate=0.05))
    assert not torch.equal(trained["weights"]["net.tok.weight"], weights["net.tok.weight"])
    return {"start": weights, "trained": trained}


@pytest.mark.parametrize("layout", EVERY[:6])
def test_meta_device_and_empty_init(ranks: Ranks, layout: Layout) -> None:
    options = {"plan": "auto"}
    (expected,) = ranks(1, observe, meta, (1, 1, 1), options, launch="lightning")
    for found in ranks(math.prod(layout), observe, meta, layout, options, launch="lightning"):
        for name, value in expected["start"].items():
            assert torch.equal(found["start"][name], value)
        for one, other in zip(found["trained"]["batches"], expected["trained"]["batches"], strict=True):
            assert one[0] == pytest.approx(other[0], abs=1e-5)
        for name, value in expected["trained"]["weights"].items():
            torch.testing.assert_close(found["trained"]["weights"][name], value, atol=1e-5, rtol=1e-5)


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))


class Unstartable(Module):
    def configure_model(self) -> None:
        super().configure_model()
        with torch.device("meta"):
            self.extra = NoReset()


def unstartable(site: Site) -> Any:
    with pytest.raises(ValueError, match="has no reset_parameters") as error:
        start(site, Unstartable("meta"))
    return str(error.value)


def test_a_module_that_cannot_leave_the_meta_device_is_named(ranks: Ranks) -> None:
    for text in ranks(2, observe, unstartable, (2, 1, 1), {"plan": "auto"}, launch="lightning"):
        assert text.startswith("extra was built on the meta device")
