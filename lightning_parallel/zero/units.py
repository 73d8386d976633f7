"""Pure: which parameters are gathered and freed together, in which order they are used, and what is in memory when.

A unit is what one module (a block, usually) computes with. Its parameters are whole on a rank from just before that
module runs, or its gradients are computed, until another unit is needed that is not expected next. What belongs to no
such module alone is the last unit, which is there during the whole step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Residency", "UnitPlan", "UseOrder", "plan_units"]


@dataclass(frozen=True)
class UnitPlan:
    """Units of a model, in the order of the model.

    Attributes:
        scopes: name of the module of each unit but the last.
        members: names of the parameters of each unit; those of the last one belong to no scope alone.
    """

    scopes: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]

    @property
    def root(self) -> int:
        """Number of the unit that is there during the whole step."""
        return len(self.scopes)

    def unit_of(self) -> dict[str, int]:
        """Number of the unit that each parameter belongs to."""
        return {name: number for number, names in enumerate(self.members) for name in names}


def plan_units(holders: Mapping[str, Collection[str]], scopes: Sequence[str]) -> UnitPlan:
    """Assigns every parameter to exactly one unit.

    Args:
        holders: name of each parameter -> names of all modules that hold it; several if it is tied.
        scopes: modules that get a unit, none inside of another. Those that hold no parameter alone get none.

    Raises:
        ValueError: a scope lies inside of another one.

    >>> plan_units({"a.w": ["a"], "b.w": ["b.x", "b.y"], "tied": ["a", "b.x"]}, ["a", "b"]).members
    (('a.w',), ('b.w',), ('tied',))
    """
    for scope in scopes:
        outer = next((other for other in scopes if scope.startswith(f"{other}.")), None)
        if outer is not None or scopes.count(scope) > 1:
            raise ValueError(f"unit {scope!r} lies inside of unit {outer or scope!r}; name only one of them")
    members: dict[str, list[str]] = {scope: [] for scope in scopes}
    rest: list[str] = []
    for name, modules in holders.items():
        found = {_scope_of(module, scopes) for module in modules}
        alone = found.pop() if len(found) == 1 else None
        (rest if alone is None else members[alone]).append(name)
    used = [scope for scope in scopes if members[scope]]
    return UnitPlan(tuple(used), (*(tuple(members[scope]) for scope in used), tuple(rest)))


def _scope_of(module: str, scopes: Sequence[str]) -> str | None:
    return next((scope for scope in scopes if module == scope or module.startswith(f"{scope}.")), None)


class UseOrder:
    """Expects each step of a kind to use units in the order of the last step of that kind.

    >>> order = UseOrder()
    >>> for _ in range(2):
    ...     order.begin("train")
    ...     for unit in (0, 1, 0):
    ...         order.use(unit)
    >>> order.begin("train"); order.use(0); order.upcoming(2)
    (1, 0)
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...]] = {}
        self._kind = ""
        self._log: list[int] = []
        self._expected: tuple[int, ...] = ()
        self._position = 0

    def begin(self, kind: str) -> None:
        """A step begins."""
        if self._log:
            self._known[self._kind] = tuple(self._log)
        self._kind, self._log, self._position = kind, [], 0
        self._expected = self._known.get(kind, ())

    def use(self, unit: int) -> None:
        """A unit is used now. What was expected before it is not expected any more."""
        if self._log and self._log[-1] == unit:
            return
        self._log.append(unit)
        if self.upcoming(1) == (unit,):
            self._position += 1
        elif unit in self._expected[self._position :]:
            self._position = self._expected.index(unit, self._position) + 1

    def upcoming(self, count: int) -> tuple[int, ...]:
        """The next units, at most so many."""
        return self._expected[self._position : self._position + count]


class Residency:
    """Decides which units are kept, freed and asked for ahead.

    At one time there are the root, units whose module is running, the one in use, and at most `prefetch` that are
    expected next.

    Args:
        root: number of the root unit.
        prefetch: how many units are gathered ahead of their use.

    Raises:
        ValueError: a negative number of units.
    """

    def __init__(self, root: int, prefetch: int) -> None:
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch} is not a number of units; use 0 or more")
        self.root = root
        self.prefetch = prefetch
        self.order = UseOrder()

    def kept(self, unit: int, running: Collection[int]) -> set[int]:
        """The units that stay when a unit is about to be used."""
        return {self.root, unit, *running, *self.order.upcoming(self.prefetch)}

    def overdue(self, here: Collection[int]) -> int | None:
        """The first unit that should be on its way by now, and is not: after a surprise, or at the start."""
        return next((unit for unit in self.order.upcoming(self.prefetch) if unit not in here), None)

    def wanted(self, here: Collection[int]) -> int | None:
        """The unit to ask for next: the first expected one that is not here.

        One more than `prefetch` is looked at, because what is asked for now is agreed on while the current unit is
        used, and gathered when the next one is.
        """
        return next((unit for unit in self.order.upcoming(self.prefetch + 1) if unit not in here), None)
