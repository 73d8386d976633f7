"""Glue: whether user code looks at gradients between the backward pass and the next one, as far as its text tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_parallel.strategies import _compat

__all__ = ["looks_at_gradients", "names_gradients"]

_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_MODULE_HOOKS = ("configure_gradient_clipping", "optimizer_zero_grad")
_STEPS = ("training_step", "optimizer_step", "lr_scheduler_step", "backward", "clip_gradients")
_READERS = frozenset(
    {"grad", "grad_norm", "get_total_norm", "clip_grad_norm", "clip_grad_norm_", "clip_grad_value_"}
    | {"clip_grads_with_norm_"}
)
"""The attribute, and what torch and Lightning have that reads it."""
_PACKAGES = frozenset({"torch", "lightning", "lightning_parallel", "lightning_fabric"})


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
    hooks = [getattr(module, name) for name in dir(LightningModule) if name.startswith("on_") or name in _STEPS]
    hooks += [getattr(callback, name) for callback in callbacks for name in dir(Callback) if name.startswith("on_")]
    for optimizer in trainer.strategy.optimizers:
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            hooks += getattr(optimizer, kind, {}).values()
    return names_gradients(hooks, [*_parts_of(module), *callbacks])


def _parts_of(module: LightningModule) -> Iterator[Any]:
    """What a step may call methods of."""
    for part in module.modules():
        yield part
        if not type(part).__module__.startswith("torch."):
            yield from vars(part).values()


def names_gradients(functions: Iterable[Any], objects: Iterable[Any] = ()) -> bool:
    """Whether functions, or what they call of the user's, name the gradients of parameters.

    A call is found by its name: among the globals of the caller and the methods of the objects.

    Args:
        functions: functions, methods, and other callables, whose `__call__` counts.
        objects: whose methods may be called.

    >>> def log(module): return module.weight.grad.norm()
    >>> names_gradients([lambda module: log(module)])
    True
    >>> names_gradients([lambda module: module.requires_grad_(False)])
    False
    """
    kinds = {type(found) for found in objects}
    classes = {cls for kind in kinds for cls in kind.__mro__ if not _is_known(cls)}
    waiting = [code for function in functions for code in _codes_of(_function_of(function))]
    seen: set[CodeType] = set()
    while waiting:
        code, caller = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        names = {*code.co_names, *code.co_freevars}
        if names & _READERS:
            return True
        waiting += [(inner, caller) for inner in code.co_consts if isinstance(inner, CodeType)]
        called = [vars(cls)[name] for cls in classes for name in names if name in vars(cls)]
        called += _named_outside(names, caller)
        waiting += [entry for found in called for entry in _codes_of(found)]
    return False


def _named_outside(names: Iterable[str], caller: FunctionType) -> Iterator[Any]:
    """What a function finds under some names outside of itself, and below modules that it names."""
    cells = zip(caller.__code__.co_freevars, caller.__closure__ or (), strict=True)
    free = {name: cell.cell_contents for name, cell in cells if not _is_empty(cell)}
    for name in names:
        found = free.get(name, caller.__globals__.get(name))
        origin = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None) or ""
        if isinstance(found, (ModuleType, type)) and origin.partition(".")[0] not in _PACKAGES:
            yield from (vars(found)[inner] for inner in names if inner in vars(found))
        yield found


def _function_of(called: Any) -> Any:
    """What runs when an object is called."""
    if isinstance(called, (FunctionType, MethodType, partial)):
        return called
    return next((vars(cls)["__call__"] for cls in type(called).__mro__ if "__call__" in vars(cls)), None)


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _is_known(found: Any) -> bool:
    """Whether a class or function comes from a package whose readers of gradients are in `_READERS`."""
    return found.__module__.partition(".")[0] in _PACKAGES


def _codes_of(found: Any) -> Iterator[tuple[CodeType, FunctionType]]:
    """The code of a callable and of everything that it wraps; nothing of packages that are known."""
    if isinstance(found, property):
        yield from (entry for part in (found.fget, found.fset) for entry in _codes_of(part))
        return
    if isinstance(found, partial):
        found = found.func
    if isinstance(found, (staticmethod, classmethod, MethodType)):
        found = found.__func__
    while isinstance(found, FunctionType):
        if found.__module__ is None or not _is_known(found):
            yield found.__code__, found
        found = vars(found).get("__wrapped__")
