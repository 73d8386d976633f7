"""Glue: what a run asks for that Lightning's own strategies do not do, or do otherwise than a plain process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler

from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.lacking_sharded import what_sharding_lacks
from lightning_parallel.strategies.refusals import refuse_embeddings
from lightning_parallel.strategies.user_code import hooks_of, names_in, parts_of, set_up_of, sets_in

__all__ = ["refuse_monitors", "what_lacks"]

_FREEZERS = frozenset({"requires_grad_", "freeze", "unfreeze", "unfreeze_and_add_param_group"})


def what_lacks(runtime: str, trainer: Trainer) -> str:
    """Why a strategy of Lightning's should not run what is asked for; empty if it may.

    What code does is told by its text, so that a reason may be one that the run would never come to.

    Args:
        runtime: "ddp", "fsdp" or "deepspeed".
        trainer: with its module connected, before anything is set up.
    """
    for reason in _reasons(trainer, trainer.lightning_module):
        return reason
    return "" if runtime == "ddp" else what_sharding_lacks(runtime, trainer)


def _reasons(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    callbacks = _compat.callbacks_of(trainer)
    if not module.automatic_optimization:
        yield "steps by hand may leave parameters out, which DDP takes for an error"
    if any(isinstance(callback, BaseFinetuning) for callback in callbacks) or not _trains_all(module):
        yield "parameters are frozen, whose gradients DDP would not reduce once they are trained"
    if any(type(callback).__name__ == "MicroBatchSizer" for callback in callbacks):  # it builds on the strategies
        yield "MicroBatchSizer cuts batches, which the others take as they come"
    yield from _of_data(trainer)
    yield from _of_parameters(module)
    yield from _of_code(trainer, module)
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str):
            yield f"{type(callback).__name__} goes by the logged {monitor!r}, and each rank logs its own"


def _of_data(trainer: Trainer) -> Iterator[str]:
    loaders = _compat.given_loaders(trainer)
    deals_alike = loaders and all(isinstance(getattr(x, "sampler", None), DistributedSampler) for x in loaders)
    if not _compat.divides_samples(trainer) and not deals_alike:
        yield "own samplers may give replicas different numbers of batches, for which DDP would wait"
    if any(not isinstance(loader, DataLoader) or has_iterable_dataset(loader) for loader in loaders):
        yield "the data has no length, and DDP would wait for replicas that have fewer batches than others"


def _of_parameters(module: LightningModule) -> Iterator[str]:
    try:
        refuse_embeddings(module, replicas=2, micro_batches=1)
    except ValueError as error:
        yield str(error).partition(",")[0]
    hooked = next((name for name, p in module.named_parameters() if p._post_accumulate_grad_hooks), None)
    if hooked is not None:
        yield f"{hooked} has a hook of register_post_accumulate_grad_hook, which would see one replica's gradient"


def _of_code(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    functions = [*hooks_of(trainer), *set_up_of(trainer)]
    objects = [*parts_of(module), *_compat.callbacks_of(trainer)]
    assigned = sets_in(functions, objects)
    if "requires_grad" in assigned or _FREEZERS & names_in(functions, objects):
        yield "parameters are frozen or unfrozen on the way, which DDP takes notice of at its start only"
    if "should_stop" in assigned or _leaves_epochs(module):
        yield "a rank may leave an epoch on its own, and DDP would wait for it"
    if is_overridden("configure_optimizers", module) and _follows_plateaus(module):
        yield "ReduceLROnPlateau goes by a logged value, and each rank logs its own"


def _leaves_epochs(module: LightningModule) -> bool:
    """Whether `on_train_batch_start` may return -1."""
    hook = getattr(type(module).on_train_batch_start, "__code__", None)
    return is_overridden("on_train_batch_start", module) and hook is not None and -1 in hook.co_consts


def _follows_plateaus(module: LightningModule) -> bool:
    method = getattr(module.configure_optimizers, "__func__", None)
    made = method.keywords.values() if isinstance(method, partial) else ()  # by LightningCLI, which binds them
    if any(isinstance(found, ReduceLROnPlateau) for found in made):
        return True
    return ReduceLROnPlateau.__name__ in names_in([module.configure_optimizers], parts_of(module))


def refuse_monitors(strategy: Any, name: str) -> None:
    """Raises ValueError if learning rates would follow what each rank logged on its own.

    Args:
        strategy: one of Lightning's own with the optimizers that it was set up with.
        name: of its class.
    """
    if any(config.reduce_on_plateau for config in strategy.lr_scheduler_configs):
        raise ValueError(
            f"ReduceLROnPlateau goes by a logged value, of which each rank of {name} would have its own, and with it "
            "its own learning rate; use AutoStrategy(runtime='lightning_parallel')"
        )


def _trains_all(module: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in module.parameters())
