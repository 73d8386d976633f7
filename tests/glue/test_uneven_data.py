"""Replicas with different numbers of batches: told on every rank where they cannot go on together, else added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torchmetrics import MeanMetric

from tests.glue.oracle import Classifier, Layout, Samples, Site, check, observe, reference
from tests.harness import Ranks

COUNT = 12
FEW = 4
"""Samples of the last replica, where the first has the other ones."""


class Stream(IterableDataset[Any]):
    """Samples of one replica in each pass; the last entry counts for all further ones."""

    def __init__(self, *passes: Sequence[int]) -> None:
        self.passes = list(passes)

    def __iter__(self) -> Iterator[Any]:
        numbers = self.passes[0] if len(self.passes) == 1 else self.passes.pop(0)
        samples = Samples(COUNT)
        return (samples[number] for number in numbers)


class Boastful(Stream):
    """Has a length, and less than that."""

    def __len__(self) -> int:
        return COUNT


class Several(Classifier):
    """Logs values and a metric of several evaluation dataloaders, the metric of `odd` on the first replica only."""

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        self.metric, self.odd = MeanMetric(), odd

    def evaluate(self, batch: Any, dataloader_idx: int) -> None:
        losses = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
        loss = losses.mean()
        self.log("loss", loss, on_step=dataloader_idx == 0, on_epoch=True)
        self.log("most", losses.max(), reduce_fx="max")
        if not self.odd or self.trainer.strategy.mesh.data_rank == 0:  # type: ignore[attr-defined]
            self.metric.update(loss, len(batch["y"]))
            self.log("metric", self.metric)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, dataloader_idx)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.net(batch["x"])


def is_last(site: Site) -> bool:
    return site.replicas > 1 and site.rank // (site.layout or (1, 1, 1))[0] % site.replicas == 1


def one(site: Site, last: Any, others: Any, **kwargs: Any) -> DataLoader[Any]:
    """A loader of two samples per batch; the second replica has other data."""
    return DataLoader(last if is_last(site) else others, batch_size=2, **kwargs)


class Holes:
    """Makes None of the batch that starts with sample 4."""

    def __call__(self, samples: Any) -> Any:
        batch = default_collate(samples)
        return None if batch["id"][0] == 4 else batch


def refused(site: Site) -> dict[str, str]:
    """What each kind of uneven data comes to, in the same processes, one after the other."""
    some, none = Stream(range(FEW)), Stream(())
    found = {}
    training = {
        "empty stream": one(site, none, some),
        "empty data": one(site, Samples(0), Samples(FEW)),
        "empty later": one(site, Stream(range(FEW), ()), some),
        "shorter than announced": one(site, Boastful(range(FEW)), Boastful(range(COUNT))),
        "a batch that is None": one(site, Samples(8), Samples(8), collate_fn=Holes() if is_last(site) else None),
    }
    if "zero_stage" not in site.options:  # a pipeline is planned with a batch
        training["nothing at all"] = one(site, none, none)
    for name, loader in training.items():
        trainer = site.trainer(use_distributed_sampler=False, max_epochs=3)
        with pytest.raises(ValueError, match="replica|planned") as error:
            trainer.fit(Several(), loader)
        found[name] = str(error.value)
    evaluation = {"empty stream": one(site, none, some), "empty data": one(site, Samples(0), Samples(FEW))}
    for stage in ("validate", "test", "predict"):
        loaders = (
            dict(evaluation)
            if stage == "predict"
            else {**evaluation, "second": [one(site, some, some), one(site, none, some)]}
        )
        for name, loader in loaders.items():
            with pytest.raises(ValueError, match="replica") as error:
                getattr(site.trainer(use_distributed_sampler=False), stage)(Several(), loader)
            found[f"{stage}, {name}"] = str(error.value)
    with pytest.raises(ValueError, match="replica") as error:
        site.trainer().validate(Several(odd=True), one(site, some, some))
    return {**found, "metric": str(error.value)}


NONE = "data has no batch on replica 1 of 2; give each at least one batch"
TEXTS = {
    "empty stream": f"the training {NONE}",
    "empty data": f"the training {NONE}",
    "empty later": "the training data has no batch 1 of this epoch on replica 1 of 2; give every replica the same "
    "number of batches, at least one",
    "shorter than announced": "the training data has no batch 3 of this epoch on replica 1 of 2; give every replica "
    "the same number of batches, for example limit_train_batches=2",
    "a batch that is None": "batch 3 of this epoch is None on some replicas, which would leave its step out alone; let "
    "the data give a batch to each replica, or None to all",
    "nothing at all": "the training data has no batch, but how to share the steps is planned with its first one",
    "validate, empty stream": f"the validation {NONE}",
    "validate, empty data": f"the validation {NONE}",
    "validate, second": "validation dataloader 1 has no batch on replica 1 of 2; give each at least one batch",
    "test, empty stream": f"the test {NONE}",
    "test, empty data": f"the test {NONE}",
    "test, second": "test dataloader 1 has no batch on replica 1 of 2; give each at least one batch",
    "predict, empty stream": f"the prediction {NONE}",
    "predict, empty data": f"the prediction {NONE}",
    "metric": "validation_step logs the metric 'metric' on some replicas only, but all must compute it together",
}
LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [((1, 2, 2), {}), ((1, 1, 2), {"zero_stage": 3})]


@pytest.mark.parametrize(("layout", "options"), LAYOUTS, ids=["pipeline", "zero3"])
def test_missing_batches_are_told_on_every_rank(ranks: Ranks, layout: Layout, options: dict[str, Any]) -> None:
    found = ranks(layout[1] * 2, observe, refused, layout, options, launch="lightning")
    expected = dict(TEXTS)
    if layout[1] == 1:  # no batch is looked at before the first step
        expected["empty stream"] = TEXTS["empty later"]
        del expected["nothing at all"]
    assert found == [expected] * len(found)


def uneven(site: Site) -> Any:
    """Replicas take 4 and 2 steps of the same samples that one process takes, in streams among other dataloaders."""
    streams = [one(site, Stream(range(FEW)), Stream(range(FEW, COUNT))) for _ in range(2)]
    if site.layout is None:
        streams = [DataLoader(Stream(range(COUNT)), batch_size=2) for _ in range(2)]
    loaders = [streams[0], site.loader(Samples(8), 4), streams[1]]
    found: list[Any] = []
    for stage in ("validate", "test"):
        trainer = site.trainer()
        module = Several()
        found += getattr(trainer, stage)(module, loaders, verbose=False)
        found += getattr(trainer, stage)(module, streams[0], verbose=False)
    predicted = site.trainer().predict(Several(), streams[0])
    assert predicted is not None
    counts = [len(predicted)] if site.layout is None else [2 if is_last(site) else 4]
    assert [len(predicted)] == counts
    return found


@pytest.mark.parametrize(("layout", "options"), LAYOUTS, ids=["pipeline", "zero3"])
def test_evaluation_adds_up_what_unequal_replicas_saw(ranks: Ranks, layout: Layout, options: dict[str, Any]) -> None:
    check(ranks, uneven, layout, **options)
    assert len(reference(uneven)) == 8
    assert all(torch.isfinite(torch.tensor(value)) for entry in reference(uneven) for value in entry.values())
