"""Mechanism: brings the parameters of units to this rank just ahead of their use, and frees them after it.

Modules say what they are about to use in the forward pass, autograd in the backward pass: of weights that it saves,
only the place is kept where they can be found again, not the data. Whatever was used can therefore be freed at any
time; what is kept, freed and gathered ahead is a question of speed alone. Ranks agree on every gather, so that they
need not use the same units in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.comm import ProcessGroup
from lightning_parallel.zero.rounds import MEET, NOTHING, Rounds
from lightning_parallel.zero.unit_bucket import Presence, UnitBucket
from lightning_parallel.zero.units import Residency

__all__ = ["Unit", "UnitGatherer"]

_POLL_SECONDS = 2e-5
_LONGEST_POLL_SECONDS = 5e-4


@dataclass(eq=False)
class Unit:
    """Buckets that are gathered and freed together.

    Attributes:
        number: its place in the plan.
        buckets: one for each kind of parameters.
        running: how often its module has been entered and not left.
    """

    number: int
    buckets: list[UnitBucket] = field(default_factory=list)
    running: int = 0

    @property
    def is_away(self) -> bool:
        """Whether anything of it is not even on its way."""
        return any(bucket.presence is Presence.AWAY for bucket in self.buckets)

    @property
    def is_whole(self) -> bool:
        """Whether all parameters can be used."""
        return all(bucket.presence is Presence.HERE for bucket in self.buckets)

    def gather(self) -> None:
        """Begins to bring it here. Collective over the group."""
        for bucket in self.buckets:
            bucket.gather()

    def read_ahead(self) -> None:
        """It will be gathered soon."""
        for bucket in self.buckets:
            bucket.read_ahead()

    def complete(self) -> None:
        """Waits until it is here."""
        for bucket in self.buckets:
            bucket.complete()

    def drop(self) -> None:
        """Frees it."""
        for bucket in self.buckets:
            bucket.drop()


@dataclass(frozen=True)
class _SavedWeight:
    """Where autograd finds (a view of) a parameter again."""

    unit: Unit
    bucket: UnitBucket
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class UnitGatherer:
    """Gathers units over a group while steps and backward passes run.

    Args:
        scopes: number of a unit -> the module that computes with it. One more unit, the root, has none.
        group: the ranks that share the parameters, in a group that nothing else travels in.
        control: the same ranks on a host-side backend, in a group of its own too.
        prefetch: how many units are gathered ahead of their use.
    """

    def __init__(
        self,
        scopes: Mapping[int, nn.Module],
        group: ProcessGroup | None,
        control: ProcessGroup | None,
        prefetch: int = 1,
    ) -> None:
        self.group = group
        self.units = [Unit(number) for number in range(len(scopes) + 1)]
        self._residency = Residency(len(scopes), prefetch)
        self._rounds = Rounds(control)
        self._in_step = False
        self._in_backward = False
        self.is_free = False
        self._have_parted = False
        self._pinned = False
        self._last: Unit | None = None
        self._held: set[int] = set()  # units that were gathered or read ahead since they were freed
        self._running: set[int] = set()
        self._storages: dict[int, tuple[Unit, UnitBucket]] = {}
        self._hooks: list[Any] = []
        # Compiled functions call them, and would try to compile them too.
        self._saving = torch.compiler.disable(self._pack), torch.compiler.disable(self._unpack)
        for number, module in scopes.items():
            self._hook(self.units[number], module)

    @property
    def root(self) -> Unit:
        """The unit that is here during the whole step."""
        return self.units[self._residency.root]

    def _hook(self, unit: Unit, module: nn.Module) -> None:
        @torch.compiler.disable
        def before(module: nn.Module, args: Any) -> None:
            if self._in_step or self._in_backward:
                unit.running += 1
                self._running.add(unit.number)
                self.need(unit)

        @torch.compiler.disable
        def after(module: nn.Module, args: Any, output: Any) -> None:
            unit.running = max(0, unit.running - 1)
            if not unit.running:
                self._running.discard(unit.number)

        self._hooks.append(module.register_forward_pre_hook(before, prepend=True))
        self._hooks.append(module.register_forward_hook(after, always_call=True))

    def close(self) -> None:
        """Modules run without gathering anything again."""
        for handle in self._hooks:
            handle.remove()
        self._hooks = []

    # -------------------------------------------------------------- steps
    @contextmanager
    def step(self, kind: str, lockstep: bool = True) -> Iterator[None]:
        """Around what computes with parameters. May be nested.

        Args:
            kind: steps of one kind are expected to use units in the same order.
            lockstep: every rank enters and leaves it. Otherwise ranks take as many steps as they like, and `settle`
                before they do anything else together.
        """
        if self._in_step:
            yield
            return
        if lockstep:
            self.settle()
        self._residency.order.begin(kind)
        self._last, self._in_step = None, True
        for unit in self.units:
            unit.running = 0
        self._running.clear()
        try:
            with torch.autograd.graph.saved_tensors_hooks(*self._saving):
                self._begin_with_root()
                yield
            if lockstep:
                self.meet()
            self.is_free = not lockstep
        finally:
            self._in_step = False
        if not torch.is_grad_enabled():
            self.drop_all()

    def settle(self) -> None:
        """After steps that were not in lockstep: serves the others until all have taken theirs."""
        if self.is_free:
            self.meet()
            self.is_free = False

    def begin_backward(self) -> None:
        """A backward pass follows, in which modules may run again."""
        self._in_backward = True

    def end_backward(self) -> None:
        """It is over. Collective: every rank calls it."""
        self.meet()
        self.is_free = False
        self._in_backward = False
        if not self._in_step:
            self.drop_all()

    def need(self, unit: Unit) -> None:
        """A unit is used now: its parameters are whole afterwards, until another one is needed."""
        if unit is self._last and unit.is_whole:
            return
        if unit is self.root:
            self._bring(unit)
            return
        self._last = unit
        self._residency.order.use(unit.number)
        self._drop_but(self._residency.kept(unit.number, self._running))
        self._bring(unit)
        self._look_ahead()

    def _begin_with_root(self) -> None:
        while self.root.is_away:
            self._go_round(self.root.number)
        self._catch_up()  # the first unit travels behind it
        self._bring(self.root)

    def _bring(self, unit: Unit) -> None:
        while unit.is_away:
            self._go_round(unit.number)
        if not unit.is_whole:
            unit.complete()
            self._note_storages(unit)

    def _look_ahead(self) -> None:
        """Gathers what the last round asked for, and asks for what is expected after that."""
        if self._rounds.is_open:
            self._finish_round()
        self._catch_up()
        wanted = self._residency.wanted(self._here())
        if wanted is not None:
            self._rounds.post(wanted)
            self._held.add(wanted)
            self.units[wanted].read_ahead()

    def _catch_up(self) -> None:
        while (overdue := self._residency.overdue(self._here())) is not None:
            self._go_round(overdue)

    def _here(self) -> set[int]:
        return {number for number in self._held if not self.units[number].is_away}

    def _drop_but(self, kept: set[int]) -> None:
        if self._pinned:
            return
        for number in sorted(self._held - kept):
            self._drop(self.units[number])

    def drop_all(self) -> None:
        """Frees every unit, between steps."""
        self._last = None
        self._drop_but(set())

    def _drop(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            self._storages.pop(_storage_of(bucket.values), None)
        self._held.discard(unit.number)
        unit.drop()

    # -------------------------------------------------------------- agreement
    @property
    def is_asked(self) -> bool:
        """Whether another rank may want a unit: until all have been through their backward passes."""
        return self._in_backward

    @property
    def may_part(self) -> bool:
        """Whether ranks may want different units at a time: they take steps of their own, or have shown it before."""
        return self.is_free or self._have_parted

    def _go_round(self, wish: int) -> list[int]:
        if not self._rounds.is_open:
            self._rounds.post(wish)
        return self._finish_round()

    def _finish_round(self) -> list[int]:
        heard = self._rounds.finish()
        self._have_parted |= len(set(heard)) > 1
        for number in sorted({wish for wish in heard if wish >= 0}):
            self._held.add(number)
            self.units[number].gather()
        return heard

    def meet(self) -> None:
        """Serves the others until all ranks are here: to be called before they do something else together."""
        if self._rounds.is_open:
            self._finish_round()
        wanted = self._here()
        while set(self._go_round(MEET)) != {MEET}:
            self._drop_but(wanted)

    def serve_until(self, is_done: Callable[[], bool]) -> None:
        """Serves the others while this rank waits for something that depends on them."""
        pause = _POLL_SECONDS
        while not is_done():
            if not self._rounds.is_open:
                self._rounds.post(NOTHING)
            if self._rounds.is_done:
                self._finish_round()
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL_SECONDS)

    # -------------------------------------------------------------- what autograd saves
    def _note_storages(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            self._storages[_storage_of(bucket.values)] = unit, bucket

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter):
            return tensor, None
        found = self._storages.get(_storage_of(tensor))
        if found is None or tensor.dtype is not found[1].values.dtype or tensor.is_neg() or tensor.is_conj():
            return tensor, tensor._version
        unit, bucket = found
        return _SavedWeight(unit, bucket, bucket.version, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, _SavedWeight):
            _check_version(saved.version, saved.bucket.version)
            self.need(saved.unit)
            return saved.bucket.values.as_strided(saved.size, saved.stride, saved.offset)
        tensor, version = saved
        if version is not None:  # what autograd itself checks as long as nobody looks at what it saves
            _check_version(version, tensor._version)
        return tensor

    # -------------------------------------------------------------- between steps
    def forget(self, buckets: Iterable[UnitBucket]) -> None:
        """The shares of some buckets have changed: what is here of them is old. Collective over the group."""
        changed = set(map(id, buckets))
        for unit in self.units:
            old = [bucket for bucket in unit.buckets if id(bucket) in changed]
            for bucket in old:
                bucket.version += 1
                self._storages.pop(_storage_of(bucket.values), None)
                bucket.discard()
        if self._pinned:
            self._bring_all()
        elif self._in_step:
            self.meet()
            self._bring(self.root)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Inside, all parameters are whole and may be changed, in the same way on every rank. Collective."""
        if self._pinned:
            yield
            return
        if self._in_step or self._in_backward:
            self.meet()
        self.settle()
        self._pinned = True
        self._bring_all()
        try:
            yield
        finally:
            self._pinned = False
            for unit in self.units:
                for bucket in unit.buckets:
                    bucket.take_back()
            if not (self._in_step or self._in_backward):
                self.drop_all()

    def _bring_all(self) -> None:
        for unit in self.units:
            self._held.add(unit.number)
            unit.gather()
            unit.complete()
            self._note_storages(unit)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _check_version(saved: int, now: int) -> None:
    if saved != now:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: it was "
            f"saved at version {saved} and is at version {now}; torch.autograd.set_detect_anomaly(True) finds where"
        )
