"""A module is turned into parts on every rank or on none: what stops halfway leaves it as it was, object by object."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.checkpoint.consolidate import ModelShards
from lightning_parallel.layout import ParallelLayout
from lightning_parallel.mesh import Mesh
from lightning_parallel.strategies.conversion import convert_module
from lightning_parallel.strategies.left_apart import refuse_left_apart
from lightning_parallel.tensor_parallel.plan import resolve_plan
from lightning_parallel.tensor_parallel.shards import all_gather_full, shard_tensor
from tests.glue.oracle import PLAN, Classifier, Samples, Site, assert_same, check, weights
from tests.harness import Ranks
from tests.harness.accelerator import lone_rank

LAST = 2
"""Number of the last block, which is converted after all others."""


class Trap(nn.Linear):
    """A linear that fails once: while it is converted, or while the converted model moves to its device."""

    set: list[tuple[str, type[BaseException]]]  # a list, so that what springs once stays sprung

    def spring(self, where: str) -> None:
        if self.set and self.set[0][0] == where:
            raise self.set.pop()[1]("trapped")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "in_features":
            self.spring("layer")
        super().__setattr__(name, value)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.spring("device")
        return super()._apply(*args, **kwargs)


def trapped(where: str, failure: type[BaseException], here: bool = True) -> Classifier:
    """A model whose conversion fails in the last block, or at a gradient that an earlier backward left there."""
    module = Classifier()
    last: Any = module.net.blocks[LAST].out
    last.__class__, last.set = Trap, []
    if here and where == "gradient":
        last.weight.grad = torch.zeros_like(last.weight)
    elif here:
        last.set.append((where, failure))
    return module


def picture(module: nn.Module) -> Any:
    """Everything that a conversion changes; the trainer's own marks on the module itself do not count."""
    children = [(name, type(child), sorted(vars(child))) for name, child in module.named_modules() if name]
    hooks = [len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules()]
    return children, hooks, {name: id(p) for name, p in module.named_parameters()}


def fails_then_trains(site: Site) -> Any:
    """Set-up fails on the last rank only, on whose stage the last block is; the same objects train afterwards."""
    module = Classifier()
    for where in ("layer", "gradient", "device") if site.layout is not None else ():
        last = site.layout[0] * site.layout[1] - 1
        module = trapped(where, MemoryError, site.rank == last)
        before, values = picture(module), weights(module)
        why = "MemoryError: trapped" if where != "gradient" else "ValueError: parameter .* has a gradient already"
        text = why.partition(": ")[2] if site.rank == last else f"set-up failed on rank {last} of this run: {why}"
        with pytest.raises((MemoryError, RuntimeError, ValueError), match=f"^{text}"):
            site.trainer().fit(module, site.loader(Samples(8), 4))
        assert picture(module) == before
        assert_same(weights(module), values, where, atol=0)
    site.trainer(max_epochs=1).fit(module, site.loader(Samples(8), 4))
    return weights(module)


def test_a_failure_on_one_rank_leaves_every_rank_its_whole_module(ranks: Ranks) -> None:
    check(ranks, fails_then_trains, (2, 2, 1))


@pytest.mark.parametrize("where", ["layer", "device"])
def test_what_cannot_be_agreed_on_takes_back_what_it_can(where: str) -> None:
    """An interrupt reaches one rank alone. Weights that are in parts then stay so, and the module tells it."""
    module = trapped(where, KeyboardInterrupt)
    before, values = picture(module), weights(module)
    with lone_rank(2):
        group = dist.group.WORLD
        mesh = Mesh(ParallelLayout(tensor=2), 0, torch.device("cpu"), world=group, tensor=group)
        plan = resolve_plan(module, PLAN, 2)
        keys = {name: name for name, _ in module.named_parameters()}
        shards = ModelShards(module, plan.tags(module), keys, mesh, None, all_gather_full, shard_tensor)
        with pytest.raises(KeyboardInterrupt):
            convert_module(module, shards, plan, None)
    if where == "layer":
        assert picture(module) == before
        assert_same(weights(module), values, where, atol=0)
        return
    assert [type(child) for child in module.modules()] == [Classifier, *(kind for _, kind, _ in before[0])]
    assert {name: id(p) for name, p in module.named_parameters()} == before[2]
    with pytest.raises(RuntimeError, match="left each rank's weights where they were"):
        refuse_left_apart(module)
