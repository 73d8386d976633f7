"""Glue: what user code sees of a split model: hooks the whole of it, steps this rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from lightning.pytorch import Trainer

from lightning_parallel.gradient_sync import GradientCompleter
from lightning_parallel.strategies.hooks import show_in_hooks
from lightning_parallel.strategies.partition import Partition
from lightning_parallel.strategies.unit_view import UnitView, show_shares_to_averages
from lightning_parallel.strategies.whole_view import WholeView
from lightning_parallel.tensor_parallel.guard import SplitParameterGuard
from lightning_parallel.zero.unit_sharder import UnitSharder

__all__ = ["Sight"]


class Sight:
    """Of one run; does nothing where every rank has the whole model."""

    def __init__(self) -> None:
        self._view: WholeView | None = None  # if ranks hold parts of the model
        self._guard: SplitParameterGuard | None = None  # if tensor ranks share parameters
        self._undo: list[Callable[[], None]] = []
        self._units: UnitSharder | None = None  # if replicas share parameters

    def open(self, trainer: Trainer, partition: Partition, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The module was split: from now on hooks see it whole, and steps are watched."""
        mesh = partition.mesh
        self._units = partition.units
        if self._units is not None:
            view = UnitView(partition, optimizers)
            self._view = view
            self._undo = [show_in_hooks(trainer, view), show_shares_to_averages(trainer, view)]
        if mesh.model is None:
            return
        completer = GradientCompleter(partition.local_parameters, partition.tags, mesh)
        self._view = WholeView(partition, completer, optimizers)
        self._undo = [show_in_hooks(trainer, self._view)]
        if mesh.tensor is not None:
            parts = {n for n, tag in partition.tags.items() if tag.shard is not None or tag.partial_gradient}
            names = {id(p): n for n, p in partition.local_parameters.items() if n in parts}
            self._guard = SplitParameterGuard(partition.module, partition.tensor_plan, names, mesh.layout.tensor)

    def close(self, meets: bool = True) -> None:
        """Hooks are the user's again.

        Args:
            meets: whether the other ranks come here too.
        """
        for undo in reversed(self._undo):
            undo()
        if self._units is not None:
            if meets:
                self._units.gatherer.settle()
            self._units.close()
            if not meets:
                self._units.discard()
        self._view, self._guard, self._undo, self._units = None, None, [], None

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Around what computes with this rank's part, also if a hook, which sees the whole model, asks for it."""
        view = nullcontext() if self._view is None else self._view.hidden()
        guard = nullcontext() if self._guard is None else self._guard.paused()
        with view, guard:
            yield

    @contextmanager
    def full(self) -> Iterator[None]:
        """Inside, parameters that replicas share are whole, also if a hook is running."""
        with self.hidden(), nullcontext() if self._units is None else self._units.gatherer.full():
            yield

    def watched(self, what: str, lockstep: bool = True) -> AbstractContextManager[None]:
        """Around the user's own step, named by `what`: it has parameters whole, or must not mistake parts for that.

        Args:
            what: name of the step.
            lockstep: whether every replica takes the same steps.
        """
        if self._units is not None:
            return self._units.step(what, lockstep)
        return nullcontext() if self._guard is None else self._guard.watching(what)

    def meet(self, apart: bool = False) -> None:
        """Before a collective that hooks may ask for, or that ends a loop.

        Args:
            apart: ranks took steps of their own, of which this one may have had none.
        """
        if self._units is not None:
            self._units.gatherer.is_free |= apart
            self._units.gatherer.settle()
        if self._view is not None:
            self._view.meet()

    def note_backward(self, complete: bool) -> None:
        """Whether gradients are final after a backward pass, or go on accumulating."""
        if self._view is not None:
            self._view.accumulating = not complete
            self._view.refuse_other_modules("training_step")
