"""ZeRO with models that keep parameters in unusual ways: as one plain process, or refused before it goes wrong."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.utils import parametrizations

from lightning_parallel import ZeroStrategy
from lightning_parallel.strategies.config import ZeroConfig
from lightning_parallel.zero.unit_watch import AbsentParameterError
from tests.glue.oracle import QUIET, WIDTH, Classifier, Samples, Site, check, observe, set_by_formula
from tests.glue.training import fit
from tests.harness import Ranks


class Adam(Classifier):
    """Leaves the kernel of its optimizer open."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def scaled(self, batch: Any, x: torch.Tensor) -> torch.Tensor:
        return self.loss({"x": x, "y": batch["y"]})


class Containers(Adam):
    """Parameters in lists and dicts that are never called, also inside of lists of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.ParameterList([torch.full((WIDTH,), 1.0), torch.full((WIDTH,), 0.5)])
        self.named = nn.ParameterDict({"a": torch.ones(WIDTH), "b": torch.tensor(0.5)})
        self.nested = nn.ModuleList([nn.ParameterList([torch.ones(WIDTH)]), nn.ModuleDict({"fc": nn.Linear(8, 8)})])
        set_by_formula(self.nested[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch["x"] * self.flat[0] + self.flat[1] * self.named["a"] * self.named["b"] + self.nested[0][0]
        return self.scaled(batch, self.nested[1]["fc"](x))


class Phases(Adam):
    """Complex numbers, clipped with the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.polar(torch.ones(WIDTH), torch.arange(WIDTH) * 0.3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scaled(batch, (torch.fft.fft(batch["x"]) * self.phase).abs())


class Replaced(Adam):
    """Hooks and steps that give parameters other memory; other dtypes and strides in the same optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.wide = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.strided = nn.Parameter(torch.ones(2, WIDTH).t())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.net.head.weight.data = torch.full_like(self.net.head.weight, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.scaled(batch, (batch["x"] * self.wide).float() * self.strided[:, 0])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if batch_idx == 2:
            self.net.stem.bias.data = torch.full_like(self.net.stem.bias, 0.2)
            self.net.norm.weight.data.clamp_(-0.3, 0.3)
        return loss


class Normed(Adam):
    """Parametrized weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net.stem = parametrizations.weight_norm(self.net.stem)
        for block in self.net.blocks:
            block.fc = parametrizations.spectral_norm(block.fc)


def unusual(site: Site) -> Any:
    """Four batches each."""
    options: dict[str, Any] = {"data": Samples(32), "max_epochs": 1}
    return [
        *(fit(site, module, **options) for module in (Containers(), Replaced(), Normed())),
        fit(site, Phases(), gradient_clip_val=0.5, **options),
    ]


@pytest.mark.parametrize(
    "zero",
    [
        ZeroConfig(1),
        ZeroConfig(2, offload="cpu"),
        ZeroConfig(3, offload="nvme", offload_parameters=True),
    ],
    ids=["1", "2 cpu", "3 nvme"],
)
def test_unusual_parameters_train_as_in_a_plain_process(ranks: Ranks, zero: ZeroConfig) -> None:
    check(ranks, unusual, (1, 1, 2), zero_stage=zero, plan="auto", timeout=110)


# ------------------------------------------------------------------------------------------------ refusals
class Reading(Classifier):
    """Steps that use parameters of blocks outside of them."""

    how = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.how == "penalty":
            return self.loss(batch) + sum(p.abs().sum() for p in self.parameters())
        if self.how == "method":
            return self.net.head(self.net.blocks[0].forward(self.net.stem(batch["x"]))).sum()
        self.net.blocks[1].out.bias.data.clamp_(max=0.1)
        return self.loss(batch)


class ViewedTwice(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.view = nn.Parameter(self.net.stem.weight.data[0])


class Foreign(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)


class SteppedTwice(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.AdamW(self.net.stem.parameters(), lr=0.1)]


class Rebuilt(Classifier):
    """A new head comes in a hook, or in a step."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def rebuild(self) -> None:
        self.net.head = nn.Linear(WIDTH, 4)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.hook == "on_train_batch_end":
            self.rebuild()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.hook == "training_step":
            self.rebuild()
        return super().training_step(batch, batch_idx)


class Product(torch.autograd.Function):
    """Keeps its weight where autograd does not know of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] @ ctx.weight.t(), ctx.saved_tensors[0].t() @ gradients[0]


class Multiplies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight)  # type: ignore[no-any-return,no-untyped-call]


class Keeping(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.products = nn.Sequential(Multiplies(), Multiplies())

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss({**batch, "x": self.products(batch["x"])})


class Shifts(Classifier):
    """Changes gradients after every batch."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.add_(0.1)


class Direct(Classifier):
    """Steps past the wrapper of its optimizer, on gradients of one replica."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self.loss(batch).backward()
        optimizer.step()


class Forgets(Classifier):
    """Sets the state of its optimizer: to nothing, or to something."""

    def __init__(self, state: dict[Any, Any]) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.optimizers[0].state = defaultdict(dict, self.state)


CASES: list[tuple[int, Any, dict[str, Any]]] = [
    (3, partial(Rebuilt, "on_train_batch_end"), {}),
    (3, partial(Rebuilt, "training_step"), {}),
    (3, Keeping, {}),
    (2, Shifts, {"accumulate_grad_batches": 2}),
    (0, Shifts, {"accumulate_grad_batches": 2}),
    (3, Direct, {}),
    (0, Direct, {}),
    (3, partial(Forgets, {"step": 1}), {}),
]


def misused(site: Site) -> Any:
    """What goes wrong, and then what does not: what stage 3 sums at once, and a state that is dropped."""
    found = []
    for stage, make, options in CASES:
        here = Site(site.layout, site.rank, {"zero_stage": stage})
        with pytest.raises(RuntimeError) as error:
            fit(here, make(), Samples(16), max_epochs=1, **options)
        found.append(str(error.value))
    return found


def allowed(site: Site) -> Any:
    return [fit(site, Shifts(), Samples(24), accumulate_grad_batches=2), fit(site, Forgets({}), Samples(24))]


def test_misuse_in_hooks_and_steps_is_refused_by_name(ranks: Ranks) -> None:
    expected = [
        "on_train_batch_end replaced or removed the parameter net.head.weight, of which several ranks",
        "training_step replaced or removed the parameter net.head.weight",
        "Product keeps products.1.weight as an attribute of ctx, but stage 3 of ZeRO frees it before the backward pass",
        *["the gradient of net.stem.weight was changed while it is still accumulating, so that the change would count"]
        * 2,
        *["SGD would step on gradients that were not summed over 2 replicas; call self.manual_backward(loss) instead"]
        * 2,
        "a hook replaced the state of SGD, which is divided over the ranks; drop it with optimizer.state.clear()",
    ]
    for texts in ranks(2, observe, misused, (1, 1, 2), {}, launch="lightning"):
        for text, beginning in zip(texts, expected, strict=True):
            assert text.startswith(beginning)
    check(ranks, allowed, (1, 1, 2), zero_stage=3, plan="auto")


def refusals(rank: int, world_size: int) -> list[str]:
    found = []
    reading: list[Any] = [Reading() for _ in range(3)]
    for module, how in zip(reading, ("penalty", "method", "data"), strict=True):
        module.how = how
    cases = [(3, None, module) for module in reading]
    for stage, offload, module in [*cases, (1, None, ViewedTwice()), (2, None, Foreign()), (2, "nvme", SteppedTwice())]:
        strategy = ZeroStrategy(stage, offload=offload)
        trainer = Trainer(accelerator="cpu", devices=world_size, strategy=strategy, max_steps=1, **QUIET)
        with pytest.raises((ValueError, AbsentParameterError)) as error:
            trainer.fit(module, Site().loader(Samples(8), 4))
        found.append(str(error.value))
    return found


def test_what_would_go_wrong_silently_is_refused_by_name(ranks: Ranks) -> None:
    expected = [
        "training_step uses net.blocks.0.fc.weight (in abs) while net.blocks.0 is not running, but stage 3 of ZeRO has",
        "training_step uses net.blocks.0.fc.weight (in linear) while net.blocks.0 is not running",
        "training_step uses net.blocks.1.out.bias (in data) while net.blocks.1 is not running",
        "parameters view and net.stem.weight share memory, but each gets its own when ranks divide the model;",
        "SGD trains 1 parameters that are not the module's, the first of shape (3,): each of 2 replicas would train",
        "a parameter of shape (8, 8) is stepped by SGD and by AdamW, but with offload='nvme' a file keeps the state of",
    ]
    for texts in ranks(2, refusals, launch="lightning"):
        for text, beginning in zip(texts, expected, strict=True):
            assert text.startswith(beginning)
