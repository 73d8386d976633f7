"""A step that takes a tensor rank's part of a parameter for the whole is refused; every other use passes."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from tests.glue.oracle import (
    Block,
    Classifier,
    Samples,
    Site,
    assert_same,
    check,
    observe,
    reference,
    set_by_formula,
    weights,
)
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


class Product(torch.autograd.Function):
    """A matrix product of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class Bypassing(Block):
    """Hands weights of the layers that it holds to functions, once it trains, instead of calling the layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        return x + Product.apply(torch.tanh(Product.apply(x, self.fc.weight)), self.out.weight)


class HalfBypassing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        return x + self.out(torch.tanh(F.linear(x, self.fc.weight, self.fc.bias)))


class OfFunctions(Classifier):
    block: type[nn.Module] = Bypassing

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(self.block() for _ in range(2))
        set_by_formula(self)


class OfHalves(OfFunctions):
    block = HalfBypassing


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
        (OfFunctions, "uses net.blocks.0.fc.weight outside of net.blocks.0.fc .in t.*call the layer"),
        (OfHalves, "uses net.blocks.0.fc.weight outside of net.blocks.0.fc .in linear.*call the layer"),
        (Sparse, "a value computed from the output of net.blocks.0.fc outside of the module that holds it .in abs"),
        (ReadsInside, "a value computed from the output of net.blocks.0.fc as a number"),
        (ByHand, "training_step uses the gradient of net.blocks.0.fc.weight outside"),
    ],
    ids=["penalty", "count", "functional", "own function", "in its block", "activation", "number", "by hand"],
)
def test_a_part_is_not_taken_for_the_whole(ranks: Ranks, kind: Any, text: str) -> None:
    with pytest.raises(RanksFailed, match=text):
        ranks(2, observe, refused, (2, 1, 1), {"kind": kind}, launch="lightning")


class Late(Classifier):
    """Penalizes split weights from the sixth batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        late = self.trainer.fit_loop.total_batch_idx > 4
        return self.loss(batch) + (self.net.blocks[0].fc.weight.square().mean() if late else 0)


class Hooked(Classifier):
    """Registers a hook of the given kind on a module, in the given epoch."""

    def __init__(self, name: str, before: bool = False, epoch: int = 0) -> None:
        super().__init__()
        self.name, self.before, self.epoch = name, before, epoch
        self.seen: list[Any] = []
        for block in self.net.blocks:
            block.act = nn.Tanh()
            block.forward = types.MethodType(_with_module, block)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.epoch:
            module = self.get_submodule(self.name)
            if self.before:
                module.register_forward_pre_hook(lambda module, args: self.look(args[0]))
            else:
                module.register_forward_hook(lambda module, args, out: self.look(out))

    def look(self, x: torch.Tensor) -> None:
        assert x.dtype == torch.float32
        assert x.requires_grad
        self.seen.append(float(x.detach().square().mean()))


def _with_module(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + block.out(block.act(block.fc(x)))


class AtRoot(Classifier):
    """The pair hangs on the module itself, and a hook was there before the split."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Identity()
        self.fc, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
        set_by_formula(self)
        self.fc.register_forward_hook(lambda module, args, out: out * 2)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(self.out(torch.tanh(self.fc(batch["x"]))), batch["y"])


PLANS: dict[str, Any] = {
    "at root": {"plan": {"fc": "colwise", "out": "rowwise"}},
}


def hooked(site: Site) -> Any:
    """Refused uses one after the other, then those that see what one process does."""
    here = Site(site.layout, site.rank, {"micro_batches": 1})
    refused: dict[str, Any] = {
        "column": Hooked("net.blocks.0.fc"),
        "between": Hooked("net.blocks.1.act"),
        "row": Hooked("net.blocks.0.out", before=True),
        "later": Hooked("net.blocks.2.fc", epoch=2),
        "late": Late(),
        "at root": AtRoot(),
    }
    texts = {}
    for kind, module in refused.items():
        run = Site(site.layout, site.rank, {"micro_batches": 1, **PLANS.get(kind, {})})
        trainer = run.trainer(max_epochs=5)
        with pytest.raises(ValueError, match="tensor ranks") as error:
            trainer.fit(module, run.loader(Samples(12), 4))
        texts[kind] = (str(error.value).partition(", but")[0], trainer.fit_loop.total_batch_idx)
    return texts, whole_hooks(here)


def whole_hooks(site: Site) -> Any:
    found = []
    for name, before in (("net.blocks.0.fc", True), ("net.blocks.0.out", False), ("net.blocks.1", False)):
        module = Hooked(name, before, epoch=1)
        site.trainer().fit(module, site.loader(Samples(12), 4))
        found.append(module.seen)
    return found


def test_forward_hooks_do_not_take_parts_for_the_whole(ranks: Ranks) -> None:
    expected = reference(whole_hooks)
    assert [len(seen) for seen in expected] == [3] * 3
    places = {"column": ("0.fc", "0.fc"), "between": ("1.act", "1.fc"), "row": ("0.out", "0.fc")}
    for texts, seen in ranks(2, observe, hooked, (2, 1, 1), {}, launch="lightning"):
        for kind, (hook, layer) in places.items():
            text = (
                f"a forward hook on net.blocks.{hook} uses a value computed from the output of net.blocks.{layer} "
                "outside of the module that holds it (in detach)"
            )
            assert texts[kind] == (text, 0)
        assert texts["later"][1] == 6
        assert texts["late"][0].startswith("training_step uses net.blocks.0.fc.weight outside of net.blocks.0.fc")
        assert texts["late"][1] == 7  # of runs 1, 2, 4 and 8, which are watched
        assert texts["at root"][0].startswith(
            "a forward hook on fc uses a value computed from the output of fc outside"
        )
        assert_same(seen, expected, "what hooks see of whole activations")


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
