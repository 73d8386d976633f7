"""Faults that users of other frameworks met in training, as cases with known numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.glue.oracle import Layout, Site, check, observe
from tests.glue.training import Notes
from tests.harness import Ranks

BLOCKS: dict[str, Any] = {"blocks": "blocks.*", "micro_batches": 4}


class Numbers(Dataset[torch.Tensor]):
    """The numbers first, first + 1, ..., each `repeat` times."""

    def __init__(self, count: int, first: int = 1, repeat: int = 1) -> None:
        self.count, self.first, self.repeat = count, first, repeat

    def __len__(self) -> int:
        return self.count * self.repeat

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.first + index // self.repeat)])


class Times(nn.Module):
    """Multiplies by a weight that starts at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Scalar(LightningModule):
    """One weight, then a block that hands its input on; the loss is the mean of the output."""

    def __init__(self, rate: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Times(), nn.Identity()])
        self.rate = rate

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch
        for block in self.blocks:
            x = block(x)
        loss = x.mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Steps(Callback):
    """The weight, the gradients, the rates and the counts as training goes on."""

    def __init__(self) -> None:
        self.after_batch: list[Any] = []
        self.gradients: list[float] = []
        self.validated: list[int] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        self.gradients += [float(p.grad) for p in module.parameters() if p.grad is not None]

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.after_batch.append((batch_idx, trainer.global_step, float(rate), float(outputs["loss"])))

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.validated.append(trainer.global_step)


# ------------------------------------------------------------------------------------------------ F9
def accumulate(site: Site) -> Any:
    steps, module = Steps(), Scalar()
    trainer = site.trainer(callbacks=[steps], max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, site.loader(Numbers(16), 8))
    return float(module.blocks[0].weight), steps.gradients  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 2, 2), (1, 1, 2)])
def test_f9_accumulation_does_not_rescale_what_was_accumulated(ranks: Ranks, layout: Layout) -> None:
    found = ranks(math.prod(layout), observe, accumulate, layout, {**BLOCKS, "plan": "auto"}, launch="lightning")
    for rank, (weight, gradients) in enumerate(found):
        assert weight == pytest.approx(-7.5)
        assert gradients == [pytest.approx(8.5)], f"rank {rank}"


# ------------------------------------------------------------------------------------------------ F15
class Ragged(Dataset[Any]):
    """Four samples of 3, 5, 2 and 4 entries, padded by 0; every entry is the number of the sample."""

    lengths = (3, 5, 2, 4)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        length = self.lengths[index % 4]
        return torch.nn.functional.pad(torch.full((length, 1), float(index)), (0, 0, 0, 5 - length)), length, index


def as_dict(samples: list[Any]) -> Any:
    x, lengths, ids = zip(*samples, strict=True)
    names = [f"sample {i}" for i in ids]
    return {
        "title": "four samples",
        "name": names,
        "x": torch.stack(x),
        "size": torch.tensor(lengths),
        "id": torch.tensor(ids),
    }


def as_tuple(samples: list[Any]) -> Any:
    batch = as_dict(samples)
    return batch["x"], batch["id"], batch["size"], batch["name"], batch["title"]


def as_nested(samples: list[Any]) -> Any:
    batch = as_dict(samples)
    return [["four", batch["title"]], {"in": [batch["x"], {"size": batch["size"]}]}, (batch["id"], batch["name"])]


class Pairs(LightningModule):
    """Notes which input met which label; the loss is 0 when they belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Times() for _ in range(2))
        self.notes = Notes()

    def parts(self, batch: Any) -> tuple[torch.Tensor, Any, torch.Tensor, Any, str]:
        if isinstance(batch, dict):
            return batch["x"], batch["id"], batch["size"], batch["name"], batch["title"]
        if len(batch) == 5:
            return batch
        return batch[1]["in"][0], batch[2][0], batch[1]["in"][1]["size"], batch[2][1], batch[0][1]

    def forward(self, x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        x = x[:, : int(size.max())]
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, ids, size, names, title = self.parts(batch)
        out = self(x, size)
        kept = torch.arange(out.shape[1]) < size[:, None]
        assert title == "four samples"
        self.notes.add("shape", tuple(out.shape))
        for row, label, name in zip(out, ids.tolist(), names, strict=True):
            self.notes.add("pair", (float(row[0, 0]), label, name))
        loss = ((out[:, :, 0] - ids[:, None]).abs() * kept).sum()
        self.log("loss", loss, reduce_fx="max", on_step=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        x, nothing = batch
        assert nothing is None
        return self(x, torch.tensor([5]))[:, 0, 0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def without_labels(samples: list[Any]) -> Any:
    return as_dict(samples)["x"], None


def pairs(site: Site) -> Any:
    seen = []
    for collate in (as_dict, as_tuple, as_nested):
        module = Pairs()
        trainer = site.trainer(max_epochs=1)
        trainer.fit(module, DataLoader(Ragged(), 4, collate_fn=collate))
        seen.append((module.notes.entries, float(trainer.callback_metrics["loss"])))
    predicted = trainer.predict(module, DataLoader(Ragged(), 4, collate_fn=without_labels))
    assert predicted is not None
    return seen, torch.cat(predicted).tolist()  # type: ignore[arg-type]


def test_f15_outputs_meet_the_labels_of_their_own_micro_batch(ranks: Ranks) -> None:
    options = {**BLOCKS, "evaluation_micro_batches": 4}
    found = ranks(2, observe, pairs, (1, 2, 1), options, launch="lightning")
    for seen, predicted in found:
        assert [loss for _, loss in seen] == [0.0] * 3
        assert predicted == [float(i) for i in range(8)]
    for entries, _ in found[-1][0]:
        assert entries["pair"] == [(float(i), i, f"sample {i}") for i in range(8)]
        assert entries["shape"] == [(1, length, 1) for length in (3, 5, 2, 4)] * 2


# ------------------------------------------------------------------------------------------------ F26
def windows(site: Site) -> Any:
    """Five batches of four equal numbers per epoch, two batches per step."""
    steps, module = Steps(), Scalar()
    trainer = site.trainer(callbacks=[steps], accumulate_grad_batches=2)
    trainer.fit(module, site.loader(Numbers(5, repeat=4), 4))
    assert trainer.global_step == 6
    assert [step for _, step, _, _ in steps.after_batch] == [0, 1, 1, 2, 3, 3, 4, 4, 5, 6]
    return float(module.blocks[0].weight), steps.after_batch  # type: ignore[arg-type]


def limits(site: Site) -> Any:
    """Step limits and validation intervals count batches and steps, never micro-batches."""
    steps, module = Steps(), Validated()
    trainer = site.trainer(
        callbacks=[steps],
        accumulate_grad_batches=2,
        max_steps=4,
        max_epochs=-1,
        val_check_interval=2,
        log_every_n_steps=2,
    )
    trainer.fit(module, site.loader(Numbers(5, repeat=4), 4), site.loader(Numbers(4), 4))
    return (
        trainer.global_step,
        trainer.current_epoch,
        trainer.estimated_stepping_batches,
        steps.after_batch,
        steps.validated,
    )


class Validated(Scalar):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch
        for block in self.blocks:
            x = block(x)
        self.log("val_loss", x.mean())


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 1, 2), (1, 2, 2)])
def test_f26_micro_batches_leave_windows_and_counts_alone(ranks: Ranks, layout: Layout) -> None:
    check(ranks, windows, layout, **BLOCKS)
    check(ranks, limits, layout, **BLOCKS)


def tail(site: Site) -> Any:
    steps = Steps()
    trainer = site.trainer(callbacks=[steps], max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Scalar(rate=0.0), site.loader(Numbers(5, repeat=4), 4))
    return steps.gradients


def test_f26_the_tail_keeps_lightnings_convention(ranks: Ranks) -> None:
    for gradients in ranks(2, observe, tail, (1, 2, 1), BLOCKS, launch="lightning"):
        assert gradients == [1.5, 3.5, 2.5]
