"""Glue: plain Python attributes that a step changed on the last stage, repeated on the other stages.

Only the last stage runs a step to its end, so `self.outputs.append(prediction)` happens there alone, while hooks that
read `self.outputs` run everywhere. After each step the last stage therefore sends what changed among the module's own
attributes: numbers, strings, tensors, buffers of the module itself, and lists, dicts, sets and deques of such values.
Of a list or dict only what is new travels. Attributes of submodules and the insides of other objects are not looked at.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_parallel.pipeline.placeholder import PipelineCutError, placeholders_in

__all__ = ["AttributeMirror"]

# Entries of a longer container count as changed only if they are other objects: looking inside each would make the
# cost of a step grow with the number of steps before it.
_MAX_LOOKED_INTO = 64
_SAME: Any = ()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass
class _Held:
    """A value as it was before a step: the object, a shallow copy if it is a container, and what its entries held."""

    value: Any
    copy: Any = None
    entries: dict[Any, _Held] | None = None
    version: int | None = None  # of a tensor; None if it does not count its changes
    content: torch.Tensor | None = None


@dataclass
class _OnHost:
    """Keeps a tensor off the accelerator on its way."""

    tensor: torch.Tensor


class AttributeMirror:
    """Follows the attributes of one module.

    Args:
        module: the user's module.
        device: device of the tensors that travel between stages.
    """

    def __init__(self, module: LightningModule, device: torch.device) -> None:
        self.module = module
        self.device = device
        self._internal = frozenset([*vars(LightningModule()), "_trainer", "_fabric"])

    def hold(self, exactly: bool = False) -> dict[str, _Held]:
        """What every attribute is now; the argument of the other methods.

        Args:
            exactly: copy the content of tensors, so that `restore` can undo changes in place too.
        """
        seen: set[int] = set()
        return {name: _hold(value, seen, exactly) for name, value in self._attributes().items()}

    def _attributes(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self.module).items() if name not in self._internal}
        return {**own, **{name: value for name, value in self.module._buffers.items() if value is not None}}

    def changes(self, held: dict[str, _Held]) -> dict[str, Any]:
        """What a step changed since `held` was taken, as nested plain values.

        Raises:
            PipelineCutError: an attribute got a value of another stage, or one that cannot be sent.
        """
        found = {}
        for name, value in self._attributes().items():
            change = _change(held[name], value) if name in held else ("value", value)
            if change is not _SAME:
                found[name] = self._packed(name, change)
        gone = [name for name in held if name not in self._attributes()]
        return {**found, **dict.fromkeys(gone, ("gone",))}

    def _packed(self, name: str, change: Any) -> Any:
        where = f"the step changed {type(self.module).__name__}.{name}"
        strangers = placeholders_in(change)
        if strangers:
            raise PipelineCutError(
                f"{where}, which now holds a value of another pipeline stage: {strangers[0]!r}. Keep values computed "
                "after the last block only, or use pipeline_parallel_size=1"
            )
        for leaf in tree_flatten(change)[0]:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                try:
                    pickle.dumps(leaf)
                except Exception as error:
                    raise PipelineCutError(
                        f"{where} on the last pipeline stage, and the other stages cannot get its "
                        f"{type(leaf).__name__} ({error}). Keep it in an object that the module refers to, or use "
                        "pipeline_parallel_size=1"
                    ) from error
        if self.device.type == "cpu":
            return change
        return tree_map_only(torch.Tensor, lambda t: _OnHost(t.detach()) if t.device.type == "cpu" else t, change)

    def restore(self, held: dict[str, _Held]) -> None:
        """Undoes what a step did to the attributes here."""
        for name in [name for name in self._attributes() if name not in held]:
            delattr(self.module, name)
        for name, before in held.items():
            _restore(before)
            if getattr(self.module, name, None) is not before.value:
                setattr(self.module, name, before.value)

    def repeat(self, held: dict[str, _Held], changes: dict[str, Any]) -> None:
        """Makes the attributes those of the rank that `changes` came from."""
        self.restore(held)
        for name, change in changes.items():
            if change[0] == "gone":
                delattr(self.module, name)
                continue
            change = tree_map_only(_OnHost, lambda host: host.tensor, change)
            setattr(self.module, name, _repeat(getattr(self.module, name, None), change))


def _hold(value: Any, seen: set[int], exactly: bool) -> _Held:
    if isinstance(value, torch.Tensor):
        version = None if value.is_inference() else value._version
        return _Held(value, version=version, content=value.detach().clone() if exactly else None)
    if not isinstance(value, list | dict | set | deque) or id(value) in seen:
        return _Held(value)
    seen.add(id(value))
    copy = value.copy()
    entries = None
    if isinstance(value, list | dict) and len(value) <= _MAX_LOOKED_INTO:
        places = value.items() if isinstance(value, dict) else enumerate(value)
        entries = {place: _hold(entry, seen, exactly) for place, entry in places}
    return _Held(value, copy, entries)


def _change(held: _Held, now: Any) -> Any:
    """A nested description of the difference; `_SAME` if there is none."""
    if now is not held.value:
        plain = isinstance(now, _PLAIN) and type(now) is type(held.value) and now == held.value
        return _SAME if plain else ("value", now)
    if isinstance(now, torch.Tensor):
        # Tensors of inference mode do not count changes in place, as in `self.total += loss`.
        return _SAME if held.version is not None and now._version == held.version else ("value", now)
    if held.copy is None:
        return _SAME
    if isinstance(now, list):
        return _list_change(held, now)
    if isinstance(now, dict):
        return _dict_change(held, now)
    same = len(now) == len(held.copy) and (now == held.copy if isinstance(now, set) else all(map(is_, now, held.copy)))
    return _SAME if same else ("content", list(now))


def _list_change(held: _Held, now: list[Any]) -> Any:
    before = held.copy
    if len(now) < len(before):
        return ("content", list(now))
    # Unlike an attribute or an entry of a dict, a tensor in a list is not a sum that goes on growing.
    looked_into = {p: now[p] for p, e in (held.entries or {}).items() if e.version is not None or e.value is not now[p]}
    inside = _entry_changes(held, looked_into)
    if held.entries is None and not all(map(is_, before, now)):
        inside = {place: ("value", now[place]) for place, old in enumerate(before) if now[place] is not old}
    tail = now[len(before) :]
    return ("list", inside, tail) if inside or tail else _SAME


def _dict_change(held: _Held, now: dict[Any, Any]) -> Any:
    before = held.copy
    if held.entries is None:
        if list(before) == list(now) and all(map(is_, before.values(), now.values())):
            return _SAME
        inside = {k: ("value", now[k]) for k, old in before.items() if k in now and now[k] is not old}
    else:
        inside = _entry_changes(held, {k: now[k] for k in before if k in now})
    new = {k: v for k, v in now.items() if k not in before}
    gone = [k for k in before if k not in now]
    # Keys travel as values: as keys they could be of any kind that cannot be sorted.
    pairs = [(k, v) for k, v in inside.items()]
    return ("dict", pairs, list(new.items()), gone) if inside or new or gone else _SAME


def _entry_changes(held: _Held, now: dict[Any, Any]) -> dict[Any, Any]:
    entries = held.entries or {}
    changes = {place: _change(entries[place], value) for place, value in now.items()}
    return {place: change for place, change in changes.items() if change is not _SAME}


def _restore(held: _Held) -> None:
    if held.content is not None:
        held.value.detach().copy_(held.content)
    if held.copy is None:
        return
    for entry in (held.entries or {}).values():
        _restore(entry)
    _set_content(held.value, held.copy)


def _set_content(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, dict):
        _set_items(container, content.items())
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


def _set_items(mapping: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> None:
    for key, value in items:  # not by `update`, which in a Counter adds
        mapping[key] = value


def _repeat(own: Any, change: Any) -> Any:
    kind = change[0]
    if kind == "value":
        return change[1]
    if kind == "content":
        _set_content(own, change[1])
    elif kind == "list":
        for place, inner in change[1].items():
            own[place] = _repeat(own[place], inner)
        own.extend(change[2])
    else:
        for place, inner in change[1]:
            own[place] = _repeat(own[place], inner)
        _set_items(own, change[2])
        for place in change[3]:
            del own[place]
    return own
