"""Callbacks that choose sizes, in one process: what they set, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_parallel.callbacks import (
    ChinchillaSizer,
    ComputeBudget,
    MicroBatchSizer,
    ScalingLawRecorder,
    ScalingMonitor,
    count_tokens,
)
from lightning_parallel.callbacks.counting import BatchCounter
from lightning_parallel.scaling.plan import SizingGoal, suggestion
from lightning_parallel.scaling.shapes import AspectRule
from tests.glue.oracle import QUIET

LENGTH, VOCABULARY = 8, 16
RULE = AspectRule(aspect=8, head_size=4)


class Sized(LightningModule):
    """Builds its layers when it is told how many."""

    def __init__(self, layers: int = 0, width: int = 0, heads: int = 0, most: int = 10**6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = 4
        self.net: nn.Sequential | None = None
        self.sizes: list[int] = []

    def configure_model(self) -> None:
        if self.net is None:
            width = self.hparams["width"]
            blocks = (nn.Linear(width, width) for _ in range(self.hparams["layers"]))
            self.net = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch))
        if len(batch) > self.hparams["most"]:
            raise torch.OutOfMemoryError("CUDA out of memory (said by the test)")
        assert self.net is not None
        loss = nn.functional.cross_entropy(self.net(batch).flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(64 * LENGTH).view(64, LENGTH) % VOCABULARY, batch_size=self.batch_size)


def trainer(*callbacks: Any, **kwargs: Any) -> Trainer:
    return Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **{**QUIET, **kwargs})


def parameters(layers: int) -> int:
    width = 8 * layers
    return 2 * VOCABULARY * width + VOCABULARY + layers * (width * width + width)


def test_a_budget_sizes_the_model_and_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    goal = SizingGoal(flops=2e7, law="twenty")
    sizer = ChinchillaSizer(goal, 4 * LENGTH, rule=RULE)
    module = Sized()
    run = trainer(sizer)
    run.fit(module)
    # The nearest of all depths to the optimal size, counted on the model itself.
    best = min(range(1, 20), key=lambda layers: abs(torch.tensor(parameters(layers) / goal.params()).log()))
    assert module.hparams["layers"] == best
    assert module.hparams["width"] == 8 * best
    assert module.hparams["heads"] == 2 * best
    assert sum(p.numel() for p in module.parameters()) == parameters(best)
    steps = int(2e7 / 6 / parameters(best) / (4 * LENGTH))
    assert run.global_step == steps == sizer.plan.steps  # type: ignore[union-attr]
    assert sizer.suggestion == suggestion(sizer.plan.flops)  # type: ignore[union-attr]
    assert ChinchillaSizer(goal, 1).suggestion is None
    run.save_checkpoint("end.ckpt")
    assert Sized.load_from_checkpoint("end.ckpt", weights_only=False).hparams["layers"] == best
    # The same goal resumes at its end; another one is refused.
    again = trainer(ChinchillaSizer(goal, 4 * LENGTH, rule=RULE))
    again.fit(Sized(), ckpt_path="end.ckpt")
    assert again.global_step == steps
    other = trainer(ChinchillaSizer(goal, 2 * LENGTH, rule=RULE))
    with pytest.raises(ValueError, match="the checkpoint was sized as .* use the goal and tokens_per_step"):
        other.fit(Sized(), ckpt_path="end.ckpt")


def test_a_fixed_model_gets_only_its_tokens() -> None:
    module = Sized(2, 16, 4)
    module.configure_model()
    sizer = ChinchillaSizer(SizingGoal(flops=6.0 * parameters(2) * 320), 4 * LENGTH, resize=False)
    run = trainer(sizer)
    run.fit(module)
    assert run.global_step == 10
    assert sizer.chosen == {}


def test_a_function_of_ones_own_chooses_the_shape() -> None:
    asked: list[float] = []

    def rule(params: float) -> dict[str, int]:
        asked.append(params)
        return {"layers": 3, "width": 8}

    module = Sized()
    goal = SizingGoal(tokens=4 * LENGTH * 2, law="twenty")
    trainer(ChinchillaSizer(goal, 4 * LENGTH, rule=rule)).fit(module)
    assert (module.hparams["layers"], module.hparams["width"]) == (3, 8)
    assert asked == [goal.params()]


def three_layers(params: float) -> dict[str, int]:
    return {"layers": 3, "width": 8}


class Manual(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Nameless(Sized):
    """No hyperparameters."""

    def __init__(self) -> None:
        LightningModule.__init__(self)


def built() -> Sized:
    module = Sized(1, 8, 1)
    module.configure_model()
    return module


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (built, {}, r"builds its layers in __init__, .* in configure_model\(\) from self.hparams"),
        (Manual, {}, r"with manual optimization every optimizer.step\(\) counts"),
        (Nameless, {}, "Nameless has no hyperparameters layers, width, heads; call save_hyperparameters"),
        (Sized, {"max_steps": 5}, "the Trainer has max_steps=5, but .* leave max_steps out"),
    ],
)
def test_what_cannot_be_sized_is_refused(module: Any, options: dict[str, Any], message: str) -> None:
    run = trainer(ChinchillaSizer(SizingGoal(flops=1e7), 4 * LENGTH, rule=RULE), **options)
    with pytest.raises(ValueError, match=message):
        run.fit(module())


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="tokens_per_step=0 must be a whole number"):
        ChinchillaSizer(SizingGoal(flops=1e18), 0)
    with pytest.raises(ValueError, match="may rename layers, width, heads only"):
        ChinchillaSizer(SizingGoal(flops=1e18), 1, names={"depth": "layers"})
    with pytest.raises(ValueError, match="flops=-1 is not within"):
        ComputeBudget(-1)
    with pytest.raises(ValueError, match=r"params=0 is not within 1 .. 1e\+20"):
        ScalingLawRecorder("runs.csv", params=0)
    with pytest.raises(ValueError, match="limit=0 must be a whole number of at least 1"):
        MicroBatchSizer(limit=0)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (torch.zeros(2, 5, dtype=torch.long), 10),
        ((torch.zeros(2, 5, dtype=torch.long), torch.zeros(2)), 10),
        ({"labels": torch.zeros(3, 4, dtype=torch.long), "input_ids": torch.zeros(2, 4, dtype=torch.int)}, 8),
    ],
)
def test_tokens_of_usual_batches(batch: Any, tokens: int) -> None:
    assert count_tokens(batch) == tokens


@pytest.mark.parametrize("batch", [torch.zeros(2, 3), [], {"x": torch.zeros(2, 2, dtype=torch.long)}, "text"])
def test_batches_without_visible_tokens_need_a_function(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot tell the number of tokens of a batch .* pass a function"):
        count_tokens(batch)


def test_a_skipped_batch_does_not_count() -> None:
    counter, run = BatchCounter(1, len), trainer()
    counter.begin("abc")
    counter.begin("abcde")
    counter.finish()
    counter.begin("ab")
    assert counter.take(run)[0] == 7
    counter.finish()
    assert counter.take(run)[0] == 0
    with pytest.raises(ValueError, match="tokens_fn returned 1.5"):
        BatchCounter(1, lambda batch: 1.5).begin("a")  # type: ignore[arg-type, return-value]


class FSDPStrategy(SingleDeviceStrategy):
    """Named like the one that keeps flat shards."""


class Unforeseen(Sized):
    """Needs to know where it runs when its layers are built."""

    def configure_model(self) -> None:
        assert torch.get_default_device().type == "cpu", "not a device to compute on"
        super().configure_model()


class DerivedStrategy(FSDPStrategy):
    """A class of the user's own."""


def test_flat_shards_are_counted_before_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_parallel.callbacks.counting.whole_size", None)  # could only count shards
    sizer = ChinchillaSizer(SizingGoal(flops=1e7), 4 * LENGTH, rule=three_layers)
    for module in (built(), Sized()):
        budget = ComputeBudget(1e9)
        callbacks = (budget, sizer) if module.net is None else (budget,)
        trainer(*callbacks, strategy=DerivedStrategy("cpu"), limit_train_batches=2, max_epochs=1).fit(module)
        assert module.net is not None
        assert budget.spent == 6 * sum(p.numel() for p in module.parameters()) * budget.tokens > 0
    with pytest.raises(
        ValueError,
        match=r"(?s)on the meta device .* fails .not a device to compute on.*; pass params= or flops_per_token=",
    ):
        trainer(ComputeBudget(1e9), strategy=FSDPStrategy("cpu")).fit(Unforeseen(1, 8, 1))


def test_shared_models_are_not_tried_on_one_rank() -> None:
    with pytest.raises(ValueError, match="with FSDPStrategy several ranks share one copy .* accumulate_grad_batches"):
        trainer(MicroBatchSizer(), strategy=FSDPStrategy("cpu")).fit(built())


def test_a_budget_below_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="the first optimizer step spent .* or a budget of at least"):
        trainer(ComputeBudget(1e6, flops_per_token=1e6)).fit(built())


class Stream(IterableDataset[torch.Tensor]):
    """Nobody knows how many samples it has: eleven."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(11 * LENGTH).view(11, LENGTH) % VOCABULARY)


def test_data_without_a_size_are_counted_and_judged_by_what_was_seen() -> None:
    budget, monitor = ComputeBudget(1e9), ScalingMonitor()
    module = built()
    trainer(budget, monitor, max_epochs=1, log_every_n_steps=1).fit(module, DataLoader(Stream(), batch_size=4))
    assert budget.tokens == monitor.tokens == 11 * LENGTH
    assert monitor.outlook is not None
    assert (monitor.outlook.now.verdict, monitor.outlook.final) == ("undertrained", None)
    # A budget that ends within an epoch is not exceeded by the step after the short last batch.
    exact = ComputeBudget(1e6 * (11 + 3.5) * LENGTH, flops_per_token=1e6)
    trainer(exact, max_epochs=5).fit(built(), DataLoader(Stream(), batch_size=4))
    assert exact.tokens == 11 * LENGTH
    sized = ChinchillaSizer(SizingGoal(tokens=5 * 4 * LENGTH), 4 * LENGTH, resize=False)
    run = trainer(sized)
    run.fit(built(), DataLoader(Stream(), batch_size=4))
    assert run.global_step == 5


def test_a_loss_that_was_not_logged_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="loss='val_loss' was not logged, only loss; log it or name one of these"):
        trainer(ScalingLawRecorder(tmp_path / "runs.csv"), max_steps=1).fit(built())
    assert not (tmp_path / "runs.csv").exists()


def test_a_run_that_diverged_is_not_recorded(tmp_path: Path) -> None:
    class Diverged(Sized):
        def on_train_epoch_end(self) -> None:
            self.log("val_loss", torch.tensor(float("nan")))

    module = Diverged(1, 8, 1)
    with pytest.raises(ValueError, match="loss='val_loss' ended at nan, which no law describes; not recorded"):
        trainer(ScalingLawRecorder(tmp_path / "runs.csv"), max_steps=1).fit(module)
    assert not (tmp_path / "runs.csv").exists()


def test_the_largest_batch_that_fits_keeps_the_global_one() -> None:
    module = Sized(1, 8, 1, most=5)
    module.batch_size = 8
    sizer = MicroBatchSizer()
    run = trainer(sizer, accumulate_grad_batches=2, max_epochs=1)
    run.fit(module)
    assert sizer.micro_batch == 4
    assert run.global_step == 64 // 16
    # Trials ran on copies; training itself saw only batches of the size found.
    assert module.sizes == [4] * 16
    # Batch size and accumulation are those of the user again, so that another run has the same global batch.
    assert (module.batch_size, run.accumulate_grad_batches) == (8, 2)
    sizer.load_state_dict({"micro_batch": 4})
    with pytest.raises(ValueError, match=r"counts micro-batches of 2, now 4 fit; .*MicroBatchSizer\(limit=2\)"):
        sizer.load_state_dict({"micro_batch": 2})


def test_a_limit_is_kept() -> None:
    module = Sized(1, 8, 1)
    sizer = MicroBatchSizer(limit=3)
    run = trainer(sizer, max_steps=0)
    torch.manual_seed(1)
    run.fit(module)
    after = torch.random.get_rng_state()
    assert sizer.micro_batch == 2
    # Trials draw random numbers of their own.
    assert module.sizes == []
    torch.manual_seed(1)
    trainer(max_steps=0).fit(Sized(1, 8, 1))
    assert torch.equal(torch.random.get_rng_state(), after)


def test_batches_that_cannot_be_sized_are_refused() -> None:
    with pytest.raises(ValueError, match="not even one sample fits"):
        trainer(MicroBatchSizer(), max_steps=1).fit(Sized(1, 8, 1, most=0))
    module = Sized(1, 8, 1)
    del module.batch_size
    with pytest.raises(ValueError, match="neither the module nor a datamodule has an attribute batch_size"):
        trainer(MicroBatchSizer(), max_steps=1).fit(module)
    given = Sized(1, 8, 1)
    with pytest.raises(ValueError, match=r"a DataLoader passed to fit\(\) cannot be changed; leave it out"):
        trainer(MicroBatchSizer(), max_steps=1).fit(given, given.train_dataloader())
    with pytest.raises(ValueError, match="GradientAccumulationScheduler and MicroBatchSizer both set"):
        trainer(MicroBatchSizer(), GradientAccumulationScheduler({0: 2}), max_steps=1).fit(Sized(1, 8, 1))


class Broken(Sized):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise RuntimeError("a fault of the model")


def test_other_faults_of_a_trial_are_not_taken_for_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="a fault of the model"):
        trainer(MicroBatchSizer(), max_steps=1).fit(Broken(1, 8, 1))
