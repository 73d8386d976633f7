"""Repeated samples of distributed samplers are cut off: over all replicas every sample counts once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from lightning_parallel.strategies.samples import SampleCounter, divides_evenly, real_samples


class Numbers(Dataset[Tensor]):
    """Samples that are their own number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


def loader(count: int, replicas: int, rank: int, batch_size: int = 2, **options: Any) -> DataLoader[Tensor]:
    data = Numbers(count)
    sampler: DistributedSampler[Tensor] = DistributedSampler(data, replicas, rank, **{"shuffle": False, **options})
    return DataLoader(data, batch_size, sampler=sampler)


def kept(counter: SampleCounter, source: DataLoader[Tensor], key: Any = 0) -> list[int]:
    """Numbers of the samples that count in one pass."""
    found = []
    for batch in source:
        part, counts = counter.keep_real(batch, source, key)
        if counts:
            found += part.tolist()
        else:
            assert part is batch, "the batch comes back whole, so that every replica runs equally many steps"
    return found


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 12, 13])
def test_every_sample_once(count: int, replicas: int, batch_size: int, shuffle: bool) -> None:
    loaders = [loader(count, replicas, rank, batch_size, shuffle=shuffle, seed=3) for rank in range(replicas)]
    counters = [SampleCounter(replicas, rank) for rank in range(replicas)]
    for _ in range(2):
        found = [kept(c, x) for c, x in zip(counters, loaders, strict=True)]
        assert sorted(n for part in found for n in part) == list(range(count))
        assert len({len(x) for x in loaders}) == 1
        for counter in counters:
            counter.start()


def test_a_batch_sampler_around_a_distributed_one() -> None:
    data = Numbers(5)
    found: list[int] = []
    for rank in range(2):
        sampler = BatchSampler(DistributedSampler(data, 2, rank, shuffle=False), 2, drop_last=False)
        found += kept(SampleCounter(2, rank), DataLoader(data, batch_sampler=sampler))
    assert sorted(found) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("key", [0, "validation"])
def test_loaders_are_counted_apart(key: Any) -> None:
    counter = SampleCounter(2, 1)
    first, second = loader(3, 2, 1), loader(5, 2, 1)
    assert kept(counter, first, key) == [1]
    assert kept(counter, second, (key, 1)) == [1, 3]
    assert kept(counter, first, key) == [], "another pass needs start()"
    counter.start()
    assert kept(counter, first, key) == [1]


def test_a_resumed_pass_counts_what_was_taken_before() -> None:
    counter = SampleCounter(2, 1)
    counter.start(taken=1)
    rest = torch.tensor([5, 0])
    assert counter.keep_real(rest, loader(7, 2, 1))[0].tolist() == [5], "the fourth sample of replica 1 is a repetition"


def test_structures_are_cut_like_batches() -> None:
    source = loader(3, 2, 1)
    batch = {"x": torch.arange(2), "names": ["a", "b"], "mask": torch.zeros(9)}
    part, counts = SampleCounter(2, 1).keep_real(batch, source)
    assert counts
    assert (part["x"].tolist(), part["names"], len(part["mask"])) == ([0], ["a"], 9)


class Stream(IterableDataset[int]):
    """Samples without a length."""

    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("source", "even"),
    [
        (object(), False),
        (None, False),
        (DataLoader(Numbers(3)), False),
        (DataLoader(Stream()), False),
        (loader(4, 2, 0), True),
        (loader(5, 2, 0, drop_last=True), True),
        (loader(5, 3, 0), False),  # the user's own division
        (DataLoader(Numbers(3), sampler=UnrepeatedDistributedSampler(SequentialSampler(Numbers(3)), 2, 0)), None),
    ],
)
def test_loaders_that_repeat_nothing(source: Any, even: bool | None) -> None:
    assert real_samples(source, 2, 0) is None
    assert even is None or divides_evenly(source, 2) == even
    batch = torch.arange(3)
    found, counts = SampleCounter(2, 1).keep_real(batch, source)
    assert found is batch
    assert counts


def test_a_loader_that_repeats() -> None:
    assert [real_samples(loader(5, 2, rank), 2, rank) for rank in (0, 1)] == [3, 2]
    assert [real_samples(loader(1, 4, rank), 4, rank) for rank in range(4)] == [1, 0, 0, 0]
    assert divides_evenly(loader(5, 2, 0), 2)


def test_one_replica_repeats_nothing() -> None:
    assert real_samples(loader(5, 1, 0), 1, 0) is None
    assert divides_evenly(object(), 1)


def test_a_batch_without_a_size_is_kept() -> None:
    assert SampleCounter(2, 1).keep_real("text", loader(3, 2, 1)) == ("text", True)
