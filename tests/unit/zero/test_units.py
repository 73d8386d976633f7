"""Units of parameters: everyone in exactly one; what is in memory when, over random orders of use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_parallel.zero.unit_scopes import find_scopes, plan_model
from lightning_parallel.zero.units import Residency, plan_units

SCOPES = ("a", "b", "c.0", "c.1")
modules = st.sampled_from(["", "a", "a.x", "ab", "b", "b.y", "c", "c.0", "c.0.z", "c.1", "c.10"])
sequences = st.lists(st.integers(0, 5), min_size=1, max_size=30)


@given(st.lists(st.lists(modules, min_size=1, max_size=3), max_size=12))
def test_every_parameter_is_in_one_unit_which_its_modules_share(held: list[list[str]]) -> None:
    holders = {str(number): modules for number, modules in enumerate(held)}
    plan = plan_units(holders, SCOPES)
    units = plan.unit_of()
    assert sorted(units) == sorted(holders)
    assert sum(len(names) for names in plan.members) == len(holders)
    assert all(plan.members[: plan.root]), "no unit but the root is empty"
    for name, unit in units.items():
        inside = {
            next((s for s in SCOPES if module == s or module.startswith(f"{s}.")), None) for module in holders[name]
        }
        assert {plan.scopes[unit] if unit < plan.root else None} == (inside if len(inside) == 1 else {None})


@pytest.mark.parametrize("scopes", [("a", "a.b"), ("a", "a")])
def test_units_do_not_overlap(scopes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"unit 'a(\.b)?' lies inside of unit 'a'; name only one of them"):
        plan_units({}, scopes)


def walk(residency: Residency, sequence: list[int]) -> tuple[int, int]:
    """Uses units one after another; how many were not there in time, and the most that were there at once."""
    root = residency.root
    residency.order.begin("train")
    here: set[int] = {root}
    asked: int | None = None
    late, most = 0, 0
    for last, unit in zip([None, *sequence], sequence, strict=False):
        if unit == last:
            continue
        residency.order.use(unit)
        here &= residency.kept(unit, [])
        late += unit not in here
        here |= {unit} | ({asked} if asked is not None else set())
        while (overdue := residency.overdue(here)) is not None:
            here.add(overdue)
        asked = residency.wanted(here)
        most = max(most, len(here - {root}))
    return late, most


@given(sequences, sequences, st.integers(0, 3))
def test_few_units_are_here_and_those_expected_come_in_time(one: list[int], other: list[int], prefetch: int) -> None:
    residency = Residency(root=6, prefetch=prefetch)
    for sequence in (one, one, other, one):
        # One more has been asked for where the order turned out to be another one.
        assert walk(residency, sequence)[1] <= prefetch + 2
    late, most = walk(residency, one)
    assert prefetch == 0 or late == 1, "nobody could ask for the first one"
    assert most <= prefetch + 1


def test_a_negative_number_of_units_is_refused() -> None:
    with pytest.raises(ValueError, match="prefetch=-1 is not a number of units"):
        Residency(0, -1)


class Model(nn.Module):
    """Blocks in a list, a plain stack inside of another, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 4) for _ in range(2))
        self.stack = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.ModuleDict({}))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_children_of_lists_and_stacks_get_units() -> None:
    model = Model()
    assert find_scopes(model) == ("blocks.0", "blocks.1", "stack.0", "stack.1.0")
    plan = plan_model(model)
    assert plan.members[-1] == ("embedding.weight",)
    assert plan.members[3] == ("stack.1.0.weight", "stack.1.0.bias")
    assert plan_model(model, "blocks.*").scopes == ("blocks.0", "blocks.1")
    model.blocks.append(nn.ParameterList([model.head.weight]))
    assert find_scopes(model) == ("blocks.0", "blocks.1", "stack.0", "stack.1.0"), (
        "what is never called gathers nothing"
    )
    with pytest.raises(ValueError, match=r"unit 'blocks.2' is a ParameterList, which is never called, so that its"):
        plan_model(model, "blocks.*")
    del model.blocks[2]
    model.stack[0].weight = model.blocks[0].linear1.weight
    assert plan_model(model).members[-1] == ("embedding.weight", "blocks.0.linear1.weight")


def test_modules_that_take_no_hooks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="1 is a module of TorchScript, which stage 3 of ZeRO cannot tell when"):
        plan_model(model)
