"""Glue: what hooks see of parameters that are sharded over replicas: whole ones, or for averages this rank's shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_parallel.gradient_sync import GradientCompleter
from lightning_parallel.mesh import Mesh
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.hooks import does_something, hooks_of, wrap_hook
from lightning_parallel.strategies.partition import Partition
from lightning_parallel.strategies.whole_view import WeightsValue, WholeView
from lightning_parallel.whole.tensor import WholeParameter, WholeTensor
from lightning_parallel.zero.unit_sharder import UnitSharder

__all__ = ["UnitView", "show_shares_to_averages"]


class _SharedWeights(WeightsValue):
    """Values of one parameter, or of a copy of it; every replica has a share of them."""

    view: UnitView

    def __init__(self, view: UnitView, name: str, local: Tensor, copied: Tensor | None = None) -> None:
        self.copied = copied
        super().__init__(view, name, local)

    def _share(self) -> Tensor:
        return self.view.units.share_of(self.local) if self.copied is None else self.copied

    def gather(self) -> Tensor:
        bucket, place = self.view.units.bucket_of(self.local)
        return bucket.gather_one(place, self._share())

    def read(self) -> Tensor:
        if self.view.units.gatherer.is_free:
            raise RuntimeError(
                f"{self.name} cannot be read in a hook per batch while replicas are at batches of their own "
                "(prediction, validation with own samplers); read it in the step, or in a hook at the end of the epoch"
            )
        return super().read()

    @torch.no_grad()
    def write(self, whole: Tensor) -> None:
        self.view.reads.note_write(self.name)
        bucket, place = self.view.units.bucket_of(self.local)
        new = bucket.cut(place, whole)
        if self.copied is None:
            bucket.write(place, whole)
        elif new is not None:
            self.copied.copy_(new)

    def copy(self) -> _SharedWeights:
        return _SharedWeights(self.view, self.name, self.local, self._share().clone())


class _HeldGradient:
    """Gradient of one parameter, which this rank has in full if hooks look at gradients at all."""

    def __init__(self, local: Tensor) -> None:
        self.local = local

    def get(self) -> Tensor | None:
        return self.local.grad

    def set(self, gradient: Tensor | None) -> None:
        self.local.grad = gradient._whole() if isinstance(gradient, WholeTensor) else gradient

    def copy(self, value: Any) -> Any:
        return _HeldGradient(value.local)


class UnitView(WholeView):
    """The whole model, as user code between steps sees it.

    Args:
        partition: the module, whose units are sharded.
        optimizers: whose groups are shown, too.
    """

    runs_modules = True

    def __init__(self, partition: Partition, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        assert partition.units is not None, "only a module with units has parameters in shares"
        self.units: UnitSharder = partition.units
        completer = GradientCompleter(partition.local_parameters, partition.tags, partition.mesh)
        super().__init__(partition, completer, optimizers)

    @staticmethod
    def _readers(mesh: Mesh) -> Any:
        return mesh.data_control

    def _refuse_forwards(self, refuse: bool) -> None:
        """Whole parameters are all that a module of a replica needs."""

    def _make_stand_in(self, name: str, p: nn.Parameter) -> Tensor:
        return WholeParameter.of(_SharedWeights(self, name, p), _HeldGradient(p), self.outline(name, p.dtype), p.device)

    def _is_shown(self, name: str) -> bool:
        return True

    @contextmanager
    def shown(self, hook: str = "") -> Iterator[None]:
        """As everywhere; but in hooks per batch while replicas are at batches of their own, reading is an error."""
        if self.units.gatherer.is_free and "_batch_" not in hook:
            self.units.gatherer.settle()
        if not self.units.gatherer.is_free or self.reads.is_open:
            with super().shown(hook):
                yield
            return
        self._swap(True)
        try:
            yield
        finally:
            self._swap(False)

    @contextmanager
    def shares(self) -> Iterator[None]:
        """Inside, the module has this rank's shares for parameters, also if a hook that sees whole ones is running."""
        with self.hidden():
            self.units.gatherer.drop_all()
            places: list[tuple[dict[str, Any], str, Tensor]] = []
            for module in self.partition.module.modules():
                registry: dict[str, Any] = module._parameters
                places += [(registry, leaf, p) for leaf, p in registry.items() if p is not None]
            parameters = {id(p): p for _, _, p in places}
            shares = {key: nn.Parameter(self.units.share_of(p), requires_grad=False) for key, p in parameters.items()}
            for registry, leaf, p in places:
                registry[leaf] = shares[id(p)]
            try:
                yield
            finally:
                for registry, leaf, p in places:
                    registry[leaf] = p
                for key, p in parameters.items():
                    self.units.put_share(p, shares[key])


def show_shares_to_averages(trainer: Trainer, view: UnitView) -> Callable[[], None]:
    """Lets callbacks that average weights work on shares: element by element, that is the same.

    Returns:
        A function that undoes it.
    """
    undo: list[Callable[[], None]] = []
    holders = {id(holder) for holder, _, _ in _compat.module_copies(trainer)}
    for owner in _compat.callbacks_of(trainer):
        if id(owner) in holders or id(getattr(owner, "_average_model", None)) in holders:
            undo += [wrap_hook(owner, name, view.shares) for name in hooks_of(owner) if does_something(owner, name)]
    return partial(_undo_all, undo)


def _undo_all(undo: list[Callable[[], None]]) -> None:
    for step in reversed(undo):
        step()
    undo.clear()
