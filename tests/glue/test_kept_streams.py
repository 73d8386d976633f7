"""What an iterable dataset knows of its place is put back after a look at its first batch."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_parallel.strategies.kept_streams import KeptStreams


class Stream(IterableDataset[Any]):
    """Gives what a function makes of the place that it keeps."""

    def __init__(self, place: Any, following: Any) -> None:
        self.place = place
        self.following = following

    def __iter__(self) -> Iterator[Any]:
        for _ in range(3):
            yield self.following(self)


def count(stream: Any) -> int:
    stream.place += 1
    return int(stream.place)


def numbers(path: Path) -> Any:
    path.write_text("\n".join(map(str, range(9))))
    return path.open()


PLACES: dict[str, tuple[Any, Any]] = {
    "count": (lambda path: 0, count),
    "queue": (lambda path: deque(range(9)), lambda stream: stream.place.popleft()),
    "iterator": (lambda path: iter(range(9)), lambda stream: next(stream.place)),
    "file": (numbers, lambda stream: int(stream.place.readline())),
    "torch's generator": (
        lambda path: torch.Generator().manual_seed(1),
        lambda stream: float(torch.rand((), generator=stream.place, dtype=torch.float64)),
    ),
    "Python's generator": (lambda path: random.Random(1), lambda stream: stream.place.random()),
    "numpy's generator": (lambda path: np.random.default_rng(1), lambda stream: float(stream.place.random())),
    "numpy's old generator": (lambda path: np.random.RandomState(1), lambda stream: float(stream.place.rand())),
}


@pytest.mark.parametrize("kind", PLACES)
def test_the_place_of_a_stream_is_put_back(tmp_path: Path, kind: str) -> None:
    place, following = PLACES[kind]
    fresh = DataLoader(Stream(place(tmp_path / "fresh"), following), batch_size=2)
    expected = [batch.tolist() for batch in fresh]

    loader = DataLoader(Stream(place(tmp_path / "seen"), following), batch_size=2)
    streams = KeptStreams()
    streams.watch(loader)
    looked_at = next(iter(loader)).tolist()
    streams.put_back()

    assert looked_at == expected[0]
    assert [batch.tolist() for batch in loader] == expected
