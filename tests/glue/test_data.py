"""Which samples each rank of a layout sees, and what hooks see of gradients and weights, against one plain process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import grad_norm
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler

from tests.glue.oracle import LAYOUTS, Classifier, Layout, Samples, Site, check, observe, weights
from tests.harness import Ranks

F20 = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)]
COUNT = 16


class Recording(Classifier):
    """Remembers the samples of every batch, per epoch, in a hook that runs on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: dict[int, list[int]] = {}
        self.tested: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.epochs.setdefault(self.current_epoch, []).extend(batch["id"].tolist())

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tested.extend(batch["id"].tolist())


def seen_samples(site: Site) -> Any:
    found = {}
    for shuffle in (False, True):
        module = Recording()
        trainer = site.trainer()
        trainer.fit(module, site.loader(Samples(COUNT), 4, shuffle=shuffle))
        found["shuffled" if shuffle else "in order"] = module.epochs
    return found


@pytest.mark.parametrize("layout", F20, ids=str)
def test_f20_replicas_divide_the_samples_and_ranks_of_a_replica_share_them(ranks: Ranks, layout: Layout) -> None:
    tensor, pipeline, data = layout
    found = ranks(math.prod(layout), observe, seen_samples, layout, {}, launch="lightning")
    replicas: dict[int, list[Any]] = {}
    for rank, seen in enumerate(found):
        replicas.setdefault(rank // tensor % data, []).append(seen)
    for members in replicas.values():
        assert all(seen == members[0] for seen in members)
    for epoch in (0, 1):
        ordered = [members[0]["in order"][epoch] for members in replicas.values()]
        assert ordered == [list(range(r, COUNT, data)) for r in range(data)]
        shuffled = [members[0]["shuffled"][epoch] for members in replicas.values()]
        assert sorted(sum(shuffled, [])) == list(range(COUNT))
    first = [members[0]["shuffled"][0] for members in replicas.values()]
    second = [members[0]["shuffled"][1] for members in replicas.values()]
    assert first != second
    assert first != ordered


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT - 1, self.first - 1, -1))

    def __len__(self) -> int:
        return COUNT - self.first


class Stream(IterableDataset[Any]):
    """An odd number of samples without a length; replicas take turns because the user says so."""

    def __init__(self, start: int, step: int) -> None:
        self.start, self.step = start, step

    def __iter__(self) -> Iterator[Any]:
        samples = Samples(COUNT - 1)
        return (samples[index] for index in range(self.start, len(samples), self.step))


def replica(site: Site) -> int:
    return 0 if site.layout is None else site.rank // site.layout[0] % site.layout[2]


def own_sampler(site: Site) -> Any:
    """The second one has a generator, which nobody but the run may use."""
    found = []
    for sampler in (
        Backwards(),
        WeightedRandomSampler([1.0] * COUNT, COUNT, generator=torch.Generator().manual_seed(3)),
    ):
        module = Classifier()
        site.trainer().fit(module, site.loader(Samples(COUNT), 4, sampler=sampler))
        found.append(weights(module))
    return found


def stream(site: Site) -> Any:
    module = Classifier()
    loader = DataLoader(Stream(replica(site), site.replicas), batch_size=4 // site.replicas)
    site.trainer().fit(module, loader)
    return weights(module)


def own_division(site: Site) -> Any:
    """`use_distributed_sampler=False`: nobody touches the user's loader."""
    module = Classifier()
    mine = torch.utils.data.Subset(Samples(COUNT), range(replica(site), COUNT, site.replicas))
    site.trainer(use_distributed_sampler=False).fit(module, site.loader(mine, 4))
    return weights(module)


class Validated(Recording):
    """Has two validation loaders, whose losses it returns."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("largest", batch["id"].max().float(), reduce_fx="max")


def one_dataset(site: Site) -> Any:
    """Loaders of training and validation that differ in samplers and batch sizes alone."""
    module, data = Validated(), Samples(COUNT)
    val = [site.loader(data, 8, sampler=Backwards(10)), site.loader(data, 4)]
    trainer = site.trainer(max_epochs=1)
    trainer.fit(module, site.loader(data, 4, sampler=Backwards()), val)
    counts = (trainer.num_training_batches, trainer.num_val_batches)
    return {"counts": counts, "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()}}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_samplers_and_streams_of_the_user(ranks: Ranks, layout: Layout) -> None:
    for scenario in (own_sampler, stream, own_division, one_dataset):
        check(ranks, scenario, layout)


def ends_apart(site: Site) -> list[str]:
    """Replicas with 8 and 4, and with 6 and 4 batches; in the fourth, one of them alone would step."""
    texts = []
    first = replica(site) == 0
    sized = torch.utils.data.Subset(Samples(COUNT), range(12 if first else 8))
    for data in (Stream(0 if first else 8, 1), sized):
        loader = DataLoader(data, batch_size=2)
        more: dict[str, Any] = {"use_distributed_sampler": False, "accumulate_grad_batches": 3}
        with pytest.raises(ValueError, match="ends with batch 4 of this epoch") as error:
            site.trainer(**more).fit(Classifier(), loader)
        texts.append(str(error.value))
        trainer = site.trainer(limit_train_batches=4, **more)
        trainer.fit(Classifier(), loader)
        assert trainer.global_step == 2 * 2
    return texts


def test_replicas_that_end_at_different_batches_are_told(ranks: Ranks) -> None:
    for texts in ranks(2, observe, ends_apart, (1, 1, 2), {}, launch="lightning"):
        for text in texts:
            assert text == (
                "the training data of some replicas ends with batch 4 of this epoch and that of others goes on; give "
                "every replica the same number of batches, for example limit_train_batches=4"
            )


def deals_apart(site: Site) -> str:
    """A sampler as for DDP, which divides the data among all processes, also those of one replica."""
    data = Samples(COUNT)
    loader = DataLoader(
        data, batch_size=4, sampler=DistributedSampler(data, shuffle=False, num_replicas=2, rank=site.rank)
    )
    with pytest.raises(ValueError, match="ranks of a replica must have the same samples") as error:
        site.trainer().fit(Classifier(), loader)
    module = Recording()
    trainer = site.trainer(max_epochs=1)
    fitting = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False, num_replicas=1, rank=0))
    trainer.fit(module, fitting)
    assert module.epochs == {0: list(range(COUNT))}
    return str(error.value)


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1)])
def test_a_sampler_that_deals_a_replicas_ranks_different_samples_is_refused(ranks: Ranks, layout: Layout) -> None:
    for text in ranks(2, observe, deals_apart, layout, {}, launch="lightning"):
        assert text == (
            "a sampler of the Samples divides it among 2 processes, but the 2 ranks of a replica must have the same "
            "samples; make it with **trainer.strategy.distributed_sampler_kwargs, or leave it to the trainer"
        )


class Module(LightningDataModule):
    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def train_dataloader(self) -> Any:
        self.calls.append("train")
        return self.site.loader(Samples(COUNT), 4)

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")


def data_module(site: Site) -> Any:
    data = Module(site)
    site.trainer(max_epochs=1).fit(Classifier(), datamodule=data)
    return {
        "calls": [c for c in data.calls if c != "prepare"],
        "prepared": data.calls.count("prepare") * (site.rank == 0),
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_data_module_prepares_once(ranks: Ranks, layout: Layout) -> None:
    found = ranks(math.prod(layout), observe, data_module, layout, {}, launch="lightning")
    plain = data_module(Site())
    assert [seen["calls"] for seen in found] == [plain["calls"]] * len(found)
    assert sum(seen["prepared"] for seen in found) == 1


class Watching(Classifier):
    """Reads gradients where users do."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[dict[str, float]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        by_hand = {n: float(p.grad.norm()) for n, p in self.named_parameters() if p.grad is not None}
        library = grad_norm(self, norm_type=2)
        assert math.isclose(float(library["grad_2.0_norm_total"]), math.hypot(*by_hand.values()), rel_tol=1e-4)
        self.norms.append(by_hand)


def watched(site: Site) -> Any:
    module = Watching()
    site.trainer(max_epochs=1).fit(module, site.loader(Samples(8), 4))
    return module.norms


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2)], ids=str)
def test_gradients_in_hooks_are_those_of_the_global_batch(ranks: Ranks, layout: Layout) -> None:
    check(ranks, watched, layout)
