"""Which random numbers agree between ranks and which differ, and that a recomputation draws them again."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.data import DataLoader

from lightning_parallel.pipeline.cut import StageCut
from lightning_parallel.pipeline.placeholder import PipelineCutError
from lightning_parallel.pipeline.trace import CutPlan
from tests.glue.oracle import WIDTH, Layout, Samples, Site, observe
from tests.glue.training import Notes, fit
from tests.harness import Ranks

PLAN = {"blocks.*.fc": "colwise", "blocks.*.out": "rowwise"}


class NotedDropout(nn.Dropout):
    """Notes what it kept, in its forward: hooks may not look at the parts that ranks have of split activations."""

    note: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.note is not None and type(out) is torch.Tensor:  # a foreign stage sees placeholders
            self.note(out.detach() != 0)
        return out


class DropBlock(nn.Module):
    """Dropout where activations are split, and where they are whole again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.split, self.whole = NotedDropout(0.5), NotedDropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.whole(self.out(self.split(torch.sigmoid(self.fc(x)))))


class Drops(LightningModule):
    """Notes what every dropout kept, and a number drawn in the step itself."""

    def __init__(self, run: Callable[..., Any] = lambda block, x: block(x)) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.before, self.after = NotedDropout(0.5), NotedDropout(0.5)
        self.blocks = nn.ModuleList(DropBlock() for _ in range(4))
        self.end = nn.Linear(WIDTH, 4)
        self.run = run
        self.notes = Notes()

    def on_train_start(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, NotedDropout):
                module.note = partial(self.notes.add, name)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.notes.add("drawn", torch.rand(3))
        x = self.before(self.start(batch["x"]))
        for block in self.blocks:
            x = self.run(block, x)
        return F.cross_entropy(self.end(self.after(x)), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def recomputed(block: nn.Module, x: torch.Tensor) -> Any:
    """Runs the block again in the backward pass, to its very end."""
    with set_checkpoint_early_stop(False):
        return checkpoint(block, x, use_reentrant=False)


def recomputed_early(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def recomputed_reentrant(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=True)


def observe_masks(site: Site) -> Any:
    """Masks of two steps; the rank's own random numbers differ at first."""
    torch.manual_seed(site.rank)
    module = Drops()
    fit(site, module, Samples(16), max_epochs=1)
    return module.notes.entries


def masks(ranks: Ranks, layout: Layout, **options: Any) -> list[dict[str, list[torch.Tensor]]]:
    return ranks(math.prod(layout), observe, observe_masks, layout, {"plan": PLAN, **options}, launch="lightning")


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def differ(*every: list[torch.Tensor]) -> bool:
    """Whether all masks of all lists differ from one another."""
    flat = [m.flatten().tolist() for entries in every for m in entries]
    return len({str(m) for m in flat}) == len(flat)


def test_tensor_ranks_agree_on_whole_activations_and_differ_on_split_ones(ranks: Ranks) -> None:
    first, second = masks(ranks, (2, 1, 1))
    whole = ["before", "after", *(f"blocks.{i}.whole" for i in range(4))]
    for name in ("drawn", *whole):
        assert same(first[name], second[name]), name
    assert differ(*(first[name] for name in whole))
    split = [each[f"blocks.{i}.split"] for i in range(4) for each in (first, second)]
    assert {m.shape for entries in split for m in entries} == {(8, WIDTH)}
    assert differ(*split)


def test_replicas_differ_and_their_tensor_ranks_agree(ranks: Ranks) -> None:
    found = masks(ranks, (2, 1, 2))
    for first, second in (found[:2], found[2:]):
        for name in first:
            judge = differ if name.endswith("split") else same
            assert judge(first[name], second[name]), name
    for one in found[:2]:
        for other in found[2:]:
            assert all(differ(one[name], other[name]) for name in one)


@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 2, 1), (1, 2, 2)])
def test_stages_agree_outside_of_the_blocks_and_differ_inside(ranks: Ranks, layout: Layout) -> None:
    found = masks(ranks, layout, micro_batches=2)
    tensor, _, data = layout
    for rank in range(tensor * data):
        early, late = found[rank], found[tensor * data + rank]
        assert same(early["drawn"], late["drawn"])
        assert differ(early["drawn"])
        assert len(early["drawn"]) == 4
        assert set(early) == {"drawn", "before", *(f"blocks.{i}.{kind}" for i in (0, 1) for kind in ("split", "whole"))}
        assert set(late) == {"drawn", "after", *(f"blocks.{i}.{kind}" for i in (2, 3) for kind in ("split", "whole"))}
        assert differ(early["blocks.0.whole"], early["blocks.1.whole"], late["blocks.2.whole"], late["blocks.3.whole"])
        assert differ(early["blocks.0.split"], early["blocks.1.split"], late["blocks.2.split"], late["blocks.3.split"])
    if tensor == 2:
        assert same(found[2]["blocks.2.whole"], found[3]["blocks.2.whole"])
        assert differ(found[2]["blocks.2.split"], found[3]["blocks.2.split"])
    if data == 2:
        assert differ(found[0]["drawn"], found[1]["drawn"])
        assert differ(found[2]["blocks.2.whole"], found[3]["blocks.2.whole"])


def observe_recomputation(site: Site) -> Any:
    """The same run again and again, at last with every block recomputed in the backward pass in each way there is."""
    ways: list[Any] = [None, None, recomputed, recomputed_early]
    if site.layout is not None and site.layout[1] == 1:
        ways.append(recomputed_reentrant)
    runs = []
    for run in ways:
        seed_everything(3)
        module = Drops() if run is None else Drops(run)
        runs.append((fit(site, module, Samples(12), max_epochs=1), module.notes.entries))
    return runs


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 3, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)])
def test_a_recomputation_draws_the_same_masks(ranks: Ranks, layout: Layout) -> None:
    for once, *others in ranks(
        math.prod(layout), observe, observe_recomputation, layout, {"plan": PLAN}, launch="lightning"
    ):
        for seen, kept in others:
            assert seen["batches"] == once[0]["batches"]
            assert all(torch.equal(value, seen["weights"][name]) for name, value in once[0]["weights"].items())
            for name, masks in once[1].items():
                assert {str(m.tolist()) for m in kept[name]} == {str(m.tolist()) for m in masks}
        again, whole = others[0][1], others[1][1]
        for name, masks in once[1].items():
            assert same(masks, again[name])
            assert len(whole[name]) == len(masks) * (2 if name.startswith("blocks") else 1)


def test_a_recomputation_that_would_lose_the_graph_is_refused() -> None:
    module = Drops(recomputed_reentrant)
    names = tuple(f"blocks.{i}" for i in range(4))
    stages = {name: (0, 1) for name, _ in module.named_parameters()}
    cut = StageCut(module, CutPlan(names, ((0, 2), (2, 4)), stages), 0, torch.device("cpu"))
    cut.apply()
    batch = next(iter(DataLoader(Samples(4), 4)))
    with pytest.raises(
        PipelineCutError, match="blocks.1, the last block of stage 0, ran without .* use_reentrant=False"
    ):
        cut.run(lambda: module.training_step(batch, 0))
    module.run = recomputed
    boundary = cut.run(lambda: module.training_step(batch, 0)).boundary
    assert boundary.requires_grad
    boundary.sum().backward()
    assert module.start.weight.grad is not None
