"""Every private name of Lightning, torchmetrics and the loss scaler that the package touches still exists and behaves.

A failure here names what moved in the installed version, and the file of the package that has to follow.
"""

from __future__ import annotations

import ast
import copy
import operator
import random
import signal
import tempfile
import types
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy
import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, warning_cache
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened, _set_fsdp_flattened
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassPrecision, MulticlassRecall

from lightning_parallel.layout import ParallelLayout
from lightning_parallel.mesh import Mesh
from lightning_parallel.strategies import (
    _compat,
    _compat_example,
    _compat_fsdp,
    _compat_loops,
    metric_states,
    precision,
)
from lightning_parallel.strategies.checkpoint_file import WholeFileIO
from lightning_parallel.strategies.logs import LogCall, LogRecorder
from lightning_parallel.strategies.replica_data import Batch, Logged, ReplicaData
from lightning_parallel.strategies.span import ModelSpan
from tests.harness.accelerator import lone_rank

STRATEGIES = Path(_compat.__file__).parent
VERSIONS = f"lightning {lightning.__version__}, torchmetrics {torchmetrics.__version__}, torch {torch.__version__}"

LOOPS = ["fit_loop", "fit_loop.epoch_loop.val_loop", "validate_loop", "test_loop", "predict_loop"]
METRIC = ["_update_count", "_computed", "_defaults", "_forward_cache", "_reductions", "_reduce_states", "_persistent"]
NAMES: dict[str, str] = {
    "trainer.fit_loop.epoch_loop._results": "_compat.py",
    **{f"trainer.{loop}._results": "_compat.py" for loop in LOOPS[1:4]},
    **{f"trainer.{loop}._data_source.instance": "_compat.py" for loop in LOOPS},
    **{f"trainer.{loop}._data_source.name": "_compat.py" for loop in LOOPS},
    **{f"trainer.{loop}._combined_loader": "_compat_loops.py" for loop in LOOPS},
    "trainer.fit_loop._combined_loader._mode": "_compat_example.py",
    "trainer.fit_loop._data_fetcher": "_compat_example.py",
    "trainer.fit_loop._skip_backward": "_compat_loops.py",
    "trainer._val_check_time_interval": "_compat_loops.py",
    "trainer.fit_loop.epoch_loop._should_check_val_fx": "_compat_loops.py",
    "trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor": "_compat_loops.py",
    "trainer.fit_loop.epoch_loop.val_loop._is_sequential": "_compat_loops.py",
    "trainer.fit_loop.epoch_loop.val_loop._evaluation_step": "_compat_loops.py",
    "trainer.fit_loop.epoch_loop.val_loop._store_dataloader_outputs": "_compat_loops.py",
    "trainer._logger_connector._current_fx": "_compat.py",
    "trainer._checkpoint_connector._loaded_checkpoint": "_compat.py",
    "trainer._signal_connector.received_sigterm": "_compat.py",
    "trainer._accelerator_connector.strategy": "_compat.py",
    "trainer.strategy._checkpoint_io": "_compat.py",
    "trainer.strategy._launcher": "_compat.py",
    "trainer.strategy._lightning_module": "_compat.py",
    "module._device": "_compat.py",
    "module._compiler_ctx": "_compat.py",
    "module._on_before_batch_transfer": "_compat_loops.py",
    "item._defaults": "_compat.py",
    "item.cumulated_batch_size": "_compat.py",
    "wrapper._checkpoint_io": "_compat.py",
    "wrapper._base_checkpoint_io_configured": "_compat.py",
    "logger._log_graph": "_compat.py",
    "ddp._timeout": "base.py",
    "ddp._layer_sync": "base.py",
    "ddp._start_method": "base.py",
    "ddp._reset_optimizers_and_schedulers": "tensor_pipeline.py",
    **{f"metric.{name}": "metric_states.py" for name in METRIC},
    "metric._device": "_compat.py",
    "metric._to_sync": "step_metrics.py",
    "collection._enable_compute_groups": "metric_states.py",
    "collection._groups_checked": "metric_states.py",
    "collection._compute_groups_create_state_ref": "metric_states.py",
    "scaler._per_optimizer_states": "precision.py",
    "scaler._scale": "precision.py",
    "plugin._after_closure": "precision.py",
}
"""Path from one of the roots that `roots` returns -> file that uses it."""
OURS = {"_span", "_has_gradients", "_version", "_optimizer", "_watch"}
"""Private names of the package's own classes, and of torch's tensors, in the same files."""


class Samples(Dataset[torch.Tensor]):
    """Samples that hold their number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0])


class Stream(IterableDataset[torch.Tensor]):
    """Five samples without a length, which Lightning fetches ahead."""

    def __iter__(self) -> Any:
        return iter([torch.tensor([float(i), 1.0]) for i in range(5)])


class Model(LightningModule):
    """Calls `probe(name of the step, batch)` inside its steps."""

    def __init__(self, probe: Callable[[str, Any], None] = lambda hook, batch: None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.metric = MeanMetric()
        self.probe = probe

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("train_loss", batch[:, 0].mean(), on_step=True, on_epoch=True)
        self.probe("training_step", batch)
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", batch[:, 0].mean())
        self.probe("validation_step", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", batch[:, 0].mean())
        self.probe("test_step", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.probe("predict_step", batch)
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(**options: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    chosen: dict[str, Any] = {"enable_model_summary": False, "max_epochs": 1, "devices": 1, "num_sanity_val_steps": 0}
    return Trainer(accelerator="cpu", **{**quiet, **chosen, **options})


def loader(count: int = 5, batch_size: int = 2, **options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Samples(count), batch_size, **options)


# ------------------------------------------------------------------------------------------------ names
def roots(trainer: Trainer) -> Any:
    """Live objects that hold the private names."""
    group = MetricCollection([MulticlassPrecision(3), MulticlassRecall(3)])
    group.update(torch.eye(3), torch.arange(3))
    results: Any = trainer.fit_loop.epoch_loop._results
    return types.SimpleNamespace(
        trainer=trainer,
        module=trainer.lightning_module,
        item=next(iter(results.values())),
        wrapper=AsyncCheckpointIO(TorchCheckpointIO()),
        logger=TensorBoardLogger("."),
        ddp=DDPStrategy(),
        metric=MeanMetric(),
        collection=group,
        scaler=torch.amp.GradScaler("cpu"),
        plugin=trainer.precision_plugin,
    )


def test_private_names_exist() -> None:
    missing: list[str] = []

    def probe(hook: str, batch: Any) -> None:
        if hook == "training_step":
            found = roots(trainer)
            for path, file in NAMES.items():
                try:
                    operator.attrgetter(path)(found)
                except AttributeError as error:
                    missing.append(f"{path} (used in strategies/{file}): {error}")

    trainer = make_trainer(limit_train_batches=1)
    trainer.fit(Model(probe), loader(), loader(3))
    assert not missing, f"{VERSIONS} do not have: " + "; ".join(missing)


@pytest.mark.parametrize(
    "file",
    ["_compat.py", "_compat_example.py", "_compat_loops.py", "metric_states.py", "precision.py", "step_metrics.py"],
)
def test_every_private_name_is_in_the_list(file: str) -> None:
    tree = ast.parse((STRATEGIES / file).read_text())
    own = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")} - own - OURS
    listed = {part for path in NAMES for part in path.split(".")}
    assert private <= listed, f"strategies/{file} uses private names that no test watches: {sorted(private - listed)}"


def test_a_parameter_forgets_its_unit() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not _is_fsdp_flattened(parameter)
    _set_fsdp_flattened(parameter)
    assert _is_fsdp_flattened(parameter)
    for _ in range(2):
        _compat_fsdp.forget_units(parameter)
        assert not _is_fsdp_flattened(parameter)


# ------------------------------------------------------------------------------------------------ SIGTERM
@pytest.mark.parametrize("watched", [True, False])
def test_batches_ask_no_device_about_sigterm(monkeypatch: pytest.MonkeyPatch, watched: bool) -> None:
    """Ranks that are watched hear of it; others ask each other, host to host. Lightning's loop asks every device."""
    asked: list[bool] = []

    def vote(decision: bool, all: bool) -> bool:
        asked.append(decision)
        return decision

    monkeypatch.delattr(torch.distributed, "broadcast")
    loop: Any = make_trainer().fit_loop.epoch_loop
    loop.__class__ = _compat_loops._VotingEpochLoop
    strategy = types.SimpleNamespace(_watch=types.SimpleNamespace(is_active=watched), reduce_boolean_decision=vote)
    for received in (False, True):
        loop.trainer = types.SimpleNamespace(strategy=strategy, received_sigterm=received)
        with pytest.raises(SIGTERMException) if received and not watched else nullcontext():
            loop._broadcast_sigterm_tensor()
    assert asked == ([] if watched else [False, True])


# ------------------------------------------------------------------------------------------------ logging
@pytest.mark.parametrize(
    ("run", "hooks"),
    [
        ("fit", ["training_step"] * 3 + ["validation_step"] * 2),
        ("validate", ["validation_step"] * 2),
        ("test", ["test_step"] * 2),
        ("predict", []),
    ],
)
def test_logged_values_go_to_whoever_stands_in(run: str, hooks: list[str]) -> None:
    calls: list[tuple[str, LogCall]] = []

    def probe(hook: str, batch: Any) -> None:
        recorder = LogRecorder()
        recorder.start_micro_batch(batch)
        with _compat.logged_to(trainer, recorder) as collection:
            assert (collection is None) == (hook == "predict_step"), f"{VERSIONS}: other owner of results in {hook}"
            if collection is not None:
                model.log("seen", torch.tensor(1.0), on_epoch=True, batch_size=7, reduce_fx="max")
                model.log("metric", model.metric, on_step=False, on_epoch=True)
                calls.extend((hook, call) for call in recorder.calls)

    trainer, model = make_trainer(), Model(probe)
    if run == "fit":
        trainer.fit(model, loader(), loader(3))
    else:
        getattr(trainer, run)(model, loader(3))
    assert [hook for hook, _ in calls] == [hook for hook in hooks for _ in range(2)]
    for hook, call in calls:
        assert call.fx == hook
        assert {"on_step", "on_epoch", "reduce_fx", "metric_attribute", "prog_bar", "logger"} <= set(call.options)
        if call.name == "seen":
            assert call.value is not None
            assert (float(call.value), call.weight, call.reduction) == (1.0, 7.0, "max")
        else:
            assert call.value is None
            assert call.options["metric_attribute"] == "metric"
    assert "seen" not in trainer.callback_metrics, "what was recorded reached nobody else"


def test_recorded_calls_can_be_replayed() -> None:
    def probe(hook: str, batch: Any) -> None:
        recorder = LogRecorder()
        recorder.start_micro_batch(batch)
        with _compat.logged_to(trainer, recorder) as collection:
            model.log("again", batch[:, 0].sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        for entry in recorder.resets:
            collection.reset(**entry)
        for call in recorder.calls:
            collection.log(call.fx, call.name, call.value, batch_size=call.size, **call.options)

    trainer, model = make_trainer(max_epochs=2), Model(probe)
    trainer.fit(model, loader())
    assert float(trainer.callback_metrics["again_epoch"]) == sum(range(5))
    assert float(trainer.callback_metrics["again_step"]) == 4


def test_global_values_are_not_reduced_again_and_nothing_is_advised() -> None:
    reduced: list[str] = []

    def reduce(value: torch.Tensor, **options: Any) -> torch.Tensor:
        reduced.append("")
        return value * 2

    options: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": 2}
    plain, one_replica = _ResultCollection(training=True), _compat_loops._ReplicaResults(training=True)
    warning_cache.clear()
    with lone_rank(2):
        one_replica.log("on_train_start", "hook", torch.tensor(3.0), sync_dist_fn=reduce, **options)
        plain.log("training_step", "step", torch.tensor(3.0), sync_dist=True, **options)
        values = [float(v) for c in (one_replica, plain) for v in c.metrics(on_step=False)["callback"].values()]
        assert values == [3.0, 3.0], f"{VERSIONS}: sync_dist without a function reduces"
        assert not reduced
        assert not warning_cache
        one_replica.log("on_train_start", "synced", torch.tensor(3.0), sync_dist=True, sync_dist_fn=reduce, **options)
        plain.log("training_step", "own", torch.tensor(3.0), **options)
        for collection in (one_replica, plain):
            collection.metrics(on_step=False)
    assert reduced, f"{VERSIONS}: the user's own sync_dist=True reduces nothing"
    assert any("sync_dist=True" in message for message in warning_cache), f"{VERSIONS} advise in another way"


def test_running_sums() -> None:
    seen: list[dict[str, Any]] = []
    metrics: list[set[str]] = []

    def probe(hook: str, batch: Any) -> None:
        if hook == "validation_step":
            collection: Any = trainer.fit_loop.epoch_loop.val_loop._results
            seen.append(_compat.running_sums(collection, "validation_step", None, also_on_step=False))
            model.metric.update(1.0)
            model.log("metric", model.metric)
            metrics.append(_compat.running_metrics(collection, "validation_step", None))
            if len(seen) == 2:
                _compat.set_running_sums(collection, {"validation_step.val_loss": (60.0, 6.0), "unknown": (1.0, 1.0)})

    trainer, model = make_trainer(), Model(probe)
    trainer.fit(model, loader(), loader(3))
    key = "validation_step.val_loss"
    expected = [{key: ("mean", 0.5 * 2, 2.0)}, {key: ("mean", 0.5 * 2 + 2.0, 3.0)}]
    assert seen == expected, f"{VERSIONS}: the running sums of logged values are kept in another way"
    assert metrics == [{"metric"}] * 2, VERSIONS
    assert float(trainer.callback_metrics["val_loss"]) == 10.0


def test_what_leaves_no_trace_in_running_sums() -> None:
    def probe(hook: str, batch: Any) -> None:
        with _compat.sums_kept(trainer.fit_loop.epoch_loop._results):
            model.log("train_loss", 1000.0, on_step=True, on_epoch=True)
            model.log("other", 1000.0, on_step=True, on_epoch=True)
        model.log("other", 1.0, on_step=True, on_epoch=True)

    trainer, model = make_trainer(), Model(probe)
    trainer.fit(model, loader())
    assert float(trainer.callback_metrics["train_loss_epoch"]) == 2.0
    assert float(trainer.callback_metrics["other_epoch"]) == 1.0


def test_the_last_hook_that_logged() -> None:
    def probe(hook: str, batch: Any) -> None:
        connector: Any = trainer._logger_connector
        assert connector._current_fx == hook
        _compat.note_log(trainer, "another")
        assert connector._current_fx == "another"
        _compat.note_log(trainer, hook)

    trainer = make_trainer()
    trainer.fit(Model(probe), loader())


# ------------------------------------------------------------------------------------------------ data
class Peek(Callback):
    """Looks at the first batch before training, and may forget the data again."""

    def __init__(self, forget: bool) -> None:
        self.forget = forget
        self.batch: Any = None
        self.once = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.forget:
            self.batch = _compat_example.example_training_batch(trainer)
            return
        for _ in range(1 if self.once else 2):
            self.batch, _ = _compat_example.example_before_resuming(trainer)
            assert (trainer.fit_loop._combined_loader is None) == (not self.once)
        assert "process_dataloader" not in vars(trainer.strategy)


class Collecting(Model):
    """Keeps the batches that it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.batches.append(batch)
        return self.layer(torch.ones(1, 2)).sum()


class ItsOwnIterator:
    """Batches that start anew when their iterator is asked for, which is the same object each time."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        self.place = 0
        return self

    def __next__(self) -> torch.Tensor:
        self.place += 1
        if self.place > len(self):
            raise StopIteration
        return torch.full((2, 2), float(self.place))


class SizedStream(Stream):
    """Goes on where it was when it is iterated over again."""

    def __init__(self) -> None:
        self.rest = super().__iter__()

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return self.rest


class GoesOn(IterableDataset[torch.Tensor]):
    """Twelve samples, of which an iterator gives what others have left; keeps its place in one of several ways."""

    def __init__(self, how: str, folder: Path) -> None:
        self.how, self.place, self.waiting = how, 0, deque(range(12))
        self.numbers = (number for number in range(12))
        (folder / "numbers").write_text("".join(f"{number}\n" for number in range(12)))
        self.file = (folder / "numbers").open()

    def __iter__(self) -> Any:
        for number in getattr(self, f"from_{self.how}")():
            yield torch.tensor([float(number), 1.0])

    def from_place(self) -> Any:
        while self.place < 12:
            self.place += 1
            yield self.place - 1

    def from_queue(self) -> Any:
        while self.waiting:
            yield self.waiting.popleft()

    def from_generator(self) -> Any:
        yield from self.numbers

    def from_file(self) -> Any:
        for line in self.file:  # noqa: UP028 - which leaves the file open
            yield line

    def from_attribute(self) -> Any:
        if not hasattr(self, "made"):
            self.made = iter(range(12))
        yield from self.made


class SizedGoesOn(GoesOn):
    def __len__(self) -> int:
        return 6


WAYS = ("place", "queue", "generator", "file", "attribute")


def going_on(size: str, how: str) -> DataLoader[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return DataLoader((SizedGoesOn if size == "sized" else GoesOn)(how, Path(folder)), 2)


class Shuffled(Sampler[int]):
    """A sampler with a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        order = list(range(5))
        self.generator.shuffle(order)
        return iter(order)


def drawn(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Samples(5), 2, sampler=sampler)


def weighted() -> DataLoader[Any]:
    return drawn(WeightedRandomSampler([1.0] * 5, 5, generator=torch.Generator().manual_seed(3)))


DATA: dict[str, Callable[[], Any]] = {
    "loader": loader,
    "stream": lambda: DataLoader(Stream(), 2),
    "nested": lambda: {"a": loader(), "b": [loader(5), loader(5)]},
    "combined": lambda: CombinedLoader([loader(3), loader(5)], "max_size_cycle"),
    "torch generator": weighted,
    "batch sampler": lambda: DataLoader(Samples(5), batch_sampler=weighted().batch_sampler),
    "Python generator": lambda: drawn(Shuffled(random.Random(3))),
    "NumPy generator": lambda: drawn(Shuffled(numpy.random.default_rng(3))),
    "old NumPy generator": lambda: drawn(Shuffled(numpy.random.RandomState(3))),
    "its own iterator": ItsOwnIterator,
    "iterator": lambda: iter(loader()),
    "sized stream": lambda: DataLoader(SizedStream(), 2),
    **{f"{size} {how} stream": partial(going_on, size, how) for size in ("sized", "endless") for how in WAYS},
}


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("kind", list(DATA))
def test_an_example_batch_is_not_consumed(kind: str, forget: bool) -> None:
    """Both epochs see what they would see if nobody had looked."""
    peek, model, alone = Peek(forget), Collecting(), Collecting()
    peek.once = kind in ("iterator", "its own iterator")
    make_trainer(max_epochs=2).fit(alone, DATA[kind]())
    make_trainer(max_epochs=2, callbacks=[peek]).fit(model, DATA[kind]())
    torch.testing.assert_close(peek.batch, model.batches[0])
    assert len(model.batches) == len(alone.batches) >= 3, f"{VERSIONS}: looking at a batch took it away"
    for found, expected in zip(model.batches, alone.batches, strict=True):
        torch.testing.assert_close(found, expected)


def test_original_loaders_are_taken_in_order() -> None:
    """Loaders of one dataset are told apart; what is no DataLoader takes its place in the order too."""
    taken: list[Any] = []
    train = loader(shuffle=True)
    val = [DataLoader(train.dataset, 2), [torch.ones(1, 2)], DataLoader(train.dataset, 3)]

    class Asking(SingleDeviceStrategy):
        def setup_environment(self) -> None:
            super().setup_environment()
            _compat.remember_loaders(trainer)
            _compat.remember_loaders(trainer)

        def process_dataloader(self, dataloader: object) -> object:
            taken.append(_compat.take_original_loader(trainer, dataloader))
            return dataloader

    class Several(Model):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            return None

    trainer = make_trainer(strategy=Asking("cpu"))
    trainer.fit(Several(), train, CombinedLoader(val, "sequential"))
    assert taken == [train, val[0], None, val[2]], f"{VERSIONS}: loops set their data up otherwise"
    assert _compat.take_original_loader(trainer, train) is None


def test_workers_are_seeded_by_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    source = loader()
    _compat.seed_workers(source, 3)
    assert source.worker_init_fn is None
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    _compat.seed_workers(source, 3)
    assert isinstance(source.worker_init_fn, partial)
    assert source.worker_init_fn.keywords == {"rank": 3}
    _compat.seed_workers(source, 5)
    assert source.worker_init_fn.keywords == {"rank": 3}, "a function that is there stays"


def test_resuming_is_noticed(tmp_path: Path) -> None:
    states: list[bool] = []

    class Note(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            states.append(_compat.is_resuming(trainer))

    trainer = make_trainer(callbacks=[Note()])
    trainer.fit(Model(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed = make_trainer(callbacks=[Note()], max_epochs=2)
    resumed.fit(Model(), loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert states == [False, True]


# ------------------------------------------------------------------------------------------------ checkpoints
def test_plain_writers_are_replaced_inside_wrappers_too() -> None:
    strategy = DDPStrategy()
    assert isinstance(_compat.whole_file_io(strategy), WholeFileIO)
    inner = AsyncCheckpointIO(TorchCheckpointIO())
    _compat.set_checkpoint_io(strategy, AsyncCheckpointIO(inner))
    outer: Any = _compat.whole_file_io(strategy)
    assert isinstance(outer, AsyncCheckpointIO)
    assert isinstance(inner.checkpoint_io, WholeFileIO)
    assert isinstance(DDPStrategy().checkpoint_io, TorchCheckpointIO), "other strategies keep theirs"

    class Own(TorchCheckpointIO):
        """The user's own writer."""

    own = Own()
    _compat.set_checkpoint_io(strategy, own)
    assert _compat.whole_file_io(strategy) is own


def test_a_module_without_memory_is_hidden() -> None:
    strategy = DDPStrategy()
    with torch.device("meta"):
        module = Model()
    strategy.connect(module)
    with _compat.unmovable_left_alone(strategy):
        assert strategy.lightning_module is None
    assert strategy.lightning_module is module
    strategy.connect(Model())
    with _compat.unmovable_left_alone(strategy):
        assert strategy.lightning_module is not None


# ------------------------------------------------------------------------------------------------ signals
def test_a_noted_sigterm_ends_the_run() -> None:
    def probe(hook: str, batch: Any) -> None:
        _compat.note_sigterm(trainer)

    trainer = make_trainer(max_epochs=9)
    with pytest.raises(SIGTERMException):
        trainer.fit(Model(probe), loader())
    assert trainer.global_step == 1


def test_the_users_own_handlers_are_found() -> None:
    def mine(*args: Any) -> None:
        return None

    found: list[Any] = []
    before = signal.signal(signal.SIGTERM, mine)
    try:
        trainer = make_trainer()
        trainer.fit(Model(lambda hook, batch: found.append(_compat.sigterm_handlers(trainer))), loader())
        assert found[0] == [mine], f"{VERSIONS}: handlers are composed in another way"
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert _compat.sigterm_handlers(trainer) is None
    finally:
        signal.signal(signal.SIGTERM, before)


# ------------------------------------------------------------------------------------------------ modules
def test_module_device() -> None:
    model = Model()
    _compat.set_module_device(model, torch.device("meta"))
    assert model.device == torch.device("meta")
    assert model.metric.device == torch.device("meta")
    assert model.layer.weight.device == torch.device("cpu")


def test_a_step_without_logging() -> None:
    model = copy.deepcopy(Model())
    batch = torch.ones(2, 2)
    assert _compat.run_without_logging(model, lambda: model.training_step(batch, 0)).shape == ()


def test_step_arguments() -> None:
    class Short(Model):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return None

    assert _compat.step_arguments(Short().training_step, 3) == (3,)
    assert _compat.step_arguments(Model().training_step, 3) == (3, 0)
    assert _compat.step_arguments(Model().test_step, 3) == (3, 0)


class HookModel(Model):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        return None


class ZeroModel(Model):
    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_zero_grad(*args, **kwargs)


class Looking(Callback):
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("kind", "callbacks", "expected"),
    [(Model, [], False), (HookModel, [], True), (ZeroModel, [], True), (Model, [Looking()], True)],
)
def test_who_sees_old_gradients(kind: type[Model], callbacks: list[Callback], expected: bool) -> None:
    trainer = make_trainer(callbacks=callbacks)
    trainer.fit(kind(), loader())
    assert _compat.sees_old_gradients(trainer) == expected
    assert set(callbacks) <= set(_compat.callbacks_of(trainer))


@pytest.mark.parametrize("average", [EMAWeightAveraging(), StochasticWeightAveraging(1e-2)])
def test_averages_of_the_module_are_found(average: Callback) -> None:
    found: list[Any] = []

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            found.extend(_compat.module_copies(trainer))

    make_trainer(callbacks=[average, Look()], max_epochs=2).fit(Model(), loader())
    assert len(found) == 1, f"{VERSIONS}: {type(average).__name__} keeps its average elsewhere"
    holder, attribute, module = found[0]
    assert isinstance(module, Model)
    assert (holder is average) == (attribute == "_average_model")


# ------------------------------------------------------------------------------------------------ loops
def test_where_an_evaluation_stands() -> None:
    found: list[Any] = []
    loaders = [loader(3), loader(5)]

    class Where(Model):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            args = (batch, batch_idx, dataloader_idx)
            *position, source = _compat_loops.evaluation_position(self.trainer, "test_step", args)
            assert source is loaders[dataloader_idx]
            found.append(tuple(position))

    make_trainer().test(Where(), loaders)
    assert found == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)], VERSIONS


def test_where_a_step_without_index_stands() -> None:
    found: list[Any] = []

    class Short(Model):
        def validation_step(self, batch: Any) -> None:  # type: ignore[override]
            found.append(_compat_loops.evaluation_position(self.trainer, "validation_step", (batch,))[:2])

        def predict_step(self, batch: Any) -> Any:  # type: ignore[override]
            found.append(_compat_loops.evaluation_position(self.trainer, "predict_step", (batch,))[:2])

    make_trainer().validate(Short(), loader(5))
    make_trainer().predict(Short(), loader(3))
    assert found == [(0, 0), (1, 0), (2, 0), (0, 0), (1, 0)], VERSIONS


class Replicas(ReplicaData):
    """Notes what the loops tell about the data of this replica."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def agree_on_batch(self, state: Batch, number: int) -> None:
        self.told.append((state.name, number))

    def agree_to_start(self, stage: str, has_batch: bool) -> None:
        self.told.append((stage, has_batch))

    def add_up(self, dataloader: int, taken: int, lockstep: bool, logged: Logged) -> None:
        self.told.append((logged.fx, dataloader, taken, sorted(logged.sums(True))))


class Follow(Callback):
    """Has the loops tell about their data, as they do where there are replicas."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        strategy.layout, strategy.sync_logs = ParallelLayout(data=2), True
        self.data = Replicas()
        _compat_loops.agree_in_loops(trainer, self.data)


class Nothing(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(())


def test_what_the_loops_tell_about_the_data_of_a_replica() -> None:
    follow = Follow()
    streams = [DataLoader(data, 2) for data in (Stream(), Nothing())]

    class Loaders(Model):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("size", float(len(batch)))

    make_trainer(callbacks=[follow]).fit(Loaders(), streams[0], [streams[1], streams[0]])
    batches = [("MORE_FOLLOW", 1), ("MORE_FOLLOW", 2), ("LAST", 3)]
    key = "validation_step.val_loss.1"
    validation = [("val", True), ("validation_step", 0, 0, []), ("validation_step", 1, 3, [key])]
    assert follow.data.told == [*batches, *validation], VERSIONS
    make_trainer(callbacks=[follow]).fit(Model(), streams[1])
    assert follow.data.told == [("ABSENT", 1)], VERSIONS
    make_trainer(callbacks=[follow]).test(Loaders(), [streams[0], streams[1]])
    told = [("test", True), ("test_step", 0, 3, ["test_step.size.0"]), ("test_step", 1, 0, [])]
    assert follow.data.told == told, VERSIONS
    make_trainer(callbacks=[follow]).predict(Model(), streams[1])
    assert follow.data.told == [("predict", False)], VERSIONS


def test_the_transfer_hook_is_found() -> None:
    class Hook(Model):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch + 1

    def probe(hook: str, batch: Any) -> None:
        assert float(_compat_loops.before_transfer(trainer, torch.zeros(()))) == 1.0
        assert _compat_loops.has_training_data(trainer)

    trainer = make_trainer(limit_train_batches=1)
    trainer.fit(Hook(probe), loader())
    assert not _compat_loops.has_training_data(make_trainer(limit_train_batches=0))


class Vote(Callback):
    """Another rank wants to stop from the `limit`-th vote on."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.votes: list[bool] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        def vote(decision: bool, all: bool = True) -> bool:
            assert not all, "any rank may end the run"
            self.votes.append(decision)
            return decision or len(self.votes) >= self.limit

        trainer.strategy.reduce_boolean_decision = vote  # type: ignore[method-assign]
        for _ in range(2):  # twice is once
            _compat_loops.agree_in_loops(trainer)


@pytest.mark.parametrize("limit", [1, 3, 5, 7])
def test_wherever_the_loops_look_at_should_stop_there_was_a_vote(limit: int) -> None:
    vote, model = Vote(limit), Collecting()
    trainer = make_trainer(max_epochs=9, callbacks=[vote])
    trainer.fit(model, loader(), loader(3))
    assert trainer.should_stop
    assert len(model.batches) <= 3 * limit
    assert trainer.current_epoch <= limit, f"{VERSIONS}: the loops look at should_stop elsewhere"


def test_without_a_wish_to_stop_every_batch_is_voted_on() -> None:
    vote, model = Vote(10**6), Collecting()
    make_trainer(max_epochs=2, callbacks=[vote]).fit(model, loader(), loader(3))
    assert len(model.batches) == 6
    assert len(vote.votes) >= 6 + 2, f"{VERSIONS}: hooks of a batch end elsewhere"
    assert not any(vote.votes)


# ------------------------------------------------------------------------------------------------ precision
class Span(ModelSpan):
    """Records what the precision plugin asks."""

    def __init__(self) -> None:
        super().__init__(Mesh(ParallelLayout(), 0, torch.device("cpu")), {}, {}, "ignore")
        self.asked: list[str] = []

    def clip_by_norm(self, parameters: Any, clip_val: float) -> None:
        self.asked.append(f"clip {len(list(parameters))} to {clip_val}")

    def share_overflow(self, flags: list[torch.Tensor]) -> None:
        self.asked.append(f"overflow {[float(f) for f in flags]}")

    def vote(self, optimizer: Any) -> None:
        self.asked.append("vote")


class Derive(Callback):
    """Puts a span between the trainer and its precision plugin."""

    def __init__(self, span: Span) -> None:
        self.span = span

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plain = trainer.precision_plugin
        derived = precision.derive_precision(plain, self.span)
        assert type(derived).__qualname__ == type(plain).__qualname__, "checkpoints file states under the name"
        assert isinstance(derived, type(plain))
        assert derived is not plain
        assert precision.derive_precision(derived, self.span) is derived
        assert copy.deepcopy(derived) is derived
        trainer.strategy.precision_plugin = derived


@pytest.mark.parametrize("scaled", [False, True])
def test_clipping_and_overflow_go_through_the_span(scaled: bool) -> None:
    span = Span()
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))] if scaled else []
    trainer = make_trainer(callbacks=[Derive(span)], plugins=plugins, gradient_clip_val=0.5, limit_train_batches=1)
    trainer.fit(Model(), loader())
    expected = ["clip 2 to 0.5", "overflow [0.0]"] if scaled else ["clip 2 to 0.5", "vote"]
    assert sorted(span.asked) == expected, f"{VERSIONS}: the plugin is called in another way"
    assert float(precision.loss_scale(trainer.precision_plugin, torch.tensor(3.0))) == (24.0 if scaled else 3.0)


# ------------------------------------------------------------------------------------------------ torchmetrics
def test_a_metric_reduces_only_where_it_is_told() -> None:
    metric = MeanMetric()
    default = metric.distributed_available_fn
    module = nn.ModuleDict({"metric": metric})
    metric_states.confine_metrics(module, object())
    assert metric.distributed_available_fn() is True
    assert metric.process_group is not None
    metric_states.release_metrics(module, None)
    assert metric.distributed_available_fn is default, f"{VERSIONS}: another function decides by default"


def test_compute_groups_share_states() -> None:
    group = MetricCollection([MulticlassPrecision(3), MulticlassRecall(3)])
    module = nn.ModuleDict({"group": group})
    group.update(torch.eye(3), torch.arange(3))
    before = metric_states.metric_snapshot(module)
    group.update(torch.eye(3), torch.zeros(3, dtype=torch.int64))
    delta = metric_states.metric_delta(module, before)
    names = {name.rpartition(".")[2] for name in delta}
    assert names == {"MulticlassPrecision", "MulticlassRecall"}, f"{VERSIONS}: groups work otherwise"
    first, second = (entry["states"] for entry in delta.values())
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
