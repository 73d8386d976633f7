"""ZeRO 3 under a Trainer: what the other files hold to a plain run, held to it with parameters in shards."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_parallel import TensorPipelineStrategy, ZeroStrategy
from tests.glue.oracle import QUIET, Classifier, Samples, Site, check, observe, weights
from tests.glue.test_callbacks import finetuned
from tests.glue.test_evaluation import everything_predicted, streams, validate_and_test_around_a_fit
from tests.glue.test_training_optimizers import accumulation_and_clipping, factors, windows_twice
from tests.glue.test_training_parameters import by_sample, frozen, sometimes
from tests.glue.test_training_precision import exact_bf16_mixed, exact_bf16_true, exact_fp16, overflows
from tests.glue.test_whole_view import everything, replacing
from tests.glue.training import fit
from tests.harness import Ranks

SHARDED: dict[str, Any] = {"plan": "auto", "zero_stage": 3}


def training(site: Site) -> Any:
    """Windows, clipping, manual optimization, whole and partial parameters, thawing, overflow, half precision."""
    scenarios = (accumulation_and_clipping, windows_twice, factors, frozen, sometimes, by_sample, finetuned, overflows)
    return [scenario(site) for scenario in (*scenarios, exact_bf16_mixed, exact_bf16_true, exact_fp16)]


def looking(site: Site) -> Any:
    """Hooks read, change and replace whole parameters; replicas validate and predict different numbers of batches."""
    scenarios = (everything, replacing, everything_predicted, streams, validate_and_test_around_a_fit)
    return [scenario(site) for scenario in scenarios]


@pytest.mark.parametrize(("scenario", "replicas"), [(training, 2), (looking, 2), (accumulation_and_clipping, 4)])
def test_runs_as_a_plain_process(ranks: Ranks, scenario: Any, replicas: int) -> None:
    check(ranks, scenario, (1, 1, replicas), timeout=110, **SHARDED)


class Penalized(Classifier):
    """Looks at all weights in its step, and changes them in a hook, where they are whole."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        with whole(self.trainer):
            penalty = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        return loss + 0.01 * penalty

    def on_train_batch_end(self, *args: Any) -> None:
        with whole(self.trainer), torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.9, 0.9)


def whole(trainer: Trainer) -> AbstractContextManager[None]:
    strategy: Any = trainer.strategy
    return strategy.full_params() if hasattr(strategy, "full_params") else nullcontext()


def penalized(site: Site) -> Any:
    return [fit(site, Penalized(), Samples(24), accumulate_grad_batches=2), fit(site, Penalized(), Samples(24))]


def test_all_parameters_are_whole_in_full_params(ranks: Ranks) -> None:
    check(ranks, penalized, (1, 1, 2), **SHARDED)
    check(ranks, penalized, (1, 1, 2), zero_stage=2, plan="auto")


# ------------------------------------------------------------------------------------------------ start and end
class Large(LightningModule):
    """Six blocks of a megabyte, built on the meta device."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch["x"].repeat(1, 64)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


MESSAGES = 1024
"""Bytes of votes and lengths that may be under way when memory is fullest, of 8 to 24 bytes each."""


class Measured(ZeroStrategy):
    """The most memory that its set-up has at one time, which the profiler sees, and what is left of that."""

    def setup(self, trainer: Trainer) -> None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            super().setup(trainer)
        events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
        self.peak = max(accumulate(sizes))
        gc.collect()
        tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter)]
        kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}
        self.held = sum(kept.values())


def meta(rank: int, world_size: int, restore: bool, kind: str | None = None) -> Any:
    seed_everything(3)
    elsewhere = {"offload": kind, "offload_parameters": kind is not None}
    strategy = Measured(stage=3, restore_weights=restore, **elsewhere)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=world_size, strategy=strategy, max_steps=1, **options)
    module = Large()
    trainer.fit(module, Site().loader(Samples(8), 4))
    refusal = ""
    if not restore:
        with pytest.raises(RuntimeError, match="restore_weights=False") as error:
            trainer.strategy.lightning_module_state_dict()
        refusal = str(error.value)
    return strategy.peak, strategy.held, weights(module) if restore else refusal


def test_no_rank_holds_the_whole_model_at_start(ranks: Ranks) -> None:
    """Weights are those of a module that was built on the CPU with the same seed."""
    block, total = 4 * (512 * 512 + 512), 6 * 4 * (512 * 512 + 512)
    seed_everything(3)
    expected = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    for kind, share in ((None, total / 2), ("cpu", total / 2), ("nvme", 0)):
        for peak, held, found in ranks(2, meta, True, kind, launch="lightning"):
            assert held == pytest.approx(share, rel=0.05, abs=0.1 * block), kind
            if kind is None:  # the profiler does not see what threads free that write files
                assert peak <= share + 2.5 * block + MESSAGES
                assert peak < 0.95 * total
            assert all(torch.equal(found[f"net.{name}"], value) for name, value in expected.state_dict().items())
    for _, _, refusal in ranks(2, meta, False, launch="lightning"):
        assert "left each rank's weights where they were" in refusal


class NotesMoves(ZeroStrategy):
    """Counts the parameters that its set-up moves to the device as they are, whole."""

    def setup(self, trainer: Trainer) -> None:
        self.moved = 0
        plain = torch.Tensor.to

        def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.moved += isinstance(tensor, nn.Parameter)
            return plain(tensor, *args, **kwargs)

        torch.Tensor.to = noted  # type: ignore[method-assign,assignment]
        try:
            super().setup(trainer)
        finally:
            torch.Tensor.to = plain  # type: ignore[method-assign]


def moves(site: Site) -> Any:
    found = []
    for stage in (2, 3):
        strategy, module = NotesMoves(stage), Classifier()
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=1, **QUIET)
        trainer.fit(module, Site().loader(Samples(8), 4))
        found.append((strategy.moved, len(list(module.parameters()))))
    return found


def test_a_module_in_memory_goes_to_the_device_in_shares(ranks: Ranks) -> None:
    """It may not fit there: units go one by one, of which each rank keeps its part."""
    for whole, shares in ranks(2, observe, moves, (1, 1, 2), {}, launch="lightning"):
        assert whole[0] == whole[1] > 0, "stage 2 computes with whole parameters"
        assert shares[0] == 0


def refused(rank: int, world_size: int) -> str:
    strategy = TensorPipelineStrategy(tensor_parallel_size=2, pipeline_parallel_size=1, zero_stage=3)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="stage 3 of ZeRO") as error:
        trainer.fit(Classifier(), Site().loader(Samples(8), 4))
    return str(error.value)


def test_parts_of_parameters_are_not_sharded_again(ranks: Ranks) -> None:
    for text in ranks(2, refused, launch="lightning"):
        assert text.endswith("their ranks hold parts of parameters already; use stage 1 or 2 with them")
