"""How often gradients travel: once per parameter and optimizer step, whatever is accumulated or cut into parts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_parallel import comm
from tests.glue.oracle import Layout, Site, observe
from tests.glue.training import GPT, fit
from tests.harness import Ranks


class Counts(Callback):
    """Elements that were reduced until now, and those that a rank's buckets have, padding included."""

    def __init__(self) -> None:
        self.reduced = self.held = 0
        self._plain: Any = comm.reduce_scatter_into

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        comm.reduce_scatter_into = self._counted

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        comm.reduce_scatter_into = self._plain

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.held = sum(bucket.layout.size for bucket in strategy._sharding.sharder.buckets)

    def _counted(self, own: torch.Tensor, full: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.reduced += full.numel()
        return self._plain(own, full, *args, **kwargs)


def counted(site: Site) -> list[tuple[float, int, int]]:
    """How often each element was reduced, optimizer steps, and batches; with and without accumulation."""
    found = []
    for window in (1, 2):
        counts = Counts()
        seen = fit(site, GPT(), callbacks=[counts], max_epochs=1, accumulate_grad_batches=window)
        found.append((counts.reduced / counts.held, seen["steps"], len(seen["batches"])))
    return found


@pytest.mark.parametrize(
    ("layout", "stage", "parts"), [((1, 2, 2), 1, 3), ((1, 2, 2), 2, 3), ((1, 1, 2), 2, 1), ((1, 1, 2), 3, 2)]
)
def test_one_reduction_for_each_optimizer_step(ranks: Ranks, layout: Layout, stage: int, parts: int) -> None:
    """But stage 3, which has no memory for whole gradients between batches, adds each batch's to its shards."""
    options = {"plan": "auto", "zero_stage": stage, "micro_batches": parts, "bucket_bytes": 2000}
    for found in ranks(math.prod(layout), observe, counted, layout, options, launch="lightning"):
        assert found == [(5, 5, 5), (5 if stage == 3 else 3, 3, 5)]
