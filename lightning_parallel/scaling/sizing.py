"""Pure: is a run well sized: the verdict on a pair, models trained longer to be cheap to use, tables of budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_parallel.scaling.checks import COUNTS, check_range
from lightning_parallel.scaling.laws import DEFAULT_LAW, FLOPS_PER_PARAM_AND_TOKEN, LAWS, Law, Optimum, get_law, optimal
from lightning_parallel.scaling.surfaces import ParametricLoss

__all__ = ["BUDGETS_OF_NOTE", "Lifetime", "Verdict", "budget_table", "lifetime_optimal", "minimise", "verdict"]

BUDGETS_OF_NOTE = (1e20, 5.6e21, 3.6e23, 2e25)
NEAR = 2.0
"""Within this factor of the optimal tokens per parameter a pair is near-optimal: there the loss curve is flat."""
INFERENCE_FLOPS = 2
"""FLOPs per parameter and token of a forward pass."""


@dataclass(frozen=True)
class Verdict:
    """How a pair compares with the optimum of the same compute.

    Attributes:
        verdict: "undertrained", "near-optimal" or "overtrained".
        params: parameters N.
        tokens: training tokens D.
        ratio: tokens per parameter over those of the optimum; below 1/2 undertrained, above 2 overtrained.
        loss: predicted loss of the pair.
        tokens_for_params: tokens for which this size would be optimal.
        optimal: the optimal pair of the same compute, 6ND.
    """

    verdict: str
    params: float
    tokens: float
    ratio: float
    loss: float
    tokens_for_params: float
    optimal: Optimum

    def __str__(self) -> str:
        best = self.optimal
        return (
            f"{self.verdict}: {self.tokens / self.params:.3g} tokens per parameter are {self.ratio:.2g} times the "
            f"{best.tokens_per_param:.3g} that the law {best.law!r} gives for {best.flops:.3g} FLOPs; optimal are "
            f"{best.params:.4g} parameters on {best.tokens:.4g} tokens (loss {best.loss:.4f} instead of "
            f"{self.loss:.4f} by {best.loss_law!r}), and {self.params:.4g} parameters would need "
            f"{self.tokens_for_params:.4g} tokens"
        )


def verdict(params: float, tokens: float, law: str | Law = DEFAULT_LAW) -> Verdict:
    """Judges a pair by its tokens per parameter.

    >>> verdict(175e9, 300e9).verdict, verdict(70e9, 1.4e12).verdict, verdict(6.7e9, 1e12).verdict
    ('undertrained', 'near-optimal', 'overtrained')

    Raises:
        ValueError: counts that are no numbers, negative or absurd.
    """
    check_range("params", params, COUNTS, "70e9")
    check_range("tokens", tokens, COUNTS, "1.4e12")
    judge = get_law(law)
    best = judge.pair(FLOPS_PER_PARAM_AND_TOKEN * params * tokens)
    ratio = tokens / params / best.tokens_per_param
    word = "undertrained" if ratio < 1 / NEAR else "overtrained" if ratio > NEAR else "near-optimal"
    return Verdict(word, params, tokens, ratio, judge.surface(params, tokens), judge.tokens_for(params), best)


def budget_table(budgets: Sequence[float] = BUDGETS_OF_NOTE, laws: Sequence[Law] = LAWS) -> list[list[Optimum]]:
    """One row of optima per budget, one column per law."""
    return [[optimal(flops, law) for law in laws] for flops in budgets]


@dataclass(frozen=True)
class Lifetime:
    """The pair of a given loss that costs least over training and use.

    Attributes:
        params: parameters N.
        tokens: training tokens D.
        training_flops: 6 N D.
        inference_flops: 2 N per token served.
        saved: share of the lifetime compute that is saved over the pair that is cheapest to train.
        law: whose loss surface was used.
    """

    params: float
    tokens: float
    training_flops: float
    inference_flops: float
    saved: float
    law: str


def lifetime_optimal(loss: float, inference_tokens: float, law: str | Law = DEFAULT_LAW) -> Lifetime:
    """The smaller model, trained longer, that minimises 6ND + 2N T at a loss (Sardana et al. 2024, eq. 3).

    Args:
        loss: the quality wanted, in nats per token.
        inference_tokens: T, tokens that the model will read and write in its life.
        law: whose loss surface to use.

    >>> goal = optimal(5.76e23)
    >>> best = lifetime_optimal(goal.loss, 5e12)
    >>> best.params < goal.params and best.tokens > goal.tokens and 0 < best.saved < 1
    True
    """
    check_range("inference_tokens", inference_tokens, (0.0, COUNTS[1]), "1e13")
    judge = get_law(law)
    surface = judge.surface
    if not isinstance(surface, ParametricLoss):
        raise ValueError(f"law={judge.name!r} has no loss E + A/N^alpha + B/D^beta; use {DEFAULT_LAW!r}")
    start = judge.compute_for(loss)

    def cost(log_params: float) -> float:
        params = math.exp(log_params)
        tokens = surface.tokens_to_reach(loss, params)
        return params * (FLOPS_PER_PARAM_AND_TOKEN * tokens + INFERENCE_FLOPS * inference_tokens)

    # Below this size no amount of data reaches the loss.
    smallest = (surface.A / (loss - surface.E)) ** (1 / surface.alpha)
    chosen = minimise(cost, math.log(smallest), math.log(max(start.params, smallest)) + math.log(100))
    params = math.exp(chosen)
    tokens = surface.tokens_to_reach(loss, params)
    at_start = start.flops + INFERENCE_FLOPS * start.params * inference_tokens
    return Lifetime(
        params,
        tokens,
        FLOPS_PER_PARAM_AND_TOKEN * params * tokens,
        INFERENCE_FLOPS * params * inference_tokens,
        max(0.0, 1 - cost(chosen) / at_start),
        judge.surface_law,
    )


def minimise(function: Callable[[float], float], low: float, high: float, steps: int = 200) -> float:
    """Where a function with one valley is lowest, by golden sections.

    >>> round(minimise(lambda x: (x - 3) ** 2, 0, 10), 6)
    3.0
    """
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(steps):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = function(right)
    return (low + high) / 2
