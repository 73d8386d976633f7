"""Metrics of language models under tensor, pipeline and data parallel ranks, ddp and fsdp, across a resume.

Reference: the same two epochs in one plain process. Counts are equal, floating point values within 1e-5.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_parallel.metrics import BitsPerByte, ModelFlopsUtilization, PerplexityFromLoss, TokensSeen
from tests.glue.oracle import PAIRS, Layout, PeerSite, ShardingSite, Site, assert_same, check, reference, shard
from tests.glue.training import GPT, LENGTH, Tokens
from tests.harness import Ranks

PLAN = {"layers.*.mlp.fc1": "colwise", "layers.*.mlp.fc2": "rowwise"}
BATCH, SAMPLES = 4, 16


class Measured(GPT):
    """A model with every metric. Tokens below 3 do not count, so batches differ in their number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = TokensSeen()
        self.perplexity = PerplexityFromLoss()
        self.bits = BitsPerByte()
        self.utilization = ModelFlopsUtilization(6e3, 1e6)
        self.record: list[Any] = []

    def configure_model(self) -> None:
        shard(self, self.layers)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        tokens = batch[:, 1:].numel()
        self.seen.update(batch[:, 1:])
        self.perplexity.update(loss, tokens)
        self.bits.update(loss, tokens, num_bytes=4 * tokens)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.utilization.update(BATCH * LENGTH // self.trainer.strategy_replicas, 0.5)  # type: ignore[attr-defined]

    def on_train_epoch_end(self) -> None:
        devices = self.trainer.world_size
        numbers = (self.seen.compute(), self.perplexity.compute(), self.bits.compute())
        self.record.append((*(float(value) for value in numbers), devices * float(self.utilization.compute())))


def two_epochs(site: Site) -> Any:
    """One epoch, a checkpoint, and another epoch in a new trainer and module."""
    path = Path.cwd() / "one.ckpt"
    records = []
    for epochs in (1, 2):
        module = Measured()
        trainer = site.trainer(max_epochs=epochs)
        trainer.strategy_replicas = site.replicas  # type: ignore[attr-defined]
        loader = site.loader(Tokens(SAMPLES), BATCH)
        trainer.fit(module, loader, ckpt_path=None if epochs == 1 else path)
        trainer.save_checkpoint(path)
        # What `self.log` resets at the end of an epoch starts at nothing; the others go on.
        records += module.record
    return records


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_every_layout(ranks: Ranks, layout: Layout) -> None:
    check(ranks, two_epochs, layout, plan=PLAN, zero_stage=1)


def under_strategies_of_lightning(rank: int, world_size: int) -> Any:
    return [two_epochs(kind((1, 1, 2), rank)) for kind in (PeerSite, ShardingSite)]


def test_ddp_and_fsdp(ranks: Ranks) -> None:
    expected = reference(two_epochs)
    for rank, (peers, sharded) in enumerate(ranks(2, under_strategies_of_lightning, launch="lightning")):
        assert_same(peers, expected, f"ddp, rank {rank}")
        assert_same(sharded, expected, f"fsdp, rank {rank}")


def test_the_reference_is_what_one_counts_by_hand() -> None:
    found = reference(two_epochs)
    tokens = SAMPLES * LENGTH
    assert [entry[0] for entry in found] == [tokens, tokens]
    steps = SAMPLES // BATCH
    for entry in found:
        assert entry[3] == pytest.approx(tokens * 6e3 / 1e6 / (steps * 0.5))
        assert entry[2] == pytest.approx(math.log(entry[1]) / 4 / math.log(2))
    # The second epoch goes on with the sums of the first, so that its mean moves less.
    assert found[1][1] < found[0][1]
