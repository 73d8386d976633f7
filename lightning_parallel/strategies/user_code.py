"""Glue: the code of a user's that a run will call, as far as its text tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dis import get_instructions
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_parallel.strategies import _compat

__all__ = ["attributes_in", "codes_of", "hooks_of", "names_in", "parts_of", "set_up_of", "sets_in"]

_PACKAGES = frozenset({"torch", "lightning", "lightning_parallel", "lightning_fabric"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"})
_STEPS = ("training_step", "optimizer_step", "lr_scheduler_step", "backward", "clip_gradients")


def hooks_of(trainer: Trainer) -> list[Any]:
    """What of the module and its callbacks runs around training steps, and the steps."""
    module = trainer.lightning_module
    hooks = [getattr(module, name) for name in dir(LightningModule) if name.startswith("on_") or name in _STEPS]
    for callback in _compat.callbacks_of(trainer):
        hooks += [getattr(callback, name) for name in dir(Callback) if name.startswith("on_")]
    return hooks


def set_up_of(trainer: Trainer) -> list[Any]:
    """What of the module and its callbacks runs before the first step."""
    module = trainer.lightning_module
    return [
        *(getattr(module, name) for name in ("setup", "configure_model", "configure_optimizers", "prepare_data")),
        *(callback.setup for callback in _compat.callbacks_of(trainer)),
    ]


def parts_of(module: LightningModule) -> Iterator[Any]:
    """What a step may call methods of."""
    for part in module.modules():
        yield part
        if not type(part).__module__.startswith("torch."):
            yield from vars(part).values()


def names_in(functions: Iterable[Any], objects: Iterable[Any] = ()) -> frozenset[str]:
    """Every name in the code of functions and of what they call, see `codes_of`."""
    return frozenset(name for code in codes_of(functions, objects) for name in (*code.co_names, *code.co_freevars))


def sets_in(functions: Iterable[Any], objects: Iterable[Any] = ()) -> frozenset[str]:
    """Every attribute that this code assigns to, of whatever object."""
    codes = codes_of(functions, objects)
    return frozenset(step.argval for code in codes for step in get_instructions(code) if step.opname == "STORE_ATTR")


def attributes_in(functions: Iterable[Any], objects: Iterable[Any] = ()) -> frozenset[tuple[str, str]]:
    """Every attribute that this code reads or sets, each after the name that it is asked of ("" if that has none)."""
    found = set()
    for code in codes_of(functions, objects):
        before = ""
        for step in get_instructions(code):
            name = step.argval if isinstance(step.argval, str) else ""
            if step.opname in _ATTRIBUTES:
                found.add((before, name))
            before = name
    return frozenset(found)


def codes_of(functions: Iterable[Any], objects: Iterable[Any] = ()) -> Iterator[CodeType]:
    """The code of functions, and of what they call of the user's.

    A call is found by its name: among the globals of the caller and the methods of the objects.

    Args:
        functions: functions, methods, and other callables, whose `__call__` counts.
        objects: whose methods may be called.
    """
    kinds = {type(found) for found in objects}
    classes = {cls for kind in kinds for cls in kind.__mro__ if not _is_known(cls)}
    waiting = [code for function in functions for code in _wrapped_codes(_function_of(function))]
    seen: set[CodeType] = set()
    while waiting:
        code, caller = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        yield code
        names = {*code.co_names, *code.co_freevars}
        waiting += [(inner, caller) for inner in code.co_consts if isinstance(inner, CodeType)]
        called = [vars(cls)[name] for cls in classes for name in names if name in vars(cls)]
        called += _named_outside(names, caller)
        waiting += [entry for found in called for entry in _wrapped_codes(found)]


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
    """Whether a class or function comes from a package whose own code is not looked at."""
    return found.__module__.partition(".")[0] in _PACKAGES


def _wrapped_codes(found: Any) -> Iterator[tuple[CodeType, FunctionType]]:
    """The code of a callable and of everything that it wraps; nothing of packages that are known."""
    if isinstance(found, property):
        yield from (entry for part in (found.fget, found.fset) for entry in _wrapped_codes(part))
        return
    if isinstance(found, partial):
        found = found.func
    if isinstance(found, (staticmethod, classmethod, MethodType)):
        found = found.__func__
    while isinstance(found, FunctionType):
        if found.__module__ is None or not _is_known(found):
            yield found.__code__, found
        found = vars(found).get("__wrapped__")
