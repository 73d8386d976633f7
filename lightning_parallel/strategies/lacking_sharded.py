"""Glue: what of a run would see shards under Lightning's FSDP or DeepSpeed, or is done there in another way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_parallel.blocks import find_blocks
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.gradient_readers import looks_at_gradients
from lightning_parallel.strategies.user_code import hooks_of, names_in, parts_of

__all__ = ["block_classes", "what_sharding_lacks"]

_AFTER_BACKWARD = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
_READERS = frozenset({"parameters", "named_parameters", "get_parameter", "state_dict"})
_SHAPES = frozenset({"ndim", "dim", "ndimension", "shape", "size", "numel", "named_parameters", "named_modules"})
_ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Lion"}
)
"""Optimizers that step on a shard as they would on the whole tensor."""
_OFFLOADED = "DeepSpeedCPUAdam"
"""Offloaded, DeepSpeed takes no other that `configure_optimizers` makes."""


def what_sharding_lacks(runtime: str, trainer: Trainer) -> str:
    """Why FSDP or DeepSpeed should not run what is asked for; empty if it may.

    Args:
        runtime: "fsdp" or "deepspeed".
        trainer: with its module connected, before anything is set up.
    """
    module = trainer.lightning_module
    own = _of_fsdp if runtime == "fsdp" else _of_deepspeed
    return next(chain(_of_both(trainer, module), own(trainer, module)), "")


def block_classes(module: nn.Module) -> frozenset[type[nn.Module]]:
    """Classes of the repeated blocks, of which FSDP makes its units; empty if there are none that could be."""
    try:
        names = find_blocks(module)
    except ValueError:
        return frozenset()
    blocks = [module.get_submodule(name) for name in names]
    inside = {parameter for block in blocks for parameter in block.parameters()}
    uses = [parameter for child in module.modules() for parameter in child.parameters(recurse=False)]
    if sum(parameter in inside for parameter in uses) > len(inside):
        return frozenset()  # tied: no unit owns it alone
    return frozenset(type(block) for block in blocks)


def _of_both(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    callbacks = _compat.callbacks_of(trainer)
    for hook in _AFTER_BACKWARD:
        if is_overridden(hook, module, LightningModule):
            yield f"{hook} would see gradients in shards"
    if looks_at_gradients(trainer):
        yield "a hook would see gradients in shards"
    if _READERS & names_in(hooks_of(trainer), [*parts_of(module), *callbacks]):
        yield "a step or a hook goes through the parameters, which are shards"
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            yield f"{type(callback).__name__} would average shards"
        if isinstance(callback, ModelPruning):
            yield f"{type(callback).__name__} would prune shards"
    if _compat.starts_by_function(trainer):
        yield "processes that are spawned or forked would bring shards home; use start_method='popen'"
    if module.example_input_array is not None and _compat.draws_graph(trainer):
        yield "a logger with log_graph=True runs the model on the first rank alone"
    if _compat.is_compiled(module):
        yield "torch.compile of the whole module would not see the units that shards are gathered for"
    if len({parameter.dtype for parameter in module.parameters()}) > 1:
        yield "parameters of several dtypes cannot share a flat shard"


def _of_fsdp(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
        yield "Lightning's FSDP does not clip by norm"
    if not block_classes(module):
        yield "no repeated blocks were found, of which FSDP could make units"
    named = names_in([module.configure_optimizers], parts_of(module))
    if not named & _ELEMENTWISE:
        yield "no optimizer is named in configure_optimizers that steps on flat shards as on whole parameters"
    if named & _SHAPES:
        yield "configure_optimizers goes by shapes or names of parameters, which are flat shards with other names"


def _of_deepspeed(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    chosen = [device.index for device in getattr(trainer.strategy, "parallel_devices", None) or ()]
    if None not in chosen and chosen != list(range(len(chosen))):
        yield f"DeepSpeed takes the first GPUs of a node, not those numbered {chosen}; set CUDA_VISIBLE_DEVICES"
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        yield "DeepSpeed does not clip by value"
    if trainer.precision == "bf16-mixed":
        yield "DeepSpeed computes everything in 16 bit where autocast leaves sums and norms in 32"
    if is_overridden("backward", module, LightningModule):
        yield "DeepSpeed has a backward of its own"
    if _OFFLOADED not in names_in([module.configure_optimizers], parts_of(module)):
        yield f"offloaded, DeepSpeed steps with its own {_OFFLOADED} only, which configure_optimizers does not make"
