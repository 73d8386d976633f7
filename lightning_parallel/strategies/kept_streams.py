"""Glue: streams of samples that are looked at before the run that trains on them, and go on where they were."""

from __future__ import annotations

import io
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset

__all__ = ["KeptStreams", "may_go_on", "refuse_lost"]

_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None))
_COMPARED = (bool, int, float, complex, str, bytes, torch.Tensor)


def may_go_on(source: Any) -> bool:
    """Whether a second iterator over a source may give what follows, and not its first batch again."""
    return isinstance(source, Iterator) or isinstance(getattr(source, "dataset", None), IterableDataset)


class KeptStreams:
    """What iterable datasets know of their place.

    Attributes that are plain values, collections, iterators, files, or generators of random numbers.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._recorded: dict[int, _Recorded] = {}

    def watch(self, loader: Any) -> None:
        """To be called before a loader is iterated over. Workers iterate over copies."""
        if not may_go_on(loader) or getattr(loader, "num_workers", 0) > 0:
            return
        waiting, seen = [getattr(loader, "dataset", None)], set[int]()
        while waiting:
            owner = waiting.pop()
            if id(owner) in seen or not isinstance(owner, Dataset):
                continue
            seen.add(id(owner))
            self._undo.append(partial(_forget_others, owner, frozenset(vars(owner))))
            for name, value in list(vars(owner).items()):
                waiting += value if isinstance(value, (list, tuple)) else [value]
                self._watch_attribute(owner, name, value)

    def _watch_attribute(self, owner: Any, name: str, value: Any) -> None:
        if isinstance(value, Dataset):
            return
        if isinstance(value, io.IOBase):
            if value.seekable():
                self._undo.append(partial(value.seek, value.tell()))
        elif isinstance(value, Iterator):
            recorded = self._recorded.setdefault(id(value), _Recorded(value))
            setattr(owner, name, recorded)
            self._undo.append(lambda: setattr(owner, name, recorded.whole()))
        elif isinstance(value, torch.Generator):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._undo.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._undo.append(partial(setattr, bits, "state", bits.state))
        elif isinstance(value, np.random.RandomState):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, _PLAIN):
            self._undo.append(partial(setattr, owner, name, value))
        elif type(value) in (list, dict, set, deque):
            before = value.copy()
            self._undo.append(lambda: _refill(owner, name, value, before))

    def put_back(self) -> None:
        """Every dataset is as it was when it was first watched."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._recorded.clear()


class _Recorded(Iterator[Any]):
    """An iterator that remembers what it gave."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._given: list[Any] = []
        self._whole: Iterator[Any] | None = None

    def __next__(self) -> Any:
        value = next(self._source)
        self._given.append(value)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("close", "throw", "send"):  # a generator must not end with who reads it
            raise AttributeError(name)
        return getattr(self._source, name)

    def whole(self) -> Iterator[Any]:
        """The iterator as it was before anything was taken."""
        if self._whole is None:
            self._whole = _PutBack(self._given, self._source) if self._given else self._source
        return self._whole


class _PutBack(Iterator[Any]):
    """An iterator that gives some values once more before it goes on; its other methods are those of the original."""

    def __init__(self, given: Iterable[Any], source: Iterator[Any]) -> None:
        self._given = deque(given)
        self._source = source

    def __next__(self) -> Any:
        return self._given.popleft() if self._given else next(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._source, name)
        return partial(self._end, found) if name == "close" else found

    def _end(self, close: Callable[[], None]) -> None:
        self._given.clear()
        close()


def _forget_others(owner: Any, names: frozenset[str]) -> None:
    """Removes attributes that came later."""
    for name in vars(owner).keys() - names:
        delattr(owner, name)


def _refill(owner: Any, name: str, value: Any, before: Any) -> None:
    """The same object with its former content, as others may know it too."""
    value.clear()
    (value.extend if isinstance(value, (list, deque)) else value.update)(before)
    setattr(owner, name, value)


def refuse_lost(first: Any, again: Any) -> None:
    """Raises ValueError if training data that was set up twice did not begin with the same batch both times.

    Only numbers, texts and tensors are compared.
    """
    one, other = ([leaf for leaf in tree_leaves(batch) if isinstance(leaf, _COMPARED)] for batch in (first, again))
    if len(one) == len(other) and all(_is_same(*pair) for pair in zip(one, other, strict=True)):
        return
    raise ValueError(
        "the training data is a stream that did not begin again when it was set up again: a resumed run looks at a "
        "batch before the checkpoint says where to go on, and would lose it; keep the place in attributes of the "
        "dataset, or in a dataloader with state_dict and load_state_dict, or let __iter__ begin anew"
    )


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and (one == other or one != one)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
