"""ZeRO written out for two processes and this model: a yardstick for what sharding takes without anything around it.

Nothing is general, checked or recoverable: gradients are summed as soon as a unit's backward pass is through, weights
are awaited by the unit that needs them, and every byte travels once, by a send and a receive straight into its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.benchmarks.bare_jobs import start_group, train
from tests.benchmarks.job import Run
from tests.benchmarks.model import GPT, loss_of, optimizer_of


class _Exchange:
    """A tensor goes to the other rank while one comes from it."""

    def __init__(self, mine: Tensor, theirs: Tensor, peer: int) -> None:
        self.works = [dist.irecv(theirs, peer), dist.isend(mine, peer)]

    def wait(self) -> None:
        for work in self.works:
            assert work is not None, "both ranks are in the group"
            work.wait()
        self.works = []


class _Unit:
    """Parameters that are gathered and reduced together: two halves, of which this rank owns one."""

    def __init__(self, modules: Sequence[nn.Module], rank: int) -> None:
        self.parameters = [p for module in modules for p in module.parameters()]
        self.peer = 1 - rank
        size = sum(p.numel() for p in self.parameters)
        half = (size + 1) // 2
        self.weights, self.gradients = torch.zeros(2, half), torch.zeros(2, half)
        self.rank = rank
        self.received = torch.empty(half)
        self.gathering: _Exchange | None = None
        self.reducing: _Exchange | None = None
        self.is_here = True
        self.waits_for = len(self.parameters)
        start = 0
        for p in self.parameters:
            place = slice(start, start + p.numel())
            self.weights.view(-1)[place] = p.detach().reshape(-1)
            p.data = self.weights.view(-1)[place].view(p.shape)
            p.grad = self.gradients.view(-1)[place].view(p.shape)
            p.register_post_accumulate_grad_hook(self.accumulated)
            start += p.numel()
        self.own = nn.Parameter(self.weights[rank].clone())
        self.own.grad = self.gradients[rank]

    def accumulated(self, parameter: Tensor) -> None:
        """Once per parameter and backward pass; the last one sends the peer its half of the gradients."""
        self.waits_for -= 1
        if self.waits_for == 0:
            self.reducing = _Exchange(self.gradients[self.peer], self.received, self.peer)
            self.completed()

    def completed(self) -> None:
        """The unit's backward pass is through."""

    def reduce(self) -> None:
        """The mean gradient of the own half is here."""
        assert self.reducing is not None, "the backward pass is over"
        self.reducing.wait()
        self.gradients[self.rank].add_(self.received).mul_(0.5)
        self.waits_for = len(self.parameters)

    def changed(self) -> None:
        """The own half has taken a step."""
        self.is_here = False
        self.gather()

    def gather(self) -> None:
        """Starts to fetch the other half."""
        if self.gathering is None and not self.is_here:
            self.weights.untyped_storage().resize_(self.weights.nbytes)
            self.weights[self.rank].copy_(self.own.detach())
            self.gathering = _Exchange(self.own.detach(), self.weights[self.peer], self.peer)

    def require(self) -> None:
        """All weights are here."""
        self.gather()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering, self.is_here = None, True


class _FreedUnit(_Unit):
    """Gives its weights back after use; stage 3."""

    def free(self) -> None:
        self.weights.untyped_storage().resize_(0)
        self.is_here = False

    def completed(self) -> None:
        self.free()

    def changed(self) -> None:
        """Comes when it is needed."""


def _units(model: GPT, rank: int, kind: type[_Unit]) -> list[_Unit]:
    ends = [[model.embedding], *([block] for block in model.blocks), [model.norm, model.head]]
    return [kind(modules, rank) for modules in ends]


def _steps(run: Run, model: GPT, units: list[_Unit]) -> list[Tensor]:
    plain = optimizer_of(model)
    optimizer = type(plain)([unit.own for unit in units], lr=plain.defaults["lr"])

    def step(ids: Tensor, target: Tensor) -> Tensor:
        for unit in units:
            unit.gradients.zero_()
        value = loss_of(model(ids), target)
        value.backward()
        for unit in reversed(units):
            unit.reduce()
        optimizer.step()
        for unit in units:
            unit.changed()
        return value

    return train(run, step, run.rank, run.ranks)


def optimizer_and_gradients(run: Run) -> list[Tensor]:
    """Stages 1 and 2: gradients go while the backward pass runs, weights come while the next forward pass does."""
    start_group()
    model = GPT(run.sizes)
    units = _units(model, run.rank, _Unit)
    for module, unit in zip([model.embedding, *model.blocks, model.norm], units, strict=True):
        module.register_forward_pre_hook(lambda *_, unit=unit: unit.require())
    return _steps(run, model, units)


def parameters_too(run: Run) -> list[Tensor]:
    """Stage 3: the next unit's weights come while one computes, in both directions."""
    start_group()
    model = GPT(run.sizes)
    units = _units(model, run.rank, _FreedUnit)

    def needs(place: int, step: int) -> None:
        units[place].require()
        if 0 <= place + step < len(units):
            units[place + step].gather()

    last = len(units) - 1
    for place, module in enumerate([model.embedding, *model.blocks, model.norm]):
        module.register_forward_pre_hook(lambda *_, place=place: needs(place, 1))
    for place, module in enumerate([model.embedding, *model.blocks, model.head]):
        if place != last:  # the last one is needed again at once
            module.register_forward_hook(lambda *_, place=place: units[place].free())
        module.register_full_backward_pre_hook(lambda *_, place=place: needs(place, -1))
    return _steps(run, model, units)
