"""A resumable training run on any layout, the checkpoints that it leaves, and the comparison of checkpoint files."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.glue.oracle import PLAN, Layout, Site, assert_same, weights
from tests.glue.training import GPT, Layer, Record, Tokens
from tests.harness import Ranks

OPTIONS: dict[str, Any] = {"plan": "auto", "micro_batches": 2}
EPOCHS, BATCHES, WINDOW = 2, 4, 2
"""Two epochs of four batches, two of which make an optimizer step."""
KINDS = ("middle", "window", "epoch")
"""Saved after the second batch, after the third (inside an accumulation window), and at the end of the first epoch."""


class ResumableLoader(DataLoader[Any]):
    """Continues after the batch at which it was saved, as Lightning's loops ask of a loader with a state."""

    position = 0
    start = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        first, self.start = self.start, 0
        self.position = first
        for index, batch in enumerate(super().__iter__()):
            if index >= first:
                self.position = index + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


class DropLayer(Layer):
    """A layer with dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


class TiedGPT(GPT):
    """Tied head, parameter groups, a parameter without state, a buffer that training changes, a schedule."""

    def __init__(self, optimizer: str = "adamw", dropout: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.head.weight = self.tok.weight
        self.never_used = torch.nn.LayerNorm(3)
        self.register_buffer("seen", torch.zeros(()))
        if dropout:
            for layer in self.layers:
                layer.__class__ = DropLayer

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.get_buffer("seen").add_(1)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 2e-2},
        ]
        optimizer: torch.optim.Optimizer
        if self.hparams["optimizer"] == "adagrad":
            optimizer = torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1)
        elif self.hparams["optimizer"] == "sgd":
            optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * BATCHES // WINDOW)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveAt(Callback):
    """Saves `<name>.ckpt` into a folder after the given (epoch, batch), or after an epoch where the batch is None."""

    def __init__(self, folder: Path, points: Mapping[tuple[int, int | None], str]) -> None:
        self.folder, self.points = folder, points

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._save(trainer, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._save(trainer, None)

    def _save(self, trainer: Trainer, batch_idx: int | None) -> None:
        name = self.points.get((trainer.current_epoch, batch_idx))
        if name is not None:
            trainer.save_checkpoint(self.folder / f"{name}.ckpt")


def train(site: Site, folder: Path, model: TiedGPT, source: Path | None = None, saves: bool = True) -> dict[str, Any]:
    """Trains to the end, from the start or from a checkpoint; leaves `final.ckpt` in the folder."""
    torch.manual_seed(5)
    record = Record()
    callbacks: list[Callback] = [record]
    if saves:
        callbacks.append(SaveAt(folder, {(0, 1): "middle", (0, 2): "window", (0, None): "epoch"}))
    trainer = site.trainer(max_epochs=EPOCHS, accumulate_grad_batches=WINDOW, callbacks=callbacks)
    loader = ResumableLoader(Tokens(4 * BATCHES), batch_size=4 // site.replicas)
    trainer.fit(model, loader, ckpt_path=source)
    trainer.save_checkpoint(folder / "final.ckpt")
    return {"batches": record.batches, "steps": trainer.global_step, "weights": weights(model)}


def on_layout(
    ranks: Ranks, layout: Layout | None, function: Any, *args: Any, timeout: float = 60, **options: Any
) -> list[Any]:
    """Results of `function(site, *args)` on every rank of a layout, or in this process for a plain run."""
    if layout is None:
        return [function(Site(), *args)]
    options = {**OPTIONS, **options}
    return ranks(math.prod(layout), _on_rank, function, layout, args, options, launch="lightning", timeout=timeout)


def _on_rank(
    rank: int, world_size: int, function: Any, layout: Layout, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    return function(Site(layout, rank, options), *args)


def run_both(ranks: Ranks, layout: Layout, folder: Path, function: Any, *args: Any, **options: Any) -> list[str]:
    """Runs a scenario with the oracle's `Net` plainly and on a layout: equal results on every rank, equal files.

    Args:
        ranks: the fixture.
        layout: (tensor, pipeline, data).
        folder: an empty folder; each run gets one of its own in it.
        function: called as `function(site, folder, *args)`.
        *args: see there.
        **options: of the strategy.

    Returns:
        Names of the files that the layout's run left; those of the plain run are the same.
    """
    plain, split = folder / "plain", folder / "split"
    plain.mkdir()
    split.mkdir()
    expected = on_layout(ranks, None, function, plain, *args)[0]
    for rank, found in enumerate(on_layout(ranks, layout, function, split, *args, **{"plan": PLAN, **options})):
        assert_same(found, expected, f"rank {rank} of {layout}")
    names = sorted(str(path.relative_to(split)) for path in split.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(plain)) for path in plain.rglob("*") if path.is_file())
    for name in names:
        assert_same_file(split / name, plain / name, folders=(split, plain))
    return names


# ------------------------------------------------------------------------------------------------ files
def read(path: Path) -> dict[str, Any]:
    """A checkpoint, by torch alone and without running any code in it."""
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


def assert_same_file(
    found: Path, expected: Path, atol: float = 1e-5, folders: tuple[Path, Path] = (Path("-"), Path("-"))
) -> None:
    """The two files hold the same, in the same order, with the same types, shapes and sharing of memory.

    Paths in them may differ in the two `folders`.
    """
    one, other = _relative(read(found), folders[0]), _relative(read(expected), folders[1])
    assert_same(one, other, found.name, atol)
    assert _types(one) == _types(other)
    assert getattr(one["state_dict"], "_metadata", None) == getattr(other["state_dict"], "_metadata", None)
    assert _ties(one["state_dict"]) == _ties(other["state_dict"])


def _relative(tree: Any, folder: Path) -> Any:
    if isinstance(tree, str):
        return tree.replace(str(folder), ".")
    if isinstance(tree, OrderedDict):
        return tree
    if isinstance(tree, dict):
        return {_relative(key, folder): _relative(value, folder) for key, value in tree.items()}
    return [_relative(value, folder) for value in tree] if isinstance(tree, list) else tree


def _types(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return type(tree).__name__, {key: _types(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree).__name__, [_types(value) for value in tree]
    return (type(tree).__name__, tree.device.type) if isinstance(tree, torch.Tensor) else type(tree).__name__


def _ties(state: Mapping[str, torch.Tensor]) -> list[str]:
    first: dict[int, str] = {}
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return [first.setdefault(value.data_ptr(), name) for name, value in tensors.items()]
