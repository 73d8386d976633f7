"""Optimizers, accumulation, clipping and manual optimization: loss curve and weights of one plain process (1e-5)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.nn import functional as F

from lightning_parallel import TensorPipelineStrategy
from tests.glue.oracle import (
    WIDTH,
    Classifier,
    Layout,
    Samples,
    Site,
    check,
    observe,
    readable,
    set_by_formula,
    weights,
)
from tests.glue.training import EVERY, GPT, fit
from tests.harness import Ranks

WITHOUT_PIPELINE: list[Layout] = [(2, 1, 1), (1, 1, 2), (2, 1, 2)]


# ------------------------------------------------------------------------------------------------ optimizers
class WithSGD(GPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


class WithAdamW(GPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, foreach=True)


class WithGroups(GPT):
    """Matrices decay, vectors do not, the head has its own learning rate; a warm-up per step moves all of them."""

    def configure_optimizers(self) -> Any:
        named = [(n, p) for n, p in self.named_parameters() if n != "head.weight"]
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.2},
            {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0, "betas": (0.5, 0.9)},
            {"params": [self.head.weight], "lr": 2e-2, "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def all_optimizers(site: Site) -> Any:
    return [fit(site, WithSGD(3), max_epochs=1), fit(site, WithAdamW(3), max_epochs=1), fit(site, WithGroups(3))]


@pytest.mark.parametrize("layout", EVERY)
def test_sgd_adamw_and_parameter_groups(ranks: Ranks, layout: Layout) -> None:
    check(ranks, all_optimizers, layout, plan="auto")


# ------------------------------------------------------------------------------------------------ windows, clipping
class Gradients(Callback):
    """Whether anything was clipped, and by how much: asked of the gradients on both sides of the clipping."""

    def __init__(self) -> None:
        self.largest: list[float] = []

    def on_before_zero_grad(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        mine = readable(trainer, module).values()
        found = [float(p.grad.abs().max()) for p in mine if p.grad is not None]
        self.largest.append(max(found, default=0.0))


def accumulation_and_clipping(site: Site) -> Any:
    """Five batches an epoch, of which the last is uneven, so that every window has an uneven end."""
    value = Gradients()
    by_value: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    changing = GradientAccumulationScheduler({0: 3, 1: 2})
    runs = [
        fit(site, WithGroups(), accumulate_grad_batches=2),
        fit(site, WithSGD(), gradient_clip_val=0.2, accumulate_grad_batches=3, max_epochs=1),
        fit(site, WithSGD(), callbacks=[changing, value], **by_value),
    ]
    assert max(value.largest) == pytest.approx(0.01)
    return runs


@pytest.mark.parametrize("layout", EVERY)
def test_accumulation_and_clipping(ranks: Ranks, layout: Layout) -> None:
    check(ranks, accumulation_and_clipping, layout, plan="auto")


class ByHand(nn.Module):
    """Block whose gradient is known: `slopes` for the split `up`, `slope` for the replicated `scale`."""

    def __init__(self, slopes: list[float], slope: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1, 4, bias=False), nn.Linear(4, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.slope = slope
        with torch.no_grad():
            self.up.weight.fill_(1.0)
            self.down.weight.copy_(torch.tensor([slopes]))
        self.down.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(torch.ones_like(x))) + self.slope * self.scale


class Clipped(LightningModule):
    """Gradients [3, 0, 0, 4] and [12]: their common norm is 13."""

    def __init__(self, fused: bool = False, manual: str | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ByHand([3.0, 0.0, 0.0, 4.0], 0.0), ByHand([0.0] * 4, 12.0)])
        self.fused, self.manual = fused, manual
        self.automatic_optimization = manual is None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch["x"][:, :1] * 0
        for block in self.blocks:
            x = block(x)
        loss = x.mean()
        if self.manual is not None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.3, gradient_clip_algorithm=self.manual)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0, fused=self.fused)


def clip_once(site: Site, module: LightningModule, **trainer: Any) -> Any:
    runner = site.trainer(max_steps=1, **trainer)
    runner.fit(module, site.loader(Samples(8), 8))
    return weights(module)


def clip_automatically(site: Site) -> Any:
    norm = {"gradient_clip_val": 1.3}
    value = {"gradient_clip_val": 3.5, "gradient_clip_algorithm": "value"}
    return [
        clip_once(site, Clipped(), **norm),
        clip_once(site, Clipped(True), **norm),
        clip_once(site, Clipped(), **value),
    ]


def clip_by_hand(site: Site) -> Any:
    return [clip_once(site, Clipped(manual="norm")), clip_once(site, Clipped(manual="value"))]


CLIP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def step_of(state: dict[str, torch.Tensor]) -> tuple[list[float], list[float]]:
    """How far one step with learning rate 1 moved the two parameters that have a gradient."""
    return (1 - state["blocks.0.up.weight"]).flatten().tolist(), (1 - state["blocks.1.scale"]).tolist()


@pytest.mark.parametrize("layout", EVERY[:6])
def test_f1_clipping_uses_the_norm_of_the_whole_model(ranks: Ranks, layout: Layout) -> None:
    found = ranks(math.prod(layout), observe, clip_automatically, layout, {"plan": CLIP_PLAN}, launch="lightning")
    for by_norm, fused, by_value in found:
        for state in (by_norm, fused):
            split, replicated = step_of(state)
            assert split == pytest.approx([0.3, 0, 0, 0.4], abs=1e-5)
            assert replicated == pytest.approx([1.2], abs=1e-5)
        assert step_of(by_value) == ([3.0, 0, 0, 3.5], [3.5])


@pytest.mark.parametrize("layout", WITHOUT_PIPELINE)
def test_f1_clipping_by_hand_in_manual_optimization(ranks: Ranks, layout: Layout) -> None:
    found = ranks(math.prod(layout), observe, clip_by_hand, layout, {"plan": CLIP_PLAN}, launch="lightning")
    for by_norm, by_value in found:
        split, replicated = step_of(by_norm)
        assert split == pytest.approx([0.3, 0, 0, 0.4], abs=1e-5)
        assert replicated == pytest.approx([1.2], abs=1e-5)
        split, replicated = step_of(by_value)
        assert split == pytest.approx([1.3, 0, 0, 1.3], abs=1e-6)
        assert replicated == pytest.approx([1.3], abs=1e-6)


# ------------------------------------------------------------------------------------------------ manual optimization
class Side(nn.Module):
    """One of two players."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.fc(x)))


class Players(LightningModule):
    """Adversarial training: two optimizers, toggled, with a gradient accumulated by hand over two batches for one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = Side(WIDTH), Side(1)
        set_by_formula(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        players: Any = self.optimizers()
        first, second = players
        self.toggle_optimizer(first)
        fooled = F.softplus(-self.judge(self.maker(batch["x"]))).mean()
        first.zero_grad()
        self.manual_backward(fooled)
        assert not any(p.requires_grad for p in self.judge.parameters())
        first.step()
        self.untoggle_optimizer(first)
        with second.toggle_model(sync_grad=batch_idx % 2 == 1):
            made = self.judge(self.maker(batch["x"]).detach())
            judged = F.softplus(made).mean() + F.softplus(-self.judge(batch["x"])).mean()
            self.manual_backward(judged / 2)
            if batch_idx % 2 == 1:
                self.clip_gradients(second, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
                second.step()
                second.zero_grad()
        self.log_dict({"fooled": fooled, "judged": judged})
        schedule: Any = self.lr_schedulers()
        schedule.step()
        return {"loss": fooled.detach() + judged.detach()}

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.maker.parameters(), lr=1e-2, eps=1e-3)
        second = torch.optim.SGD(self.judge.parameters(), lr=0.2, momentum=0.5)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.9)]


def adversaries(site: Site) -> Any:
    return fit(site, Players(), Samples(36))


def uneven_adversaries(site: Site) -> Any:
    return fit(site, Players(), Samples(35))


@pytest.mark.parametrize("layout", WITHOUT_PIPELINE)
def test_manual_optimization_with_two_optimizers(ranks: Ranks, layout: Layout) -> None:
    plan = {"*.fc": "colwise", "*.out": "rowwise"}
    check(ranks, adversaries, layout, plan=plan)
    check(ranks, uneven_adversaries, layout, plan=plan)


class Windows(GPT):
    """Steps by hand after every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2 == 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return loss


def windows_twice(site: Site) -> Any:
    """The second run starts from the module that the first one gave back."""
    module = Windows()
    return [fit(site, module), fit(site, module)]


def test_manual_optimization_with_gradients_that_tensor_ranks_share(ranks: Ranks) -> None:
    check(ranks, windows_twice, (2, 1, 1), plan="auto", sequence_parallel=True)


def refused(rank: int, world_size: int, strategy: dict[str, Any]) -> str:
    """The error that a run of `Players` ends with."""
    site = Site()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=TensorPipelineStrategy(**strategy), logger=False, max_steps=1
    )
    with pytest.raises(ValueError, match="manual optimization") as error:
        trainer.fit(Players(), site.loader(Samples(8), 8))
    return str(error.value)


def test_manual_optimization_is_refused_in_a_pipeline(ranks: Ranks) -> None:
    for text in ranks(2, refused, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, launch="lightning"):
        assert "Players uses manual optimization" in text
        assert "got 2" in text
        assert "pipeline_parallel_size=1" in text
    options = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "micro_batches": 4}
    for text in ranks(2, refused, options, launch="lightning"):
        assert "micro_batches=4" in text


# ------------------------------------------------------------------------------------------------ whole tensors
class WithLBFGS(Classifier):
    """Evaluates the step several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=3)


class WithAdafactor(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


def closures(site: Site) -> Any:
    """The first batches: the line search amplifies rounding later on."""
    return fit(site, WithLBFGS(), Samples(36), max_steps=3)


def factors(site: Site) -> Any:
    return fit(site, WithAdafactor(), Samples(36))


def test_optimizers_that_need_whole_tensors_work_where_these_are(ranks: Ranks) -> None:
    check(ranks, closures, (1, 1, 2))
    check(ranks, factors, (1, 1, 2))
    check(ranks, factors, (1, 2, 1))


def refuse_both(site: Site) -> list[str]:
    texts = []
    for module in (WithLBFGS(), WithAdafactor()):
        with pytest.raises(ValueError, match="needs") as error:
            fit(site, module, Samples(36))
        texts.append(str(error.value))
    return texts


def test_optimizers_that_need_whole_tensors_are_refused_elsewhere(ranks: Ranks) -> None:
    for lbfgs, adafactor in ranks(2, observe, refuse_both, (2, 1, 1), {}, launch="lightning"):
        assert lbfgs.startswith("LBFGS needs all parameters at once, but 2 ranks share the model")
        assert adafactor.startswith(
            "Adafactor needs whole tensors, but net.blocks.0.fc.weight of shape (16, 8) is split"
        )
