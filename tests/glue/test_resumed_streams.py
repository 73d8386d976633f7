"""Streams that go on where they were: a pipeline that looks at a batch to plan its cut takes none from the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, IterableDataset

from tests.glue.oracle import Classifier, Samples, Site, check, observe, weights
from tests.harness import Ranks

ELSEWHERE: dict[str, Iterator[Any]] = {}


class Stream(IterableDataset[Any]):
    """Sixteen samples in all, of which an iterator gives what others have left."""

    def __init__(self) -> None:
        self.rest = iter(Samples(16)[number] for number in range(16))

    def __iter__(self) -> Any:
        return self.rest


class SizedStream(Stream):
    def __len__(self) -> int:
        return 16


class Elsewhere(Stream):
    """Keeps nothing itself."""

    def __init__(self) -> None:
        ELSEWHERE["rest"] = iter(Samples(16)[number] for number in range(16))

    def __iter__(self) -> Any:
        return ELSEWHERE["rest"]


class Seen(Callback):
    """The numbers of the samples of every batch; saves after the second one."""

    def __init__(self, file: Path) -> None:
        self.numbers: list[list[int]] = []
        self.file = file

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.numbers.append(batch["id"].tolist())

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.file)


def interrupted(site: Site, stream: Stream) -> Any:
    """Two steps of four samples; then a second run goes on with the checkpoint and the same stream."""
    file = Path(f"{type(stream).__name__}.ckpt").absolute()
    seen, loader = Seen(file), DataLoader(stream, 4)
    site.trainer(max_epochs=1, max_steps=2, callbacks=[seen]).fit(Classifier(), loader)
    taken = len(seen.numbers)
    resumed, module = site.trainer(max_epochs=1, callbacks=[seen]), Classifier()
    resumed.fit(module, loader, ckpt_path=file, weights_only=False)
    assert len(seen.numbers) > taken, "the second run must have a batch to lose"
    return seen.numbers, weights(module), resumed.global_step


def streams(site: Site) -> Any:
    return [interrupted(site, stream) for stream in (SizedStream(), Stream())]


def test_a_resumed_pipeline_takes_every_batch_of_a_stream(ranks: Ranks) -> None:
    check(ranks, streams, (1, 2, 1))


def refusal(site: Site) -> str:
    with pytest.raises(ValueError, match="the training data is a stream") as error:
        interrupted(site, Elsewhere())
    return str(error.value)


def test_a_stream_that_would_lose_a_batch_is_refused(ranks: Ranks) -> None:
    for text in ranks(2, observe, refusal, (1, 2, 1), {}, launch="lightning"):
        assert "did not begin again when it was set up again" in text
        assert "keep the place in attributes of the dataset" in text
