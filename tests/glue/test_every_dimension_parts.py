"""Precisions, special parameters and starts where tensor, pipeline and data ranks meet, against one plain process.

Other modules look at each of them on smaller layouts, where a failure is easier to understand.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn

from lightning_parallel.strategies.partition import materialize
from tests.glue.oracle import Layout, Site, assert_same, held, observe, reference, set_by_formula
from tests.glue.test_training_parameters import Sometimes, Watch
from tests.glue.test_training_precision import (
    WithAdamW,
    exact_bf16_mixed,
    exact_bf16_true,
    exact_fp16,
    overflow,
)
from tests.glue.training import fit
from tests.harness import Ranks

GRID: Layout = (2, 2, 2)
WHOLE_NUMBERS = {"plan": {"blocks.*.fc": "colwise", "blocks.*.out": "rowwise"}, "micro_batches": 4}


class Special(Sometimes):
    """Tied, frozen, unused and sometimes used parameters, and some of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tok.weight
        self.layers[0].requires_grad_(False)

    def reset_parameters(self) -> None:
        for own in (self.never, self.scale, self.shift):
            nn.init.normal_(own)


class Start(Callback):
    """Keeps the start weights, sets others by formula, and notes what ranks hold of a tied parameter."""

    def __init__(self) -> None:
        self.drawn: dict[str, torch.Tensor] = {}
        self.tied: list[torch.Tensor] = []

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.drawn = {name: p.detach().clone() for name, p in module.named_parameters()}
        set_by_formula(module)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        self.tied.append(held(trainer, module)["tok.weight"].detach().clone())


def special(site: Site) -> Any:
    """Started on the meta device where ranks share the model."""
    start, watch = Start(), Watch()
    seed_everything(5)
    with site.trainer().init_module(empty_init=site.layout is not None):
        module = Special()
    assert all(p.is_meta for p in module.parameters()) == (site.layout is not None)
    seen = fit(site, module, callbacks=[start, watch], gradient_clip_val=0.5)
    assert not any(name.startswith(("third", "never", "layers.0")) for names in watch.named for name in names)
    return {"seen": seen, "drawn": start.drawn, "tied": start.tied}


def fp16_overflow(site: Site) -> Any:
    return overflow(site, WithAdamW(), gradient_clip_val=0.5)


def parts(site: Site) -> Any:
    whole = replace(site, options=WHOLE_NUMBERS)
    exact = [scenario(whole) for scenario in (exact_bf16_mixed, exact_bf16_true, exact_fp16)]
    return {"exact": exact, "overflow": fp16_overflow(site), "special": special(site)}


def drawn_alone() -> dict[str, torch.Tensor]:
    """Start weights as one process draws them from the meta device."""
    seed_everything(5)
    with torch.device("meta"):
        module = Special()
    materialize(module, torch.device("cpu"))
    return {name: p.detach() for name, p in module.named_parameters()}


def test_precisions_special_parameters_and_meta_starts(ranks: Ranks) -> None:
    found = ranks(math.prod(GRID), observe, parts, GRID, {"plan": "auto"}, launch="lightning", timeout=90)
    start = drawn_alone()
    for rank, each in enumerate(found):
        for exact, scenario in zip(each["exact"], (exact_bf16_mixed, exact_bf16_true, exact_fp16), strict=True):
            assert_same(exact, reference(scenario), f"rank {rank}, {scenario.__name__}", 0)
        assert_same(each["overflow"], reference(fp16_overflow), f"rank {rank}, overflow")
        assert each["overflow"]["scales"] == [8, 4, 4, 8, 8]
        assert_same(each["special"]["seen"], reference(special)["seen"], f"rank {rank}, special parameters")
        assert_same(each["special"]["drawn"], start, f"rank {rank}, start weights", 0)
        twin = found[rank % GRID[0]]["special"]["tied"]
        assert_same(each["special"]["tied"], twin, f"rank {rank}, copies of a tied parameter", 0)
