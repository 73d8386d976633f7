"""Precision, loss scaling and gradients that are not finite: what one plain process does, on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from tests.glue.oracle import PAIRS, Layout, Site, check, held, observe, readable, reference
from tests.glue.training import EVERY, GPT, Notes, Record, Tokens, fit
from tests.harness import Ranks


# ------------------------------------------------------------------------------------------------ 64-true, bf16
class WithAdamW(GPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def double(site: Site) -> Any:
    return fit(site, WithAdamW(), precision="64-true", gradient_clip_val=0.5, accumulate_grad_batches=2)


@pytest.mark.parametrize("layout", EVERY)
def test_double_precision_agrees_to_1e_10(ranks: Ranks, layout: Layout) -> None:
    check(ranks, double, layout, atol=1e-10, plan="auto")


class WholePair(nn.Module):
    """Linears with one entry per row: a step on small whole numbers is exact in bfloat16, however it is summed."""

    def __init__(self, turn: int) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 8), nn.Linear(8, 4)
        with torch.no_grad():
            for p in self.parameters():
                p.zero_()
            for row in range(8):
                self.fc.weight[row, (row + turn) % 4] = 1 if row % 3 else -1
            for row in range(4):
                self.out.weight[row, (3 * row + turn) % 8] = 1
            self.out.bias.copy_(torch.tensor([1.0, 0.0, -1.0, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.relu(self.fc(x)))


class Whole(LightningModule):
    """Loss is linear in the output, data are whole numbers; dtypes of everything on the way are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WholePair(turn) for turn in range(3))
        self.notes = Notes()

    def note(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            self.notes.add(name, str(tensor.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = (batch[:, :4] % 3).to(self.blocks[0].fc.weight.dtype)  # type: ignore[union-attr]
        for block in self.blocks:
            x = block(x)
        loss = (x.float() * (batch[:, 1:5] % 2)).sum(1).mean()
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                self.note(parameter=p, gradient=p.grad)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def watched(module: Whole) -> Whole:
    """Notes what the linears give."""
    for block in module.blocks:
        block.fc.register_forward_hook(lambda *args: module.note(activation=args[-1]))  # type: ignore[union-attr]
    return module


def whole(site: Site, **trainer: Any) -> Any:
    """One step on eight samples."""
    module = watched(Whole())
    seen = fit(site, module, Tokens(8), max_epochs=1, **trainer)
    return seen, {name: sorted(set(kinds)) for name, kinds in module.notes.entries.items()}


def exact_bf16_mixed(site: Site) -> Any:
    seen = whole(site, precision="bf16-mixed")
    assert seen[1] == {"activation": ["torch.bfloat16"], "parameter": ["torch.float32"], "gradient": ["torch.float32"]}
    return seen


def exact_bf16_true(site: Site) -> Any:
    seen = whole(site, precision="bf16-true")
    assert list(seen[1].values()) == [["torch.bfloat16"]] * 3
    return seen


def exact_fp16(site: Site) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8)
    seen = whole(site, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert seen[1]["activation"] == ["torch.float16"]
    return seen


@pytest.mark.parametrize("layout", EVERY[:6])
def test_half_precision_is_bit_equal_where_its_sums_are_exact(ranks: Ranks, layout: Layout) -> None:
    plan = {"blocks.*.fc": "colwise", "blocks.*.out": "rowwise"}
    for scenario in (exact_bf16_mixed, exact_bf16_true, exact_fp16):
        check(ranks, scenario, layout, atol=0, plan=plan, micro_batches=4 if layout[1] > 1 else 1)


def losses(site: Site, precision: Any) -> list[float]:
    return [batch[0] for batch in fit(site, GPT(3), precision=precision)["batches"]]


def curve_fp32(site: Site) -> list[float]:
    return losses(site, "32-true")


def curve_bf16_mixed(site: Site) -> list[float]:
    return losses(site, "bf16-mixed")


def curve_bf16_true(site: Site) -> list[float]:
    return losses(site, "bf16-true")


def distance(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) == 10
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 2)])
def test_bf16_curves_are_as_near_to_fp32_as_those_of_a_plain_process(ranks: Ranks, layout: Layout) -> None:
    exact = reference(curve_fp32)
    for scenario in (curve_bf16_mixed, curve_bf16_true):
        error = distance(reference(scenario), exact)
        assert 0 < error < 0.1
        for found in ranks(math.prod(layout), observe, scenario, layout, {"plan": "auto"}, launch="lightning"):
            assert distance(found, exact) < 1.5 * error


# ------------------------------------------------------------------------------------------------ loss scaling
class Scaled(MixedPrecision):
    """Loss scaling around single precision arithmetic, so that results can be compared to 1e-5."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8, growth_interval=2))

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast("cpu", enabled=False)


class Injects(Callback):
    """Writes a value into one gradient of one rank after a backward pass; notes scale, weights and step counters."""

    def __init__(self, value: float, rank: int, batch: int = 1) -> None:
        self.value, self.rank, self.batch = value, rank, batch
        self.scales: list[float] = []
        self.weights: list[list[torch.Tensor]] = []
        self.skipped: int | None = None

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        here = trainer.world_size == 1 or trainer.global_rank == self.rank
        if here and trainer.fit_loop.total_batch_idx == self.batch:
            mine = held(trainer, module).values()
            next(p.grad for p in mine if p.grad is not None).view(-1)[0] = self.value

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scales.append(scaler.get_scale() if scaler is not None else 1.0)
        self.weights.append([p.detach().clone() for p in readable(trainer, module).values()])

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self.counters = sorted({float(state["step"]) for state in states if "step" in state})
        self.skipped = getattr(trainer.strategy, "skipped_steps", None)

    def moved(self) -> list[bool]:
        """Whether each batch after the first one changed the weights of this rank."""
        pairs = zip(self.weights, self.weights[1:], strict=False)
        return [any(not torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in pairs]


class WithFused(GPT):
    """An optimizer that unscales by itself; the plain process, which refuses to clip with it, takes the other kind."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, fused=self.fused)


def overflow(site: Site, module: LightningModule, **trainer: Any) -> Any:
    """Five batches; a gradient of rank 1 overflows in the second."""
    inject = Injects(math.inf, 1)
    seen = fit(site, module, callbacks=[inject], max_epochs=1, plugins=[Scaled()], **trainer)
    return {"seen": seen, "scales": inject.scales, "moved": inject.moved(), "counters": inject.counters}


def clipped_overflows(site: Site) -> Any:
    return {
        "adamw": overflow(site, WithAdamW(), gradient_clip_val=0.5),
        "fused and clipped": overflow(site, WithFused(site.layout is not None), gradient_clip_val=0.5),
    }


def overflows(site: Site) -> Any:
    runs = {"sgd": overflow(site, GPT()), "fused": overflow(site, WithFused(True))}
    return {**runs, **clipped_overflows(site)}


@pytest.mark.parametrize("layout", EVERY[:6])
def test_f23_an_overflow_on_one_rank_skips_the_step_everywhere(ranks: Ranks, layout: Layout) -> None:
    scenario = overflows if layout in PAIRS else clipped_overflows
    check(ranks, scenario, layout, plan="auto")
    for run in reference(scenario).values():  # every rank was found to be the same
        assert run["scales"] == [8, 4, 4, 8, 8]
        assert run["moved"] == [False, True, True, True]
        assert run["counters"] in ([], [4.0])


class FrozenStart(WithAdamW):
    """The first stage has no gradient that could overflow, but a vote."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.tok, self.pos, self.layers[0]):
            part.requires_grad_(False)


def accumulated(site: Site) -> Any:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    return [fit(site, module, plugins=[Scaled()], **options) for module in (WithAdamW(), FrozenStart())]


def test_loss_scaling_with_accumulation(ranks: Ranks) -> None:
    check(ranks, accumulated, (1, 2, 1), plan="auto")
    check(ranks, accumulated, (2, 1, 2), plan="auto")


# ------------------------------------------------------------------------------------------------ not finite
class Broken(GPT):
    """The loss of one batch is not a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if self.trainer.fit_loop.total_batch_idx == 2 else loss


class LeavesOut(Callback):
    """What skipping means to a plain process: an optimizer step without gradients."""

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        if any(not p.grad.isfinite().all() for p in module.parameters() if p.grad is not None):
            for p in module.parameters():
                p.grad = None


def ignored(site: Site) -> Any:
    seen = fit(site, Broken(), max_epochs=1)
    return seen["batches"][:3], seen["weights"]


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_gradients_that_are_not_finite_are_ignored_as_lightning_does(ranks: Ranks, layout: Layout) -> None:
    check(ranks, ignored, layout, plan="auto")


def skipped(site: Site) -> Any:
    """The loss of a batch, and the gradient of one rank alone: two steps of ten are left out."""
    plain = [LeavesOut()] if site.layout is None else []
    inject = Injects(math.nan, 1, batch=5)
    seen = fit(site, Broken(), callbacks=[inject, *plain])
    assert inject.skipped == (None if site.layout is None else 2)
    assert inject.moved()[1] is inject.moved()[4] is False
    losses = [batch[0] for batch in seen["batches"]]
    return {"losses": losses, "weights": seen["weights"], "steps": seen["steps"], "moved": inject.moved()}


@pytest.mark.parametrize("layout", EVERY[:6])
def test_steps_with_gradients_that_are_not_finite_are_skipped_together(ranks: Ranks, layout: Layout) -> None:
    check(ranks, skipped, layout, plan="auto", non_finite="skip")


def raised(site: Site) -> Any:
    inject = Injects(math.nan, 1)
    record = Record()
    trainer = site.trainer(callbacks=[inject, record])
    module = GPT()
    with pytest.raises(RuntimeError, match="gradients are not finite on") as error:
        trainer.fit(module, site.loader(Tokens(36), 8))
    assert type(error.value).__name__ == "NonFiniteGradientError"
    return str(error.value), len(record.batches)


@pytest.mark.parametrize(
    ("layout", "place"),
    [
        ((2, 1, 1), "pipeline stage 0, replica 0, tensor rank 1"),
        ((1, 2, 1), "pipeline stage 1, replica 0, tensor rank 0"),
        ((1, 1, 2), "pipeline stage 0, replica 1, tensor rank 0"),
        ((2, 2, 1), "pipeline stage 0, replica 0, tensor rank 1"),
    ],
)
def test_gradients_that_are_not_finite_raise_on_every_rank(ranks: Ranks, layout: Layout, place: str) -> None:
    options = {"plan": "auto", "non_finite": "raise"}
    for text, batches in ranks(math.prod(layout), observe, raised, layout, options, launch="lightning"):
        assert f"on {place}." in text
        assert batches == 1
