"""Streams without hardware: what a device is given in which of them, and what each of these things comes after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness.accelerator import DEVICE

__all__ = ["Collective", "Streams"]


@dataclass(frozen=True)
class Given:
    """Something that the device was given: it begins when all `after` is over."""

    kind: str
    after: frozenset[int]


@dataclass(eq=False)
class _Stream:
    streams: Streams
    over: set[int] = field(default_factory=set)

    def wait_stream(self, other: _Stream) -> None:
        self.over |= other.over

    def record_event(self) -> _Event:
        return _Event(self.streams, frozenset(self.over))


@dataclass(frozen=True)
class _Event:
    streams: Streams
    over: frozenset[int]

    def wait(self) -> None:
        self.streams.current.over |= self.over

    def synchronize(self) -> None:
        self.streams.host_waits += 1


@dataclass(frozen=True)
class Collective:
    """A collective in a stream of its own, which begins after what its caller's stream was given."""

    streams: Streams
    over: frozenset[int]

    def wait(self) -> None:
        """What the caller's stream is given from now on comes after it."""
        self.streams.current.over |= self.over


class Streams(TorchDispatchMode):
    """Stands for `torch.cuda`, as far as streams go, and notes what operations on `DEVICE` are given to them."""

    def __init__(self) -> None:
        super().__init__()
        self.current = _Stream(self)
        self.given: list[Given] = []
        self.host_waits = 0

    def Stream(self, device: torch.device) -> _Stream:  # noqa: N802 - the name that torch gives it
        """A new one."""
        return _Stream(self)

    def current_stream(self, device: torch.device) -> _Stream:
        """The one that is given what the host asks for."""
        return self.current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        """Makes another one current."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def give(self, kind: str) -> int:
        """Gives something to the current stream; returns its number."""
        self.given.append(Given(kind, frozenset(self.current.over)))
        self.current.over.add(len(self.given) - 1)
        return len(self.given) - 1

    def collective(self, kind: str) -> Collective:
        """Gives something to a stream that nothing waits for by itself."""
        with self.stream(_Stream(self, set(self.current.over))):
            self.give(kind)
            return Collective(self, frozenset(self.current.over))

    def all_of(self, kind: str) -> list[int]:
        """Numbers of everything of one kind."""
        return [number for number, given in enumerate(self.given) if given.kind == kind]

    def comes_after(self, number: int, other: int) -> bool:
        """Whether one thing only begins when another is over."""
        return other in self.given[number].after

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        devices = {leaf.device.type for leaf in tree_leaves(list(args)) if isinstance(leaf, torch.Tensor)}
        if func is torch.ops.aten.copy_.default and len(devices) > 1:
            goes_up = args[0].device.type == DEVICE.type
            self.give("up" if goes_up else "down")
            if not goes_up and (kwargs or {}).get("non_blocking", len(args) > 2 and args[2]):
                return args[0]  # which the host may read once it has waited for an event
        return func(*args, **(kwargs or {}))
