"""Hooks read and change whole weights, gradients and buffers on every rank, as one plain process does (fp32, 1e-5)."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_summary import ModelSummary as Summary
from torch import nn
from torch.nn.utils import prune

from tests.glue.oracle import WIDTH, Block, Classifier, Layout, Samples, Site, check, observe, set_by_formula, weights
from tests.harness import Ranks, RanksFailed

SPLIT: list[Layout] = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)]
PAIRS: list[Layout] = [(2, 1, 1), (1, 2, 1)]


def fit(site: Site, module: LightningModule, **kwargs: Any) -> Trainer:
    trainer = site.trainer(**{"max_epochs": 1, **kwargs})
    trainer.fit(module, site.loader(Samples(12), 4), site.loader(Samples(4, first=30), 4))
    return trainer


# ------------------------------------------------------------------------------------------------ everything at once
class Watching(Classifier):
    """Reads where users read, clips by hand, and changes weights in place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        by_name = {n: float(p.grad.norm()) for n, p in self.named_parameters() if p.grad is not None}
        library = {name: float(value) for name, value in grad_norm(self, 2).items()}
        in_groups = sum(p.grad.pow(2).sum() for group in optimizer.param_groups for p in group["params"])
        shapes = [(tuple(p.shape), p.numel(), p.stride()) for p in self.parameters()]
        self.seen += [by_name, library, float(in_groups), shapes]

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.5)))
        self.clip_gradients(optimizer, 0.3, "norm")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-1.4, 1.4)
                p.data[0].mul_(0.99)
                p.view(-1)[-1:].add_(0.01)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.is_global_zero:  # the others serve it, and are served when they read something else
            self.seen_by_first = self.net.blocks[1].fc.weight.detach().cpu().numpy().sum()
        self.seen.append(self.net.stem.weight[1:3].tolist())
        self.log("largest", self.net.blocks[0].out.weight.detach().abs().max())


class Reader(Callback):
    """A callback of the user's."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.norm = float(nn.utils.parameters_to_vector(pl_module.parameters()).norm())


def everything(site: Site) -> Any:
    module, reader = Watching(), Reader()
    trainer = fit(site, module, max_epochs=2, callbacks=[reader])
    logged = float(trainer.callback_metrics["largest"])
    return {"seen": module.seen, "logged": logged, "state": reader.state, "norm": reader.norm, "end": weights(module)}


@pytest.mark.parametrize("layout", SPLIT, ids=str)
def test_hooks_read_and_change_the_whole_model(ranks: Ranks, layout: Layout) -> None:
    check(ranks, everything, layout)


# ------------------------------------------------------------------------------------------------ one after another
class Accumulating(Classifier):
    """Looks at gradients that are not complete yet."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_after_backward(self) -> None:
        self.norms += [float(p.grad.norm()) for p in self.parameters() if p.grad is not None]


def accumulating(site: Site) -> Any:
    module = Accumulating()
    fit(site, module, accumulate_grad_batches=2)
    return module.norms


class Replacing(Classifier):
    """Sets gradients and data, freezes, adds a group, copies and saves."""

    def on_train_start(self) -> None:
        self.average = [copy.deepcopy(self.net)]  # in a list, so that it is no part of this module

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        stem, head = self.net.stem.weight, self.net.head.weight
        assert stem.grad is not None
        assert head.grad is not None
        stem.grad = stem.grad * 0.5 + stem.detach() * 0.1
        head.grad.data[1] = 0.25
        self.net.blocks[0].fc.weight.grad = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net.blocks[2].out.weight.requires_grad_(batch_idx == 0)
        self.net.blocks[1].fc.weight.data = self.net.blocks[1].fc.weight.data.abs()
        with torch.no_grad():
            for mine, theirs in zip(self.average[0].parameters(), self.net.parameters(), strict=True):
                mine.lerp_(theirs, 0.25)

    def on_train_epoch_end(self) -> None:
        file = io.BytesIO()
        torch.save(self.net.state_dict(), file)
        file.seek(0)
        self.saved = torch.load(file)
        self.averaged = copy.deepcopy(dict(self.average[0].state_dict()))
        self.frozen = [n for n, p in self.named_parameters() if not p.requires_grad]


def replacing(site: Site) -> Any:
    module = Replacing()
    fit(site, module, max_epochs=2)
    return {"saved": module.saved, "average": module.averaged, "frozen": module.frozen, "end": weights(module.net)}


class Grouping(Classifier):
    """Trains the head from the second epoch on, with a rate of its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for n, p in self.named_parameters() if "head" not in n], lr=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": list(self.net.head.parameters()), "lr": 0.05})  # type: ignore[union-attr]


def grouping(site: Site) -> Any:
    module = Grouping()
    trainer = fit(site, module, max_epochs=3)
    sizes = [[tuple(p.shape) for p in group["params"]] for group in trainer.optimizers[0].param_groups]
    return {"weights": weights(module), "groups": [len(group) for group in sizes]}


class Normalized(LightningModule):
    """Buffers that training changes, on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4)))
        set_by_formula(self)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.blocks(batch["x"]).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append({name: buffer.float().sum().item() for name, buffer in self.named_buffers()})
        self.blocks[0][1].running_mean.mul_(0.5)  # type: ignore[operator, index, union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def normalized(site: Site) -> Any:
    module = Normalized()
    fit(site, module)
    return module.seen


SCENARIOS = [accumulating, replacing, grouping]


@pytest.mark.parametrize("layout", PAIRS, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_hooks_do_what_they_do_in_a_plain_run(ranks: Ranks, scenario: Any, layout: Layout) -> None:
    check(ranks, scenario, layout, micro_batches=1 if layout[1] == 1 else 2)


def test_buffers_of_other_stages_are_seen(ranks: Ranks) -> None:
    check(ranks, normalized, (1, 2, 1), micro_batches=1)


def summary(site: Site) -> Any:
    """Lightning's own table counts the whole model."""
    counting = Counting()
    module = Exemplary()
    fit(site, module, callbacks=[counting], enable_model_summary=True)
    return counting.counted, module.example_input_array


class Exemplary(Classifier):
    """Has an input to try it on, which no rank can do alone."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Counting(ModelSummary):
    counted: Any = None

    def _summary(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        table: Summary = super()._summary(trainer, pl_module)  # type: ignore[assignment]
        self.counted = [table.total_parameters, table.trainable_parameters, table.param_nums]
        return table


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_the_model_summary_counts_whole_parameters(ranks: Ranks, layout: Layout) -> None:
    check(ranks, summary, layout)


# ------------------------------------------------------------------------------------------------ refusals
class Keeping(Classifier):
    """Keeps a parameter that only hooks may see, and uses it in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def on_train_start(self) -> None:
        self.kept.append(self.net.head.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.kept)


class OneSided(Classifier):
    """Changes a weight on the first rank alone."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.is_global_zero:
            self.net.stem.weight.data.zero_()


class Early(Classifier):
    """Changes a gradient that is not complete."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class Inspecting(Classifier):
    """Reads the momentum of a parameter."""

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer = self.trainer.optimizers[0]
        for state in optimizer.state.values():  # all of it may be changed
            state["momentum_buffer"].mul_(0.5)
        optimizer.state_dict()


class Reshaping(Classifier):
    def on_train_batch_end(self, *args: Any) -> None:
        self.net.stem.weight.data = torch.zeros(2, 2)


class Running(Classifier):
    """Runs the model between steps, as for samples of what it has learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with pytest.raises(RuntimeError) as caught:
            self.net(batch["x"])
        self.said.append(str(caught.value))


def running(site: Site) -> Any:
    module = Running()
    fit(site, module)
    return set(module.said)


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1)])
def test_a_model_in_parts_does_not_run_in_hooks(ranks: Ranks, layout: Layout) -> None:
    """Split layers would count whole weights once per rank, without a word."""
    for texts in ranks(2, observe, running, layout, {}, launch="lightning"):
        (text,) = texts
        assert text.startswith("a hook runs ")
        assert "call it in training_step, validation_step or predict_step" in text


class Pruning(Classifier):
    """Puts another parameter and a mask where a parameter was."""

    def on_train_batch_end(self, *args: Any) -> None:
        prune.l1_unstructured(self.net.stem, "weight", 0.5)


class Growing(Classifier):
    """Gets another block, which no stage would run."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.net.blocks.append(Block())


def refused(site: Site) -> None:
    kind, kwargs = site.options["case"], site.options["trainer"]
    fit(Site(site.layout, site.rank, {"micro_batches": 2}), kind(), **kwargs)


@pytest.mark.parametrize(
    ("kind", "kwargs", "text"),
    [
        (Keeping, {}, "was kept from a hook and used outside of it"),
        (OneSided, {}, "net.stem.weight changed in a hook on some ranks only"),
        (Early, {"accumulate_grad_batches": 3}, "cannot be changed while it is still accumulating"),
        (Inspecting, {}, "an optimizer's state is divided over the ranks"),
        (
            Pruning,
            {},
            "on_train_batch_end replaced or removed the parameter net.stem.weight, of which several",
        ),
        (Growing, {}, "on_train_batch_end added the parameter net.blocks.3.fc.weight, which no stage of the pipeline"),
        (Reshaping, {}, r"data of shape \(8, 8\) cannot be replaced by a tensor of shape \(2, 2\)"),
    ],
    ids=["kept", "one-sided", "early", "state", "pruned", "grown", "reshaped"],
)
def test_what_would_go_wrong_silently_is_refused(ranks: Ranks, kind: Any, kwargs: Any, text: str) -> None:
    with pytest.raises(RanksFailed, match=text):
        ranks(2, observe, refused, (1, 2, 1), {"case": kind, "trainer": kwargs}, launch="lightning")
