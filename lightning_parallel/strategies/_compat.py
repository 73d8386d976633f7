"""Glue: every private name of Lightning that the package touches; a test fails when one moves."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_parallel.copies import copy_with_shared
from lightning_parallel.strategies.checkpoint_file import WholeFileIO

__all__ = [
    "batch_size_of",
    "callbacks_of",
    "copy_module",
    "divides_samples",
    "draws_graph",
    "given_loaders",
    "hand_over",
    "has_given_loader",
    "is_compiled",
    "is_resuming",
    "logged_to",
    "module_copies",
    "note_log",
    "note_sigterm",
    "remember_loaders",
    "result_owner",
    "run_without_logging",
    "running_metrics",
    "running_sums",
    "seed_workers",
    "sees_old_gradients",
    "set_checkpoint_io",
    "set_module_device",
    "set_running_sums",
    "sigterm_handlers",
    "starts_by_function",
    "step_arguments",
    "sums_kept",
    "take_original_loader",
    "unmovable_left_alone",
    "whole_file_io",
]


# ------------------------------------------------------------------------------------------------ logging
def result_owner(trainer: Trainer) -> Any:
    """The loop whose result collection `self.log` writes to at this moment."""
    if trainer.training:
        return trainer.fit_loop.epoch_loop
    if trainer.state.fn == "fit":  # validation or the sanity check inside fit
        return trainer.fit_loop.epoch_loop.val_loop
    if trainer.validating:
        return trainer.validate_loop
    if trainer.testing:
        return trainer.test_loop
    return None


@contextmanager
def logged_to(trainer: Trainer, recorder: Any) -> Iterator[Any]:
    """Sends `self.log` calls to `recorder` instead of the result collection, which is yielded (None in predict)."""
    owner = result_owner(trainer)
    if owner is None:
        yield None
        return
    collection = owner._results
    owner._results = recorder
    try:
        yield collection
    finally:
        owner._results = collection


def running_sums(
    collection: Any, fx: str, dataloader_idx: int | None, also_on_step: bool
) -> dict[str, tuple[str, float, float]]:
    """Every tensor that the hook `fx` logged this epoch for a dataloader, which is None if there is only one.

    Returns:
        key -> (reduction, running value, samples so far).
    """
    return {
        key: (item.meta.reduce_fx.__name__, float(item.value), float(getattr(item, "cumulated_batch_size", 0)))
        for key, item in _epoch_items(collection, fx, dataloader_idx)
        if item.is_tensor and (also_on_step or not item.meta.on_step)
    }


def running_metrics(collection: Any, fx: str, dataloader_idx: int | None) -> set[str]:
    """Names under which the hook `fx` logged torchmetrics objects this epoch, which are computed at its end."""
    return {item.meta.name for _, item in _epoch_items(collection, fx, dataloader_idx) if not item.is_tensor}


def _epoch_items(collection: Any, fx: str, dataloader_idx: int | None) -> Iterator[tuple[str, Any]]:
    for key, item in collection.items():
        meta = item.meta
        runs = meta.on_epoch and not item.has_reset
        if runs and meta.dataloader_idx == dataloader_idx and meta.fx.partition(".")[0] == fx:
            yield key, item


def set_running_sums(collection: Any, sums: dict[str, tuple[float, float]]) -> None:
    """Replaces running values and sample counts, for keys that exist here."""
    for key, (value, samples) in sums.items():
        if key in collection:
            item = collection[key]
            item.value = torch.as_tensor(value, dtype=item.value.dtype, device=item.value.device)
            if hasattr(item, "cumulated_batch_size"):
                item.cumulated_batch_size = torch.as_tensor(samples, device=item.value.device)


@contextmanager
def sums_kept(collection: Any) -> Iterator[None]:
    """What is logged inside is known afterwards, but leaves no trace in the running values of the epoch."""
    before = {key: _sums(item) for key, item in collection.items() if item.is_tensor and not item.has_reset}
    yield
    for key, item in collection.items():
        if item.is_tensor and not item.has_reset:
            for name, value in before.get(key, item._defaults).items():
                setattr(item, name, value.clone().to(item.value.device))


def _sums(item: Any) -> dict[str, torch.Tensor]:
    return {name: getattr(item, name) for name in item._defaults}


def note_log(trainer: Trainer, fx: str) -> None:
    """Remembers which hook logged last, as `self.log` does: from it Lightning tells when to clear old values."""
    trainer._logger_connector._current_fx = fx


# ------------------------------------------------------------------------------------------------ data
class _RememberingSource(_DataLoaderSource):
    """A data source that puts the loaders it gives out into a queue, before Lightning rebuilds them one by one."""

    given_out: deque[Any]

    def dataloader(self) -> Any:
        loaders = super().dataloader()
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
        self.given_out.clear()
        self.given_out.extend(combined.flattened)
        return loaders


def _data_loops(trainer: Trainer) -> tuple[Any, ...]:
    fit = trainer.fit_loop
    return fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop


def remember_loaders(trainer: Trainer) -> None:
    """Makes `take_original_loader` work for the coming run."""
    given_out: deque[Any] = deque()
    for loop in _data_loops(trainer):
        source = loop._data_source
        loop._data_source = _RememberingSource(source.instance, source.name)
        loop._data_source.given_out = given_out


def take_original_loader(trainer: Trainer, rebuilt: object) -> DataLoader[Any] | None:
    """The user's own loader that Lightning rebuilt; None if it is not known. To be asked once for every loader.

    The loaders of a run may share a dataset, so that only their order tells them apart.
    """
    given_out = getattr(trainer.fit_loop._data_source, "given_out", None)
    original = given_out.popleft() if given_out else None
    alike = isinstance(original, DataLoader) and original.dataset is getattr(rebuilt, "dataset", None)
    return original if alike else None


def given_loaders(trainer: Trainer) -> list[Any]:
    """The loaders that `fit` was called with; none if the module or a datamodule makes them."""
    if not has_given_loader(trainer):
        return []
    source = trainer.fit_loop._data_source.instance
    return list((source if isinstance(source, CombinedLoader) else CombinedLoader(source)).flattened)


def divides_samples(trainer: Trainer) -> bool:
    """Whether Lightning gives each replica samples of its own, and not a sampler of the user's."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def has_given_loader(trainer: Trainer) -> bool:
    """Whether `fit` was called with a loader of its own, beside what the module or a datamodule would make."""
    source = trainer.fit_loop._data_source.instance
    return source is not None and not isinstance(source, LightningModule | LightningDataModule)


def batch_size_of(trainer: Trainer, run: str = "fit") -> int | None:
    """Samples of a batch, before any loader is made: the given loader's (of several, which only `fit` combines, the
    largest), else the attribute ``batch_size`` that Lightning's own tuner goes by; None if there is none of both.
    """
    source, module = getattr(trainer, f"{run}_loop")._data_source.instance, trainer.lightning_module
    sources = source if run != "fit" and isinstance(source, list | tuple) else [source]
    sizes = [getattr(each, "batch_size", None) for each in sources]
    if not any(sizes) and lightning_hasattr(module, "batch_size"):
        sizes = [lightning_getattr(module, "batch_size")]
    return max((size for size in sizes if isinstance(size, int)), default=None)


def seed_workers(loader: DataLoader[Any], rank: int) -> None:
    """Seeds loader workers by replica, as `seed_everything(workers=True)` asks, before Lightning does it by rank."""
    if int(os.environ.get("PL_SEED_WORKERS", "0")) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)


def is_resuming(trainer: Trainer) -> bool:
    """Whether a checkpoint is about to be restored, or was restored before the strategy's set-up."""
    return bool(trainer._checkpoint_connector._loaded_checkpoint) or trainer.ckpt_path is not None


# ------------------------------------------------------------------------------------------------ checkpoints
def whole_file_io(strategy: Any) -> CheckpointIO:
    """The strategy's checkpoint plugin, with files written whole where Lightning's own writer would be used."""
    if _is_plain_io(strategy._checkpoint_io):
        strategy._checkpoint_io = WholeFileIO()
    plugin: CheckpointIO = strategy._checkpoint_io
    wrapper: Any = plugin
    while isinstance(wrapper, _WrappingCheckpointIO):
        if _is_plain_io(wrapper._checkpoint_io):
            wrapper._checkpoint_io = WholeFileIO()
        wrapper._base_checkpoint_io_configured = True
        wrapper = wrapper._checkpoint_io
    return plugin


def _is_plain_io(plugin: CheckpointIO | None) -> bool:
    return plugin is None or type(plugin) is TorchCheckpointIO


def set_checkpoint_io(strategy: Any, plugin: CheckpointIO | None) -> None:
    """What Lightning's setter does, for a property that was overridden."""
    strategy._checkpoint_io = plugin


@contextmanager
def unmovable_left_alone(strategy: Any) -> Iterator[None]:
    """Hides a module that failed to get memory from code that moves modules to the CPU: its error would hide ours."""
    module = strategy._lightning_module
    if module is not None and any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        strategy._lightning_module = None
    try:
        yield
    finally:
        strategy._lightning_module = module


def hand_over(trainer: Trainer, successor: Strategy) -> None:
    """Another strategy goes on, in processes and with plugins that this trainer's has, before anything is set up."""
    strategy: Any = trainer.strategy
    other: Any = successor
    for name in ("accelerator", "parallel_devices", "cluster_environment", "num_nodes", "_launcher", "_layer_sync"):
        if hasattr(other, name):
            setattr(other, name, getattr(strategy, name))
    if strategy._checkpoint_io is not None:
        other.checkpoint_io = strategy._checkpoint_io
    trainer._accelerator_connector.strategy = other


def starts_by_function(trainer: Trainer) -> bool:
    """Whether processes run a function of this one, in which the module gets the trained weights at the end."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


# ------------------------------------------------------------------------------------------------ signals
def note_sigterm(trainer: Trainer) -> None:
    """Makes Lightning stop at the next batch, as if this process had received SIGTERM."""
    trainer._signal_connector.received_sigterm = True


def sigterm_handlers(trainer: Trainer) -> list[Callable[..., Any]] | None:
    """The user's own handlers for SIGTERM inside of Lightning's; None if another handler is installed."""
    installed = signal.getsignal(signal.SIGTERM)
    if not isinstance(installed, _HandlersCompose):
        return None
    mine = trainer._signal_connector
    return [h for h in installed.signal_handlers if callable(h) and getattr(h, "__self__", None) is not mine]


def set_module_device(module: torch.nn.Module, device: torch.device) -> None:
    """Makes `LightningModule.device` report the device, also if it holds no parameter that could be moved."""
    for child in module.modules():
        if isinstance(child, LightningModule | Metric):
            child._device = device


def run_without_logging(module: LightningModule, step: Callable[[], Any]) -> Any:
    """Runs a step of a copied module whose `log` does nothing."""

    def ignore(*args: Any, **kwargs: Any) -> None:
        return None

    module.__dict__["log"] = ignore
    module.__dict__["log_dict"] = ignore
    return step()


def step_arguments(method: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """Arguments of a step for its first batch: the batch, and a batch index if the step takes one."""
    if is_param_in_hook_signature(method, "batch_idx", min_args=2):
        return (batch, 0)
    return (batch,)


# ------------------------------------------------------------------------------------------------ hooks and callbacks
def draws_graph(trainer: Trainer) -> bool:
    """Whether a logger runs the module on its example input, which it does on the first rank only."""
    return any(getattr(logger, "_log_graph", False) for logger in trainer.loggers)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The trainer's callbacks, which it sets without declaring them."""
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def is_compiled(module: LightningModule) -> bool:
    """Whether `torch.compile` was called on the whole LightningModule, whose steps are those of one object since."""
    return module._compiler_ctx is not None


def sees_old_gradients(trainer: Trainer) -> bool:
    """Whether user code runs while the previous step's gradients are still there."""
    module = trainer.lightning_module
    if is_overridden("on_before_zero_grad", module) or is_overridden("optimizer_zero_grad", module):
        return True
    return any(type(c).on_before_zero_grad is not Callback.on_before_zero_grad for c in callbacks_of(trainer))


def module_copies(trainer: Trainer) -> list[tuple[Any, str, torch.nn.Module]]:
    """Copies of the module that averaging callbacks made before the strategy's set-up: (holder, attribute, copy)."""
    found: list[tuple[Any, str, torch.nn.Module]] = []
    for callback in callbacks_of(trainer):
        average = getattr(callback, "_average_model", None)
        if isinstance(average, AveragedModel):
            found.append((average, "module", average.module))
        elif isinstance(average, torch.nn.Module):
            found.append((callback, "_average_model", average))
    return found


def copy_module(module: torch.nn.Module, shared: dict[int, Any]) -> torch.nn.Module:
    """A deep copy that refers to some objects (process groups) instead of copying them."""
    return copy_with_shared(module, shared)
