"""Mechanism: find how each region's forward runs on local shapes, and prove it by rehearsal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_parallel.tensor_parallel.calls import (
    Material,
    captured_calls,
    direct_calls,
    forward_names,
    random_module,
)
from lightning_parallel.tensor_parallel.heads import patch_sets
from lightning_parallel.tensor_parallel.rehearsal import Bench, Bypassed, Call, Mismatch, Rehearsal, Trial
from lightning_parallel.tensor_parallel.rules import HeadPatch, ModuleRule, Region
from lightning_parallel.tensor_parallel.styles import Heads

__all__ = ["Subject", "Uncallable", "fit_region", "has_dropout", "structure_key"]

_DOUBLE_BELOW = 8_000_000
_THIN_ABOVE = 64_000_000
_LARGEST_MATRIX = 1_000_000_000
# Attributes that only number a module, and would make every block a case of its own.
_NUMBERED = re.compile(r"layer|idx|index|(^|_)(i|id|no|number)$")


class Uncallable(Exception):
    """No arguments are known with which the region's module runs."""


@dataclass(frozen=True)
class Subject:
    """A region of a model with what the plan does to its layers."""

    model: nn.Module
    region: Region
    rules: Mapping[str, ModuleRule]
    heads: Heads | None
    ranks: int

    @property
    def module(self) -> nn.Module:
        """The module that holds the region."""
        return self.model.get_submodule(self.region.name)

    def relative(self, name: str) -> str:
        """A full name as seen from the region's module."""
        return name[len(self.region.name) :].lstrip(".") if self.region.name else name

    def absolute(self, name: str) -> str:
        """The full name of a relative one."""
        return ".".join(part for part in (self.region.name, name) if part)

    def bench(self) -> Bench:
        """Relative names and shards for a rehearsal."""
        region = self.region
        shards = {
            self.relative(f"{name}.{leaf}"): spec
            for name in (*region.columns, region.row)
            for leaf, spec in self.rules[name].shards
        }
        return Bench(self.ranks, tuple(map(self.relative, region.columns)), self.relative(region.row), shards)

    def inner_modules(self) -> dict[str, nn.Module]:
        """Modules of the region whose attributes may hold head counts: all but the layers of the plan."""
        layers = {self.relative(name) for name in (*self.region.columns, self.region.row)}
        return {name: module for name, module in self.module.named_modules() if name not in layers}

    def input_width(self, place: int) -> int:
        """Input size of one of the region's columns."""
        name = self.region.columns[place]
        weight = self.model.get_submodule(name).weight
        assert isinstance(weight, nn.Parameter), "a Linear has a weight"
        return int(weight.shape[1 - self.rules[name].shards[0][1].dim])


def fit_region(subject: Subject) -> Region:
    """The region with the fewest changes under which the ranks together compute what the whole module computes.

    Weights are random, for more than 64M parameters along the split dimension only, so that they need little memory.

    Raises:
        Uncallable: the module cannot be called on its own.
        Mismatch: no set of changes works; the text is about the most promising one. Or the module does not call its
            layers.
    """
    rehearsal = _rehearsal(subject)
    best: Mismatch | None = None
    for trial in _trials(subject, rehearsal):
        try:
            rehearsal.check(trial)
            partial = rehearsal.partial_parameters(trial)
        except Mismatch as error:
            # The head counts alone are what a user would expect to change: tell why that is not enough.
            if best is None or (trial.patches and not trial.stand_in and not trial.local_views):
                best = error
            continue
        return replace(
            subject.region,
            patches=tuple(replace(patch, module=subject.absolute(patch.module)) for patch in trial.patches),
            shared=tuple(tuple(map(subject.absolute, names)) for names in rehearsal.shared_columns()),
            stand_in=trial.stand_in,
            local_views=trial.local_views,
            partial=tuple(map(subject.absolute, partial)),
            random=rehearsal.draws_random_numbers,
            evidence="checked",
        )
    assert best is not None, "there is always a trial without changes"
    raise best


def structure_key(subject: Subject) -> object:
    """Equal for regions that differ in nothing that a fit depends on, such as the same module in another block."""
    module = subject.module
    layers = tuple(
        (name, type(child), _plain_attributes(child), _own_forward(child)) for name, child in module.named_modules()
    )
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters(remove_duplicate=False))
    bench = subject.bench()
    shards = tuple(sorted((name, spec) for name, spec in bench.shards.items()))
    return layers, shapes, bench.columns, bench.row, shards


def has_dropout(module: nn.Module) -> bool:
    """Whether a dropout module or a number called dropout inside ``module`` is above zero."""
    for child in module.modules():
        rates = [value for name, value in vars(child).items() if "drop" in name and isinstance(value, float)]
        if "Dropout" in type(child).__name__:
            rates.append(float(getattr(child, "p", 1.0)))
        if any(rate > 0 for rate in rates):
            return True
    return False


def _own_forward(module: nn.Module) -> tuple[object, bool] | None:
    """A forward that was replaced on the object, and whether it is the object's own method."""
    forward = vars(module).get("forward")
    if forward is None:
        return None
    return getattr(forward, "__func__", forward), getattr(forward, "__self__", None) is module


def _plain_attributes(module: nn.Module) -> tuple[tuple[str, object], ...]:
    return tuple(
        (key, value)
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and not _NUMBERED.search(key)
    )


def _rehearsal(subject: Subject) -> Rehearsal:
    sizes = [p.numel() for p in subject.module.parameters()]
    kind = type(subject.module).__name__
    if max(sizes) > _LARGEST_MATRIX:
        raise Uncallable(f"{kind} holds a parameter of {max(sizes):,} elements, too many to rehearse with")
    materials = [Material(torch.float32, thin=sum(sizes) > _THIN_ABOVE)]
    if sum(sizes) <= _DOUBLE_BELOW:  # some forwards insist on single precision, so that stays second
        materials.insert(0, Material(torch.float64))
    bench = subject.bench()
    split_dims = {name: spec.dim for name, spec in bench.shards.items()}
    reason: Mismatch | None = None
    for material in materials:
        for call in _calls(subject, material):
            try:
                copy = random_module(subject.module, material, split_dims)
                return Rehearsal(copy, bench, call, forward_names(subject.module))
            except Bypassed:
                raise
            except Mismatch as error:
                reason = error
    raise Uncallable(f"{kind} could not be run on its own ({reason or 'its arguments are not known'})") from reason


def _calls(subject: Subject, material: Material) -> Iterator[Call]:
    """What the model itself passes comes first: it may be more than the signature asks for."""
    width = subject.input_width(0)
    if subject.region.name:
        yield from captured_calls(subject.model, subject.region.name, width, material)
    yield from direct_calls(subject.module, width, subject.input_width(-1), material)


def _trials(subject: Subject, rehearsal: Rehearsal) -> Iterator[Trial]:
    sets: list[tuple[HeadPatch, ...]] = list(patch_sets(subject.inner_modules(), subject.heads, subject.ranks))
    yield from (Trial(patches) for patches in sets)
    stand_in = rehearsal.stand_in_names()
    if stand_in and all(subject.input_width(i) % subject.ranks == 0 for i in range(len(subject.region.columns))):
        yield from (Trial(patches, stand_in) for patches in sets)
    yield from (Trial(patches, local_views=True) for patches in sets)
