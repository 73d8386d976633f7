"""Glue: whether user code looks at gradients between the backward pass and the next one, as far as its text tells."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_parallel.pipeline.cut import StageCut
from lightning_parallel.pipeline.hook_passes import WatchedPasses
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.user_code import attributes_in, codes_of, hooks_of, names_in, parts_of

__all__ = ["backward_handles_gradients", "looks_at_gradients", "names_gradients", "watched_passes"]

_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_MODULE_HOOKS = ("configure_gradient_clipping", "optimizer_zero_grad")
_READERS = frozenset(
    {"grad", "grad_norm", "get_total_norm", "clip_grad_norm", "clip_grad_norm_", "clip_grad_value_"}
    | {"clip_grads_with_norm_"}
)
"""The attribute, and what torch and Lightning have that reads it."""


def looks_at_gradients(trainer: Trainer) -> bool:
    """Whether user code may read or change gradients between the backward pass and the next one.

    Hooks that exist for gradients count when they are overridden; others, and hooks around an optimizer's step, when
    their code names `.grad` or calls what does.
    """
    module = trainer.lightning_module
    if any(is_overridden(name, module) for name in (*_GRADIENT_HOOKS, *_MODULE_HOOKS)):
        return True
    callbacks = _compat.callbacks_of(trainer)
    if any(getattr(type(c), name) is not getattr(Callback, name) for c in callbacks for name in _GRADIENT_HOOKS):
        return True
    hooks = hooks_of(trainer)
    for optimizer in trainer.strategy.optimizers:
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            hooks += getattr(optimizer, kind, {}).values()
    return names_gradients(hooks, [*parts_of(module), *callbacks])


def backward_handles_gradients(module: LightningModule) -> bool:
    """Whether a module's own hook `backward` reads, sets or clips gradients, which are not complete there.

    What `torch.autograd.grad` returns are others.
    """
    if not is_overridden("backward", module):
        return False
    hook, objects = [module.backward], list(parts_of(module))
    if any(name == "grad" and of not in ("autograd", "func") for of, name in attributes_in(hook, objects)):
        return True
    return bool((_READERS - {"grad"}) & names_in(hook, objects))


def watched_passes(module: LightningModule, cut: StageCut | None) -> AbstractContextManager[Any]:
    """Around a module's hook `backward` on a stage: parameters of other stages are not to be asked for there.

    Nothing without a hook of the user's: on the CPU every function of a backward pass would go through the watch.
    """
    if cut is None or not is_overridden("backward", module):
        return nullcontext()
    return WatchedPasses(cut)


def names_gradients(functions: Iterable[Any], objects: Iterable[Any] = ()) -> bool:
    """Whether functions, or what they call of the user's, name the gradients of parameters; see `codes_of`.

    Args:
        functions: functions, methods, and other callables, whose `__call__` counts.
        objects: whose methods may be called.
    """
    return any(_READERS & {*code.co_names, *code.co_freevars} for code in codes_of(functions, objects))
