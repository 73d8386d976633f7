"""Modules that override the hook `backward`: what one plain process gives, or one clear refusal on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from lightning_parallel.layout import ParallelLayout
from lightning_parallel.strategies.failures import FailureWatch
from lightning_parallel.strategies.refusals import refuse_module
from lightning_parallel.watch import WatchTimes
from tests.glue.oracle import Classifier, Samples, Scenario, Site, check, weights
from tests.harness import Ranks, RanksFailed


class Keeps(Classifier):
    """Keeps its logits for the hook; momentum and decay tell a gradient of zeros from none."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logits = [self.net(batch["x"])]
        return F.cross_entropy(self.logits[0], batch["y"])

    def on_train_batch_end(self, *args: Any) -> None:
        self.logits = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class Scales(Keeps):
    def backward(self, loss: Any, *args: Any) -> None:
        (loss * 2).backward()


class Twice(Keeps):
    def backward(self, loss: Any, *args: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class ByHand(Keeps):
    """Looks at a gradient of the last stage, and goes on from there."""

    def backward(self, loss: Any, *args: Any) -> None:
        (gradient,) = torch.autograd.grad(loss, self.logits)
        self.logits[0].backward(gradient * 3)


class ForSome(Keeps):
    def backward(self, loss: Any, *args: Any) -> None:
        loss.backward(inputs=[p for name, p in self.named_parameters() if "head" not in name])


class ForItsHead(Keeps):
    def backward(self, loss: Any, *args: Any) -> None:
        loss.backward(inputs=list(self.net.head.parameters()))


class Asks(Keeps):
    def backward(self, loss: Any, *args: Any) -> None:
        torch.autograd.grad(loss, list(self.parameters()), allow_unused=True)


class SomeBatches(Keeps):
    def backward(self, loss: Any, *args: Any) -> None:
        if self.trainer.global_step % 2 == 0:
            loss.backward()


class Clips(Keeps):
    def backward(self, loss: Any, *args: Any) -> None:
        loss.backward()
        clip_grad_norm_(self.parameters(), 0.01)


def train(site: Site, kind: type[Keeps]) -> Any:
    module = kind()
    trainer = site.trainer(max_epochs=1)
    if site.layout is not None:
        trainer.strategy._watch = FailureWatch(WatchTimes(grace=1.0))  # type: ignore[attr-defined]
    trainer.fit(module, site.loader(Samples(12), 4))
    return weights(module)


def hooks(site: Site) -> Any:
    return [train(site, kind) for kind in (Scales, Twice)]


def all_hooks(site: Site) -> Any:
    """With the hook that goes by what the last forward pass kept, where backward passes come right after theirs."""
    return [train(site, kind) for kind in (Scales, Twice, ByHand)]


@pytest.mark.parametrize(("scenario", "schedule"), [(all_hooks, "1f1b"), (hooks, "gpipe"), (all_hooks, "zero-bubble")])
def test_passes_that_reach_every_stage(ranks: Ranks, scenario: Scenario, schedule: str) -> None:
    check(ranks, scenario, (1, 2, 1), schedule=schedule)


def some_batches(site: Site) -> Any:
    return [train(site, kind) for kind in (SomeBatches, ForItsHead)]


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 1, 2)])
def test_passes_that_leave_parameters_out_without_a_pipeline(ranks: Ranks, layout: tuple[int, int, int]) -> None:
    check(ranks, some_batches, layout)


def refused(rank: int, world_size: int, layout: tuple[int, int, int], kind: type[Keeps], schedule: str) -> None:
    train(Site(layout, rank, {"schedule": schedule}), kind)


FOREIGN = "a backward pass on stage 1 is for some inputs only, among them net.stem.weight, which lives on stage 0"
UNSERVED = "left out what stage 1 received from stage 0, although the loss depends on it: the hook backward took"


@pytest.mark.parametrize(
    ("kind", "schedule", "text"),
    [
        (ForSome, "1f1b", FOREIGN),
        (ForItsHead, "gpipe", UNSERVED),
        (Asks, "gpipe", FOREIGN),
        (SomeBatches, "1f1b", UNSERVED),
    ],
)
def test_passes_that_leave_a_stage_out(ranks: Ranks, kind: type[Keeps], schedule: str, text: str) -> None:
    with pytest.raises(RanksFailed) as failure:
        ranks(2, refused, (1, 2, 1), kind, schedule, launch="lightning", timeout=20)
    assert f"PipelineCutError: {text}" in str(failure.value) or f"micro-batch 0 {text}" in str(failure.value)
    assert "rank 1 (stage 1, tensor 0, replica 0) failed: PipelineCutError: " in str(failure.value)
    assert "call loss.backward() for every batch and without inputs" in str(failure.value)


def test_a_second_pass_after_gradients_were_summed(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="arrived twice .* one pass in the hook backward"):
        ranks(2, refused, (1, 1, 2), Twice, "1f1b", launch="lightning", timeout=20)


@pytest.mark.parametrize(
    ("layout", "micro_batches"),
    [
        (ParallelLayout(pipeline=2), 2),
        (ParallelLayout(tensor=2), 1),
        (ParallelLayout(data=2), 1),
        (ParallelLayout(), 2),
    ],
)
def test_gradients_in_the_hook_are_not_complete(layout: ParallelLayout, micro_batches: int) -> None:
    with pytest.raises(ValueError, match=r"Clips.backward reads or changes gradients, .* do that in on_before_optim"):
        refuse_module(Clips(), layout, micro_batches, 1)
    refuse_module(ByHand(), layout, micro_batches, 1)
    refuse_module(Clips(), ParallelLayout(), 1, 1)
