"""Validation, test and prediction on every rank of a layout, against one plain process (fp32, 1e-5)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from tests.glue.oracle import (
    CLASSES,
    LAYOUTS,
    WIDTH,
    Classifier,
    Layout,
    Net,
    Samples,
    Site,
    check,
    set_by_formula,
    weights,
)
from tests.harness import Ranks


def numbers(metrics: Any) -> dict[str, float]:
    return {key: float(value) for key, value in sorted(metrics.items())}


class Constant(Classifier):
    """Losses of exactly 2."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        loss = loss - loss.detach() + 2.0
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = 0 * self.loss(batch) + 2.0
        self.log("val_loss", loss, on_step=True, on_epoch=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", 0 * self.loss(batch) + 2.0)


def constant_losses(site: Site) -> Any:
    found = []
    for micro_batches, evaluation_micro_batches in ((1, 1), (3, 2)):
        options = {"micro_batches": micro_batches, "evaluation_micro_batches": evaluation_micro_batches}
        here = replace(site, options=options)
        val = site.loader(Samples(11), 4)
        for accumulate in (1, 4):
            trainer = here.trainer(accumulate_grad_batches=accumulate, num_sanity_val_steps=2, max_epochs=1)
            trainer.fit(Constant(), site.loader(Samples(20), 4), val)
            found.append(numbers(trainer.callback_metrics))
        trainer = here.trainer()
        found.append(trainer.validate(Constant(), val, verbose=False))
        found.append(trainer.test(Constant(), val, verbose=False))
    assert all(abs(value - 2) < 1e-6 for part in found for one in [part] for value in flat(one)), found
    return found


def flat(tree: Any) -> list[float]:
    if isinstance(tree, dict):
        return list(tree.values())
    return [value for entry in tree for value in flat(entry)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_constant_loss_is_not_scaled_by_anything(ranks: Ranks, layout: Layout) -> None:
    check(ranks, constant_losses, layout)


class Collects(Classifier):
    """Keeps what it needs in plain Python until the end of the epoch, per dataloader."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[int, list[Any]] = defaultdict(list)
        self.right = torch.zeros(())
        self.seen: list[Any] = []

    def evaluate(self, stage: str, batch: Any, dataloader_idx: int) -> Any:
        logits = self.net(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.log(f"{stage}_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        name = f"{stage}_largest_{dataloader_idx}"
        self.log(name, logits.max(), add_dataloader_idx=False, reduce_fx="max", on_epoch=True, batch_size=3)
        if dataloader_idx == 1:
            self.log("second_only", logits.sum(), reduce_fx="sum")
        self.outputs[dataloader_idx].append({"logits": logits, "id": batch["id"]})
        self.right += (logits.argmax(-1) == batch["y"]).sum()
        return {"logits": logits, "loss": loss}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluate("val", batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluate("test", batch, dataloader_idx)

    def start(self) -> None:
        self.outputs.clear()
        self.right = torch.zeros(())

    on_validation_epoch_start = on_test_epoch_start = start

    def end(self) -> None:
        """Puts the samples of all replicas together, as a user of ddp would."""
        collected = []
        for index in range(4):
            # A replica whose only samples of a loader were repetitions of another's has collected nothing.
            own = self.outputs[index]
            ids = self.gathered(torch.cat([torch.zeros(0, dtype=torch.int64), *(entry["id"] for entry in own)]))
            logits = self.gathered(torch.cat([torch.zeros(0, CLASSES), *(entry["logits"] for entry in own)]))
            order = ids.argsort()
            collected.append((ids[order], logits[order]))
        right = self.trainer.strategy.reduce(self.right, reduce_op="sum")
        self.log("right", right)
        self.seen.append((collected, float(right)))

    on_validation_epoch_end = on_test_epoch_end = end

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Every replica's rows; they may hold different numbers of samples."""
        length = self.trainer.strategy.reduce(torch.tensor(len(rows)), reduce_op="max")
        padded = torch.cat([rows, rows.new_full((int(length) - len(rows), *rows.shape[1:]), -1)])
        mask = torch.arange(int(length)) < len(rows)
        masks = self.all_gather(mask).flatten()
        return self.all_gather(padded).reshape(-1, *rows.shape[1:])[masks]


def loaders(site: Site) -> Any:
    """Sizes that do not divide, one of them smaller than the number of replicas."""
    return [site.loader(Samples(count, first=100 * count), 4) for count in (11, 9, 1, 8)]


def several_loaders(site: Site) -> Any:
    module = Collects()
    trainer = site.trainer(max_epochs=2)
    trainer.fit(module, site.loader(Samples(20), 4), loaders(site))
    found: list[Any] = [numbers(trainer.callback_metrics), numbers(trainer.progress_bar_metrics)]
    found.append(trainer.validate(module, loaders(site), verbose=False))
    found.append(trainer.test(module, loaders(site)[0], verbose=False))
    fresh = Collects()
    trainer = site.trainer(limit_test_batches=2)
    found.append(trainer.test(fresh, loaders(site), verbose=False))
    found.append(trainer.validate(fresh, loaders(site)[1], verbose=False))
    return {"found": found, "seen": module.seen, "fresh": fresh.seen, "weights": weights(module)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_uneven_loaders_and_what_the_user_collects(ranks: Ranks, layout: Layout) -> None:
    check(ranks, several_loaders, layout)


class Stream(IterableDataset[Any]):
    """A replica's samples, without a length."""

    def __init__(self, first: int, step: int) -> None:
        self.first, self.step = first, step

    def __iter__(self) -> Iterator[Any]:
        samples = Samples(8)
        return (samples[index] for index in range(self.first, len(samples), self.step))


class Several(Classifier):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("loss", self.loss(batch))


def streams(site: Site) -> Any:
    """Anywhere among loaders with a length, also in a fit."""
    stream = site.loader(Stream(site.rank % site.replicas, site.replicas), 4)
    sized = site.loader(Samples(10), 4)
    module = Several()
    found = [
        site.trainer().validate(module, [sized, stream], verbose=False),
        site.trainer(limit_val_batches=2).validate(module, [stream, sized], verbose=False),
    ]
    (trainer := site.trainer(max_epochs=1)).fit(module, sized, [stream, sized])
    return [*found, numbers(trainer.callback_metrics)]


def test_streams_among_several_loaders(ranks: Ranks) -> None:
    check(ranks, streams, (1, 1, 2))


class Predicts(Classifier):
    """Results of every structure."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self.net(batch["x"])
        names = [f"sample {number}" for number in batch["id"].tolist()]
        kinds: list[Any] = [
            logits,
            {"logits": logits, "nested": (batch["id"], {"label": logits.argmax(-1)}), "names": names, "same": "text"},
            (batch["id"], logits.mean(), float(logits[:, 0].mean())),
            names,
        ]
        return kinds[dataloader_idx]


class WithoutBatchIndex(Classifier):
    def predict_step(self, batch: Any) -> Any:  # type: ignore[override]
        return batch["id"], self.net(batch["x"])

    def validation_step(self, batch: Any) -> None:  # type: ignore[override]
        self.log("val_loss", self.loss(batch))


def everything_predicted(site: Site) -> Any:
    found = []
    for count, loaders in ((11, 4), (9, 1), (8, 1)):
        module = Predicts()
        trainer = site.trainer()
        data = [site.loader(Samples(count, first=100 * index), 4) for index in range(loaders)]
        predictions = trainer.predict(module, data)
        found.append(ordered(site, trainer, predictions))
    module = WithoutBatchIndex()
    trainer = site.trainer(limit_predict_batches=2)
    found.append(ordered(site, trainer, trainer.predict(module, site.loader(Samples(13), 4))))
    found.append(trainer.validate(module, site.loader(Samples(6), 4), verbose=False))
    return found


def ordered(site: Site, trainer: Any, predictions: Any) -> Any:
    if site.layout is None:
        return predictions
    return trainer.strategy.gather_predictions(predictions)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sample_is_predicted_once_and_in_order(ranks: Ranks, layout: Layout) -> None:
    check(ranks, everything_predicted, layout)


class Sequences(torch.utils.data.Dataset[Any]):
    """Samples of a length, by formula."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        x = torch.sin(torch.arange(self.length * WIDTH) * 0.3 + index).view(self.length, WIDTH)
        return {"x": x, "mask": torch.arange(self.length) % 3 < 2, "y": torch.tensor(index % CLASSES)}


class TupleBlock(nn.Module):
    """Hands on a hidden state, a mask, positions and a tensor that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)
        self.journal: list[Any] = []

    def forward(self, hidden: Any, mask: Any, positions: Any, scale: Any) -> Any:
        dtypes = [str(t.dtype) for t in (hidden, mask, positions, scale)]
        needs = [t.requires_grad for t in (hidden, mask, positions, scale)]
        self.journal.append((tuple(hidden.shape), dtypes, needs))
        change = self.out(torch.tanh(self.fc(hidden))) * mask[..., None] * scale
        return hidden + change + 0.01 * positions[..., None], mask, positions + 1, scale * 0.9


class TupleNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(3))
        set_by_formula(self)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        positions = torch.arange(x.shape[1]).expand(x.shape[:2])
        state = (self.stem(x), mask, positions, torch.ones(x.shape[0], 1, 1))
        for block in self.blocks:
            state = block(*state)
        return self.head(self.norm(state[0])).mean(1)


class TupleModule(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = TupleNet()
        self.seen: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch["x"], batch["mask"]), batch["y"])

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.seen.append(outputs["loss"].detach().clone())

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"], batch["mask"])
        self.log("val_loss", F.cross_entropy(logits, batch["y"]))
        return logits

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(outputs)


def tuples_of_changing_shapes(site: Site) -> Any:
    module = TupleModule()
    trainer = site.trainer(
        max_epochs=3, precision="bf16-mixed" if site.options.get("micro_batches") == 1 else "32-true"
    )
    trainer.fit(module, site.loader(Sequences(4, 3), 4), site.loader(Sequences(5, 7), 5))
    for block in module.net.blocks:
        for shape, dtypes, needs in block.journal:
            training = shape[1] == 3
            assert training or shape == (5, 7, WIDTH)
            assert dtypes[1:] == ["torch.bool", "torch.int64", "torch.float32"]
            assert needs == [training, False, False, False]
    assert any(block.journal for block in module.net.blocks)
    return {"seen": module.seen, "weights": weights(module), "end": numbers(trainer.callback_metrics)}


def tuples_in_bf16(site: Site) -> Any:
    return tuples_of_changing_shapes(replace(site, options={**site.options, "micro_batches": 1}))


TUPLE_LAYOUTS: list[Layout] = [(1, 2, 1), (1, 3, 1), (2, 2, 1)]


@pytest.mark.parametrize("layout", TUPLE_LAYOUTS)
def test_boundary_tuples_of_any_type_change_shape_between_training_and_validation(ranks: Ranks, layout: Layout) -> None:
    check(ranks, tuples_of_changing_shapes, layout, micro_batches=2)
    if layout[0] == 1:
        check(ranks, tuples_in_bf16, layout)


def validate_and_test_around_a_fit(site: Site) -> Any:
    module = Collects()
    trainer = site.trainer(
        max_epochs=3, enable_checkpointing=True, callbacks=[ModelCheckpoint("c", monitor="val_loss")]
    )
    val = site.loader(Samples(11, first=100), 4)
    found: list[Any] = [trainer.validate(module, val, verbose=False), trainer.test(module, val, verbose=False)]
    trainer.fit(module, site.loader(Samples(20), 4), val)
    best = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    found += [trainer.validate(module, val, verbose=False), Path(best).name]
    found.append(trainer.test(module, val, ckpt_path="best", verbose=False))
    predictions = trainer.predict(module, val, ckpt_path=best)
    found += [ordered(site, trainer, predictions), weights(module)]
    found.append(site.trainer().test(Collects(), val, ckpt_path=best, verbose=False))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_validation_and_test_before_and_after_a_fit(ranks: Ranks, layout: Layout) -> None:
    check(ranks, validate_and_test_around_a_fit, layout)
