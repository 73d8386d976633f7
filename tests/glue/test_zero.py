"""ZeRO under a Trainer: what the other files hold to a plain run without shards, held to it with shards."""

from __future__ import annotations

import math
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_parallel import ZeroStrategy
from lightning_parallel.strategies.config import ZeroConfig
from lightning_parallel.zero.memory import state_bytes
from tests.glue.checkpointing import TiedGPT, assert_same_file, on_layout, train
from tests.glue.oracle import Classifier, Layout, Samples, Scenario, Site, assert_same, check, held, observe
from tests.glue.test_callbacks import averaged, finetuned
from tests.glue.test_training_layouts import clipped_windows
from tests.glue.test_training_optimizers import (
    CLIP_PLAN,
    WithAdamW,
    WithLBFGS,
    accumulation_and_clipping,
    adversaries,
    all_optimizers,
    clip_automatically,
    clip_by_hand,
    factors,
    step_of,
    windows_twice,
)
from tests.glue.test_training_parameters import by_sample, frozen, sometimes
from tests.glue.test_training_precision import Scaled, exact_bf16_true, overflows
from tests.glue.training import GPT, fit
from tests.harness import Ranks


def automatic(site: Site) -> Any:
    return [all_optimizers(site), accumulation_and_clipping(site)]


@pytest.mark.parametrize(
    ("layout", "stage"),
    [((1, 1, 4), 1), ((1, 1, 2), 2), ((1, 1, 4), 2), ((2, 1, 2), 2), ((1, 2, 2), 1)],
)
def test_optimizers_groups_windows_and_clipping(ranks: Ranks, layout: Layout, stage: int) -> None:
    check(ranks, automatic, layout, plan="auto", zero_stage=stage)


def test_gradients_that_tensor_ranks_complete_first(ranks: Ranks) -> None:
    check(ranks, clipped_windows, (2, 1, 2), plan="auto", zero_stage=2, sequence_parallel=True)


@pytest.mark.parametrize("stage", [1, 2])
def test_every_dimension_at_once(ranks: Ranks, stage: int) -> None:
    check(ranks, clipped_windows, (2, 2, 2), plan="auto", zero_stage=stage, timeout=110)


class ClipsItself(Classifier):
    """Changes gradients in its step and around that of its optimizer, by functions that do not name them here."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()
        return loss


def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(0.5)


class HalvesItself(ClipsItself):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(halve)
        return optimizer


def by_hand(site: Site) -> Any:
    alone = [fit(site, module, Samples(16), max_epochs=1) for module in (ClipsItself(), HalvesItself())]
    return [adversaries(site), windows_twice(site), *alone]


def parameters(site: Site) -> Any:
    """Factored moments need whole parameters; some are frozen, thaw, or are not used in every step or on every rank."""
    return [factors(site), frozen(site), sometimes(site), by_sample(site), finetuned(site)]


class Bursts(Classifier):
    """A gradient of replica 1 overflows in the second batch, in one element that one replica owns."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head.bias.register_hook(self.burst)

    def burst(self, gradient: torch.Tensor) -> torch.Tensor:
        here = self.trainer.world_size == 1 or self.trainer.global_rank == 1
        return gradient.index_fill(0, torch.tensor(3), math.inf) if here and self.trainer.global_step == 1 else gradient


class BurstsInAdamW(Bursts):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def bursts(site: Site) -> Any:
    """Nobody looks at gradients, which are unscaled, clipped and found to be infinite where they are: in shards."""
    found = []
    for module, options in ((Bursts(), {}), (BurstsInAdamW(), {"gradient_clip_val": 0.3})):
        scaled = Scaled()
        seen = fit(site, module, Samples(40), max_epochs=1, plugins=[scaled], **options)
        found.append((seen, scaled.scaler.get_scale()))
    assert all(math.isfinite(batch[0]) for seen, _ in found for batch in seen["batches"])
    return found


@pytest.mark.parametrize(
    ("scenario", "stage"),
    [(by_hand, 1), (by_hand, 2), (parameters, 2), (overflows, 1), (bursts, 1), (bursts, 2), (bursts, 3)],
)
def test_manual_optimization_whole_parameters_freezing_and_scaling(
    ranks: Ranks, scenario: Scenario, stage: int
) -> None:
    check(ranks, scenario, (1, 1, 2), plan="auto", zero_stage=stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_in_the_dtype_of_parameters(ranks: Ranks, stage: int) -> None:
    zero = ZeroConfig(stage, gradient_dtype="parameter")
    check(ranks, exact_bf16_true, (1, 1, 2), atol=0, plan="auto", zero_stage=zero)


def clip_both(site: Site) -> Any:
    return [*clip_automatically(site), *(clip_by_hand(site) if site.layout and site.layout[1] == 1 else [])]


@pytest.mark.parametrize(("layout", "stage"), [((1, 1, 2), 1), ((2, 1, 2), 2), ((1, 2, 2), 2)])
def test_f1_norms_count_each_element_of_every_shard_once(ranks: Ranks, layout: Layout, stage: int) -> None:
    options = {"plan": CLIP_PLAN, "zero_stage": stage}
    for by_norm, fused, by_value, *manual in ranks(
        math.prod(layout), observe, clip_both, layout, options, launch="lightning"
    ):
        for state in (by_norm, fused, *manual[:1]):
            split, replicated = step_of(state)
            assert split == pytest.approx([0.3, 0, 0, 0.4], abs=1e-5)
            assert replicated == pytest.approx([1.2], abs=1e-5)
        assert step_of(by_value) == ([3.0, 0, 0, 3.5], [3.5])


# ------------------------------------------------------------------------------------------------ checkpoints
def resumed(site: Site, folder: Path, sources: list[Path]) -> Any:
    """The whole run, which leaves its files, and the rest of a run from every source."""
    found = [train(site, folder, TiedGPT())]
    for number, source in enumerate(sources):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        found.append(train(site, own, TiedGPT(), source, saves=False))
    return found


def test_f27_files_are_plain_and_every_layout_continues_every_other(ranks: Ranks, tmp_path: Path) -> None:
    """Saved in the middle, inside an accumulation window and at an epoch's end; moments, rates and counters go on."""
    plain = tmp_path / "plain"
    plain.mkdir()
    kinds = ("window", "middle", "epoch")
    expected = on_layout(ranks, None, resumed, plain, [plain / f"{kind}.ckpt" for kind in kinds])[0]
    previous = plain
    for layout, stage in (((2, 1, 2), 1), ((1, 1, 2), 3), ((1, 2, 2), 2)):
        own = tmp_path / f"{layout}-{stage}"
        own.mkdir()
        sources = [origin / f"{kind}.ckpt" for origin, kind in zip((plain, previous, own), kinds, strict=True)]
        for found in on_layout(ranks, layout, resumed, own, sources, zero_stage=stage):
            assert_same(found, expected, f"{layout}, stage {stage}")
        for file in own.glob("*.ckpt"):
            assert_same_file(file, plain / file.name)
        previous = own
    back = tmp_path / "back"
    back.mkdir()
    found = on_layout(ranks, None, resumed, back, [previous / f"{kind}.ckpt" for kind in kinds])[0]
    assert_same(found, expected, "a plain run goes on")


IN_FILES = ZeroConfig(3, "nvme", offload_parameters=True)


AVERAGED: list[tuple[str, int | ZeroConfig]] = [("ema", 1), ("ema", 2), ("ema", 3), ("swa", 1), ("swa", 2), ("swa", 3)]
AVERAGED.append(("ema", IN_FILES))


def test_f32_averages_are_those_of_full_weights(ranks: Ranks, tmp_path: Path) -> None:
    expected: dict[str, Any] = {}
    for number, (kind, zero) in enumerate(AVERAGED):
        plain, own = tmp_path / kind, tmp_path / str(number)
        own.mkdir()
        if kind not in expected:
            plain.mkdir()
            expected[kind] = on_layout(ranks, None, averaged, plain, kind)[0]
        for found in on_layout(ranks, (1, 1, 2), averaged, own, kind, micro_batches=1, zero_stage=zero):
            assert_same(found, expected[kind], f"{kind}, {zero}")
        files = [path.relative_to(own) for path in own.rglob("*.ckpt")]
        assert len(files) == 8
        for name in files:
            assert_same_file(own / name, plain / name, folders=(own, plain))


# ------------------------------------------------------------------------------------------------ by name
class Wide(Classifier):
    """Most of its elements are in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.zeros(8, 4096))

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(batch) + (batch["x"] @ self.wide).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Sizes(Callback):
    """Bytes per parameter after the first step."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        count = sum(p.numel() for p in module.parameters())
        state = trainer.optimizers[0].state
        moments = [value for entry in state.values() for key, value in entry.items() if key != "step"]
        self.optimizer = sum(value.numel() * value.element_size() for value in moments) / count
        buckets = trainer.strategy._sharding.sharder.buckets
        kept = [*held(trainer, module).values(), *(bucket.own for bucket in buckets)]
        found = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in kept}
        self.parameters = sum(found.values()) / count


def by_name(rank: int, world_size: int, name: str) -> Any:
    module, sizes = Wide(), Sizes()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=world_size, strategy=name, max_steps=1, callbacks=[sizes], **options)
    with redirect_stdout(StringIO()) as printed:
        trainer.fit(module, Site().loader(Samples(8), 4))
        trainer.validate(module, Site().loader(Samples(8), 4), verbose=False)
    told = re.findall(r"ZeRO +│ (.*?) +│", printed.getvalue())
    return sizes.parameters, sizes.optimizer, type(trainer.strategy).__name__, trainer.strategy.zero_config.stage, told


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_names_shard_the_state(ranks: Ranks, stage: int) -> None:
    expected = state_bytes(stage, 2)
    what = ("optimizer states", "optimizer states and gradients", "optimizer states, gradients and parameters")
    results = ranks(2, by_name, f"zero{stage}", launch="lightning")
    once = f"stage {stage}: {what[stage - 1]} in 2 shares"
    assert [told for *_, told in results] == [[once], []], "rank 0 tells, and not again in the validation"
    for parameters, optimizer, kind, found, _ in results:
        assert (kind, found) == ("ZeroStrategy", stage)
        assert parameters == pytest.approx(expected.parameters, rel=0.02)
        assert optimizer == pytest.approx(expected.optimizer, rel=0.02)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stage": 4}, r"stage 4 of ZeRO is not available; use 0 \(nothing sharded\), 1 \(optimizer state\), 2"),
        ({"stage": "FULL"}, "stage 'FULL' of ZeRO is not available; use 0"),
        ({"stage": True}, "stage True of ZeRO is not available"),
        ({"offload": "disk"}, "offload='disk' is unknown; use None, 'cpu' or 'nvme'"),
        ({"offload": "cpu", "nvme_path": "/scratch"}, "nvme_path='/scratch' goes with offload='nvme'; add"),
        ({"stage": 0, "offload": "cpu"}, "offload='cpu' moves what is sharded, but stage 0 shards nothing"),
        ({"offload": "cpu", "offload_parameters": True}, "moves shares of parameters, but stage 2 has whole ones on"),
        ({"stage": 3, "offload_parameters": True}, "offload_parameters=True needs a place; add offload='cpu' or"),
        ({"stage": 3, "blocks": 5}, "blocks=5 names no blocks"),
        ({"stages": 2}, "ZeroStrategy has no option 'stages'; did you mean stage?"),
    ],
)
def test_what_is_not_available_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ZeroStrategy(**options)


def test_names_of_other_worlds() -> None:
    assert ZeroStrategy("SHARD_GRAD_OP").zero_config.stage == 2
    assert ZeroStrategy("NO_SHARD", offload=None, offload_parameters=False).zero_config.stage == 0
    assert ZeroStrategy("FULL_SHARD").zero_config.stage == 3
    assert ZeroStrategy(ZeroConfig(3, prefetch=2)).zero_config.prefetch == 2
    with pytest.raises(ValueError, match="offload='cpu' is given beside a ZeroConfig; set it there"):
        ZeroStrategy(ZeroConfig(3), offload="cpu")
    with pytest.raises(ValueError, match="gradient_dtype='bf16' is unknown; use 'float32' or 'parameter'"):
        ZeroConfig(2, gradient_dtype="bf16")
    with pytest.raises(ValueError, match="prefetch=-1 is not a number of blocks; use 0 or more"):
        ZeroConfig(3, prefetch=-1)


def refused(site: Site) -> str:
    with pytest.raises(ValueError, match="LBFGS needs all parameters at once") as error:
        fit(site, WithLBFGS(), Samples(36))
    return str(error.value)


def test_optimizers_that_need_the_whole_model_are_refused(ranks: Ranks) -> None:
    for text in ranks(2, observe, refused, (1, 1, 2), {"zero_stage": 1}, launch="lightning"):
        assert "its state cannot be sharded over replicas; use an optimizer such as AdamW" in text


# ------------------------------------------------------------------------------------------------ gradients in hooks
class Scales(WithAdamW):
    """Changes gradients in a hook, and looks at them in another."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    def on_train_batch_end(self, *args: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(norms).norm()))


def hooks(site: Site) -> Any:
    module: GPT = Scales()
    seen = fit(site, module, gradient_clip_val=0.1)
    return seen, module.norms


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2)])
def test_hooks_see_and_change_full_gradients(ranks: Ranks, layout: Layout) -> None:
    check(ranks, hooks, layout, plan="auto", zero_stage=2)
