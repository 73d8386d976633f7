"""Callbacks that size, meter and record runs, under tensor, pipeline and data parallel ranks, ddp and fsdp.

Reference: the same run in one plain process. Counts, FLOPs, verdicts and rates are those of the whole job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_parallel.callbacks import (
    ChinchillaSizer,
    ComputeBudget,
    MicroBatchSizer,
    ScalingLawRecorder,
    ScalingMonitor,
    ThroughputMonitor,
)
from lightning_parallel.scaling.plan import SizingGoal
from lightning_parallel.scaling.runs import read_runs
from lightning_parallel.scaling.speeds import Speed, append_speed
from tests.clock import Clock
from tests.glue.oracle import PAIRS, Layout, PeerSite, ShardingSite, Site, assert_same, check, reference, shard, weights
from tests.glue.training import GPT, LENGTH, Record, Tokens
from tests.harness import Ranks

PLAN = {"layers.*.mlp.fc1": "colwise", "layers.*.mlp.fc2": "rowwise"}
BATCH, ACCUMULATE = 4, 2
STEP_TOKENS = BATCH * ACCUMULATE * LENGTH
PARAMS = sum(p.numel() for p in GPT().parameters())
STEP_FLOPS = 6 * PARAMS * STEP_TOKENS


class Observed(GPT):
    """A model with a validation loss, which tells how many parameters hooks see."""

    def configure_model(self) -> None:
        shard(self, self.layers)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = torch.nn.functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("val_loss", loss, sync_dist=True)


def inner_tokens(batch: torch.Tensor) -> int:
    """The last token of a sequence is only a label."""
    return batch[:, 1:].numel()


def run(site: Site, steps: float, table: Path, resume: Path | None, save: Path) -> Any:
    """Trains until a budget of so many steps is spent; everything that the callbacks found out."""
    budget = ComputeBudget(steps * STEP_FLOPS, tokens_fn=inner_tokens, checkpoint=save)
    speed = ThroughputMonitor(tokens_fn=inner_tokens, peak_flops=1e6, clock=Clock())
    monitor = ScalingMonitor("twenty", tokens_fn=inner_tokens)
    recorder = ScalingLawRecorder(table, tokens_fn=inner_tokens)
    callbacks = [budget, speed, monitor, recorder]
    trainer = site.trainer(
        callbacks=callbacks,
        max_epochs=3,
        accumulate_grad_batches=ACCUMULATE,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    training = site.loader(Tokens(24), BATCH)
    trainer.fit(Observed(), training, site.loader(Tokens(4), BATCH), ckpt_path=resume)
    assert monitor.outlook is not None
    assert recorder.run is not None
    logged = {key: float(value) for key, value in sorted(trainer.callback_metrics.items())}
    logged["throughput/tokens_per_second_per_device"] *= trainer.world_size
    logged["throughput/mfu"] *= trainer.world_size
    for differs_by_rank_or_time in ("loss", "scaling/seconds_left"):
        logged.pop(differs_by_rank_or_time, None)
    found = recorder.run
    return {
        "steps": trainer.global_step,
        "spent": budget.spent,
        "tokens": budget.tokens,
        "verdict": str(monitor.outlook.now),
        "recorded": (found.params, found.tokens, found.flops, found.loss),
        "logged": logged,
    }


def metered(site: Site) -> Any:
    """Stops at a budget of 3.5 steps, and goes on to one of 5 from the checkpoint."""
    table, first, second = (Path.cwd() / name for name in ("runs.csv", "first.ckpt", "second.ckpt"))
    table.unlink(missing_ok=True)
    return [run(site, 3.5, table, None, first), run(site, 5, table, first, second)]


def test_the_reference_is_what_one_counts_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short, long = metered(Site())
    for found, steps in ((short, 3), (long, 5)):
        assert found["steps"] == steps
        assert found["spent"] == steps * STEP_FLOPS
        assert found["tokens"] == found["logged"]["scaling/tokens"] == steps * STEP_TOKENS
        assert found["recorded"][:3] == (PARAMS, steps * STEP_TOKENS, steps * STEP_FLOPS)
        assert found["recorded"][3] == pytest.approx(found["logged"]["val_loss"])
        assert found["verdict"].startswith("undertrained")
    # The clock is looked at once at the start, once per step and twice per validation, which does not count.
    assert long["logged"]["throughput/steps_per_second"] == pytest.approx(2.0)
    assert long["logged"]["throughput/tokens_per_second"] == pytest.approx(2.0 * STEP_TOKENS)
    assert long["logged"]["throughput/samples_per_second"] == pytest.approx(2.0 * BATCH * ACCUMULATE)
    assert long["logged"]["throughput/mfu"] == pytest.approx(2.0 * STEP_FLOPS / 1e6)
    # Three epochs are nine steps, but the budget ends after five.
    assert long["logged"]["scaling/final_ratio_to_optimal"] == pytest.approx(5 * STEP_TOKENS / PARAMS / 20)
    assert torch.load(tmp_path / "second.ckpt", weights_only=False)["global_step"] == 5
    rows = read_runs(tmp_path / "runs.csv").runs
    assert [row.tokens for row in rows] == [3 * STEP_TOKENS, 5 * STEP_TOKENS]


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_every_layout(ranks: Ranks, layout: Layout) -> None:
    check(ranks, metered, layout, plan=PLAN, zero_stage=2)


def under_ddp(rank: int, world_size: int, folder: Path) -> Any:
    site = PeerSite((1, 1, 2), rank)
    found = metered(site)
    alone = run(site, 3.5, folder / "runs.csv", None, folder / "first.ckpt")
    assert_same(alone, found[0], "the same run again")
    return found


def test_ddp_and_a_resume_in_one_process(ranks: Ranks, tmp_path: Path) -> None:
    for rank, found in enumerate(ranks(2, under_ddp, tmp_path, launch="lightning")):
        assert_same(found, reference(metered), f"rank {rank}")
    found = run(Site(), 5, tmp_path / "runs.csv", tmp_path / "first.ckpt", tmp_path / "second.ckpt")
    assert_same(found, reference(metered)[1], "resumed from two ranks")
    assert [row.tokens for row in read_runs(tmp_path / "runs.csv").runs] == [3 * STEP_TOKENS, 5 * STEP_TOKENS]


class Scalable(GPT):
    """Builds its layers when it is told how many."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.save_hyperparameters({"layers": 0, "width": 0, "heads": 0})

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            built = GPT(**{name: self.hparams[name] for name in ("layers", "width", "heads")})
            for name, child in built.named_children():
                self.add_module(name, child)
            shard(self, self.layers)


def three_layers(params: float) -> dict[str, int]:
    """A rule of one's own; the optimal size for so little compute is no transformer."""
    return {"layers": 3, "width": 8, "heads": 2}


def sized(site: Site) -> Any:
    """A model and its steps chosen for an hour at a speed that only rank 0 can read; what was trained and saved."""
    speeds = Path.cwd() / f"speeds-of-rank-{site.rank}.csv"
    speeds.unlink(missing_ok=True)
    if site.rank == 0:
        append_speed(speeds, Speed(6 * PARAMS * BATCH * LENGTH * 5.5 / 3600, PARAMS, 1, 100))
    sizer = ChinchillaSizer(SizingGoal(device_hours=1, flops_per_second=speeds), BATCH * LENGTH, rule=three_layers)
    module = Scalable()
    trainer = site.trainer(callbacks=[sizer], max_epochs=-1)
    trainer.fit(module, site.loader(Tokens(24), BATCH))
    path = Path.cwd() / "sized.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    kept = saved["callbacks"]["ChinchillaSizer"]
    return {
        "steps": trainer.global_step,
        "sizes": dict(saved["hyper_parameters"]),
        "kept": kept,
        "weights": weights(module),
    }


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_every_rank_chooses_the_same_size(ranks: Ranks, layout: Layout) -> None:
    check(ranks, sized, layout, plan=PLAN, zero_stage=1)


def under_fsdp(rank: int, world_size: int) -> Any:
    site = ShardingSite((1, 1, 2), rank)
    return metered(site), sized(site)


def test_fsdp(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(2, under_fsdp, launch="lightning")):
        assert_same(found, (reference(metered), reference(sized)), f"rank {rank}")


class Tight(GPT):
    """Rank 1 has less memory than rank 0."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.batch_size = 8
        self.most = most
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(len(batch))
        if len(batch) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory (said by the test)")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(Tokens(32), self.batch_size)


def uneven_memory(rank: int, world_size: int) -> Any:
    found = []
    sizer, module = MicroBatchSizer(), Tight(most=3 if rank else 100)
    trainer = PeerSite((1, 1, 2), rank).trainer(callbacks=[sizer], max_epochs=1, use_distributed_sampler=True)
    trainer.fit(module)
    found.append((sizer.micro_batch, trainer.accumulate_grad_batches, trainer.global_step, module.seen))
    with pytest.raises(ValueError, match="not even one sample fits into the memory of every rank"):
        PeerSite((1, 1, 2), rank).trainer(callbacks=[MicroBatchSizer()]).fit(Tight(most=1 - rank))
    return found


def test_ranks_agree_on_the_largest_batch_that_fits_all(ranks: Ranks) -> None:
    """32 samples over two replicas are two optimizer steps of 8 samples each, in batches of 2, and 1 x 8 afterwards."""
    assert ranks(2, uneven_memory, launch="lightning") == [[(2, 1, 2, [2] * 8)]] * 2


class OneTightRank(GPT):
    """On rank 1 memory ends in the middle of a step of more than a few samples."""

    def __init__(self, most: int) -> None:
        super().__init__(layers=3)
        self.most = most
        self.steps = 0
        self.seen = SumMetric()
        self.counted: list[float] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        takes_memory = type(tokens) is torch.Tensor  # planning does not
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for index, layer in enumerate(self.layers):
            if index == 2 and self.global_rank == 1 and takes_memory and len(tokens) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory (said by the test)")
            x = layer(x)
        return self.head(self.ln(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.seen.update(len(batch))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.counted.append(float(self.seen.compute()))


def divided(site: Site) -> Any:
    """Two epochs of an uneven number of batches, the second one from a checkpoint and with more memory."""
    shown, path = [], Path.cwd() / "divided.ckpt"
    for epochs, most in ((1, 2), (2, 100)):
        sizer, module = MicroBatchSizer(), OneTightRank(most)
        callbacks = [] if site.layout is None else [sizer]
        resume = path if epochs == 2 else None
        record = Record()
        trainer = site.trainer(callbacks=[record, *callbacks], max_epochs=epochs)
        trainer.fit(module, site.loader(Tokens(48), 32), ckpt_path=resume)
        trainer.save_checkpoint(path)
        shown.append({"batches": record.batches, "weights": weights(module), "counted": module.counted})
        if site.layout is not None:
            assert sizer.micro_batch == 2
            # 16 and 16 parts of 2 and 1 samples per epoch; trials left no trace.
            assert module.steps == 32 // site.replicas
    if site.layout is not None:
        fixed = Site(site.layout, site.rank, {**site.options, "micro_batches": 4}).trainer(
            callbacks=[MicroBatchSizer()]
        )
        with pytest.raises(ValueError, match="micro_batches=4 and MicroBatchSizer both divide the batch"):
            fixed.fit(OneTightRank(2), site.loader(Tokens(48), 32))
    return shown


@pytest.mark.parametrize(("layout", "zero_stage"), [((2, 1, 1), 0), ((1, 2, 1), 0), ((1, 1, 2), 2)], ids=str)
def test_one_rank_without_memory_leaves_nobody_waiting(ranks: Ranks, layout: Layout, zero_stage: int) -> None:
    check(ranks, divided, layout, plan=PLAN, micro_batches="auto", zero_stage=zero_stage)
