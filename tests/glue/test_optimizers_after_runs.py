"""An optimizer after the run: the next run goes on with it, and nobody takes one rank's parts of it for the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_parallel import ZeroStrategy
from tests.glue.oracle import QUIET, Classifier, Layout, Samples, Site, check, weights
from tests.harness import Ranks

LAYOUTS: list[tuple[Layout, int]] = [((2, 1, 1), 0), ((1, 2, 1), 0), ((1, 1, 2), 1), ((1, 1, 2), 3)]


class KeepsItsOptimizer(Classifier):
    """Returns the same object for every run."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.optim.AdamW(self.parameters(), 0.01)]

    def configure_optimizers(self) -> Any:
        return self.kept[0]


def two_runs(site: Site) -> Any:
    """Weights and the saved state after a run, an evaluation, and another run with the same optimizer."""
    module, saved = KeepsItsOptimizer(), {}
    for epochs in (1, 2):
        trainer = site.trainer(max_epochs=epochs)
        trainer.fit(module, site.loader(Samples(16), 8))
        trainer.validate(module, site.loader(Samples(8), 8), verbose=False)
        trainer.save_checkpoint("after.ckpt")
        trainer.strategy.barrier()
        entries = torch.load("after.ckpt", weights_only=False)["optimizer_states"][0]["state"]
        saved = {index: {key: torch.as_tensor(v) for key, v in entry.items()} for index, entry in entries.items()}
    if site.layout is not None:
        optimizer = module.kept[0]
        tries: list[Callable[[], Any]] = [
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.load_state_dict({}),
            lambda: optimizer.state[module.net.stem.weight],
        ]
        for attempt in tries:
            with pytest.raises(RuntimeError, match=r"trainer.save_checkpoint\(\) writes it whole"):
                attempt()
        other = ZeroStrategy(2, bucket_bytes=1000)
        with pytest.raises(ValueError, match="AdamW of an earlier run"):
            Trainer(accelerator="cpu", devices=site.trainer().num_devices, strategy=other, **QUIET, max_epochs=1).fit(
                module, site.loader(Samples(16), 8)
            )
    return weights(module), saved


@pytest.mark.parametrize(("layout", "zero_stage"), LAYOUTS)
def test_the_next_run_goes_on_with_it(ranks: Ranks, layout: Layout, zero_stage: int) -> None:
    check(ranks, two_runs, layout, zero_stage=zero_stage)
