"""Pure: optima read off sweeps of equal compute, by parabolas in log size (Hoffmann et al. 2022, approach 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_parallel.scaling.laws import DEFAULT_LAW, Law, get_law
from lightning_parallel.scaling.runs import Run

__all__ = ["IsoFlopFit", "Valley", "budgets_of", "fit_isoflops"]

SIZES_NEEDED = 3
BUDGETS_NEEDED = 2
SAME_BUDGET = 1.1
"""Runs whose compute differs by less than this factor belong to one budget."""


@dataclass(frozen=True)
class Valley:
    """Loss over log size at one budget.

    Attributes:
        flops: the budget.
        params: size at the bottom.
        tokens: tokens there.
        loss: loss at the bottom.
        coefficients: of the parabola in log10 of the size, highest power first.
        inside: whether the bottom lies among the sizes that were run, and not beyond them.
        runs: those of this budget, by size.
    """

    flops: float
    params: float
    tokens: float
    loss: float
    coefficients: tuple[float, float, float]
    inside: bool
    runs: tuple[Run, ...]

    def parabola(self, params: float) -> float:
        """Loss of a size on the parabola."""
        curve, slope, height = self.coefficients
        size = math.log10(params)
        return (curve * size + slope) * size + height


@dataclass(frozen=True)
class IsoFlopFit:
    """The valleys, and N_opt = coefficient * C^exponent through their bottoms."""

    valleys: tuple[Valley, ...]
    coefficient: float
    exponent: float

    def law(self, name: str = "isoflop", surface: Law | None = None) -> Law:
        """The allocation as a law; its losses are read on the surface of another law."""
        other = surface or get_law(DEFAULT_LAW)
        source = f"parabolas through {len(self.valleys)} budgets"
        return Law(name, source, self.coefficient, self.exponent, other.surface, other.surface_law)


def fit_isoflops(runs: Sequence[Run]) -> IsoFlopFit:
    """Fits a parabola per budget and a power law through their bottoms.

    Raises:
        ValueError: fewer than two budgets with three sizes each, or losses at a budget that have no lowest point within
            the sizes run or as far again beyond them.
    """
    groups = [group for group in _by_budget(runs) if len({run.params for run in group}) >= SIZES_NEEDED]
    if len(groups) < BUDGETS_NEEDED:
        raise ValueError(
            f"a power law of optima needs at least {BUDGETS_NEEDED} budgets with at least {SIZES_NEEDED} sizes each; "
            f"these {len(runs)} runs have {len(groups)} such budgets"
        )
    valleys = tuple(_valley(group) for group in groups)
    budgets = [math.log(valley.flops) for valley in valleys]
    exponent, start = np.polyfit(budgets, [math.log(valley.params) for valley in valleys], 1)
    return IsoFlopFit(valleys, math.exp(start), float(exponent))


def budgets_of(runs: Sequence[Run], most: int = 8) -> list[float]:
    """The budgets of runs, ascending; of more than ``most``, so many evenly chosen ones, the ends among them.

    >>> [f"{flops:.3g}" for flops in budgets_of([Run.of(1e6, 1e7, 3.0), Run.of(2e6, 5e6, 3.0), Run.of(1e6, 1e8, 2.5)])]
    ['6e+13', '6e+14']
    """
    budgets = [_mean_flops(group) for group in _by_budget(runs)]
    if len(budgets) <= most:
        return budgets
    return [budgets[round(place * (len(budgets) - 1) / (most - 1))] for place in range(most)]


def _mean_flops(group: Sequence[Run]) -> float:
    return math.exp(sum(math.log(run.flops) for run in group) / len(group))


def _by_budget(runs: Sequence[Run]) -> list[list[Run]]:
    groups: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: run.flops):
        if groups and run.flops <= SAME_BUDGET * groups[-1][0].flops:
            groups[-1].append(run)
        else:
            groups.append([run])
    return [sorted(group, key=lambda run: run.params) for group in groups]


def _valley(group: Sequence[Run]) -> Valley:
    flops = _mean_flops(group)
    # FLOPs may have been counted otherwise than 6ND.
    per_pair = math.exp(sum(math.log(run.flops / run.params / run.tokens) for run in group) / len(group))
    sizes = [math.log10(run.params) for run in group]
    middle = sum(sizes) / len(sizes)
    curve, slope, height = (float(c) for c in np.polyfit([x - middle for x in sizes], [r.loss for r in group], 2))
    # A parabola through losses that only fall is nearly a line, whose bottom is as far away as rounding has it.
    reach = sizes[-1] - sizes[0]
    bottom = middle - slope / (2 * curve) if curve > 0 else math.inf
    loss = height - slope**2 / (4 * curve) if curve > 0 else 0.0
    if not sizes[0] - reach <= bottom <= sizes[-1] + reach or loss <= 0:
        raise ValueError(
            f"the losses at {flops:.3g} FLOPs have no lowest point between {group[0].params:.3g} and "
            f"{group[-1].params:.3g} parameters; add smaller and larger models at this budget"
        )
    params = 10**bottom
    # Back from the centred variable, so that the curve can be drawn over log10 of the size.
    coefficients = (curve, slope - 2 * curve * middle, height - slope * middle + curve * middle**2)
    return Valley(
        flops,
        params,
        flops / (per_pair * params),
        loss,
        coefficients,
        sizes[0] <= bottom <= sizes[-1],
        tuple(group),
    )
