"""Pure: from what is fixed (a budget, device hours, a loss, a model or data) to parameters, tokens and steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from lightning_parallel.scaling.checks import BUDGETS, COUNTS, check_range
from lightning_parallel.scaling.laws import DEFAULT_LAW, FLOPS_PER_PARAM_AND_TOKEN, Law, get_law
from lightning_parallel.scaling.speeds import RATES, first_speed

__all__ = ["SizingGoal", "SizingPlan", "Suggestion", "suggestion"]


@dataclass(frozen=True)
class Suggestion:
    """Batch and learning rate for a budget (DeepSeek-AI 2024, arXiv 2401.02954, eq. 1).

    Attributes:
        batch_tokens: tokens per optimizer step, 0.2920 C^0.3271.
        learning_rate: peak rate for Adam, 0.3118 C^-0.1250.
    """

    batch_tokens: float
    learning_rate: float


def suggestion(flops: float) -> Suggestion:
    """Batch and learning rate for a budget.

    >>> found = suggestion(1e20)
    >>> round(found.batch_tokens), round(found.learning_rate, 6)
    (1017145, 0.000986)
    """
    return Suggestion(0.2920 * flops**0.3271, 0.3118 * flops**-0.1250)


@dataclass(frozen=True)
class SizingPlan:
    """A run's size.

    Attributes:
        params: parameters, of the model that is built.
        tokens: tokens to train on, a whole number of steps.
        steps: optimizer steps.
        flops: 6 params tokens.
        loss: predicted loss.
        law: name of the law.
        why: one sentence.
    """

    params: float
    tokens: float
    steps: int
    flops: float
    loss: float
    law: str
    why: str


@dataclass(frozen=True)
class SizingGoal:
    """What a run is to be sized by. At most one of ``flops``, ``device_hours`` and ``loss``; ``tokens`` alone.

    Attributes:
        flops: training budget.
        device_hours: hours of all devices together, times ``flops_per_second``.
        flops_per_second: what one device really does per second, 6 FLOPs per parameter and token: a number, or the file
            of a `ThroughputMonitor(table=...)`, whose first measurement counts.
        loss: the cheapest run that reaches this loss.
        tokens: data that exists; the model is chosen for one pass over it.
        law: name of a law, or a `Law` of a fit of one's own.
    """

    flops: float | None = None
    device_hours: float | None = None
    flops_per_second: float | str | Path | None = None
    loss: float | None = None
    tokens: float | None = None
    law: str | Law = DEFAULT_LAW

    def __post_init__(self) -> None:
        given = [name for name in ("flops", "device_hours", "loss", "tokens") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each determine the size of a run; give one of them")
        if (self.device_hours is None) != (self.flops_per_second is None):
            raise ValueError(
                "device_hours become a budget by flops_per_second, what one device really does; give both, for example "
                "device_hours=100, flops_per_second=4e14"
            )
        if self.flops is not None:
            check_range("flops", self.flops, BUDGETS, "1e18")
        if self.tokens is not None:
            check_range("tokens", self.tokens, COUNTS, "1e10")
        if self.device_hours is not None:
            check_range("device_hours", self.device_hours, (1e-9, 1e15), "100")
        if isinstance(self.flops_per_second, int | float):
            check_range("flops_per_second", self.flops_per_second, RATES, "4e14")
            self._device_flops()
        get_law(self.law)

    def _device_flops(self) -> float:
        rate = self.flops_per_second
        assert self.device_hours is not None, "comes with a rate"
        assert rate is not None, "comes with hours"
        each = first_speed(rate).flops_per_second if isinstance(rate, str | Path) else rate
        return check_range("device_hours x flops_per_second", self.device_hours * 3600 * each, BUDGETS, "100 x 4e14")

    @property
    def budget(self) -> float | None:
        """FLOPs of the run; None if the model alone decides."""
        law = get_law(self.law)
        if self.flops is not None:
            return self.flops
        if self.device_hours is not None:
            return self._device_flops()
        if self.loss is not None:
            return law.compute_for(self.loss).flops
        if self.tokens is not None:
            # N = k C^a and C = 6ND together: the budget for which these tokens are the optimal ones.
            scaled = FLOPS_PER_PARAM_AND_TOKEN * self.tokens * law.coefficient
            return float(scaled ** (1 / (1 - law.exponent)))
        return None

    def params(self) -> float:
        """Parameters to look for.

        Raises:
            ValueError: nothing that would determine them was given.
        """
        if self.budget is None:
            raise ValueError(
                "nothing determines the size of the model; give flops, device_hours with flops_per_second, loss or "
                "tokens, for example SizingGoal(flops=1e18)"
            )
        return get_law(self.law).optimal_params(self.budget)

    def plan(self, params: float, tokens_per_step: int) -> SizingPlan:
        """Tokens and steps for a model of ``params`` parameters, chosen or fixed.

        Raises:
            ValueError: not one step fits.
        """
        law = get_law(self.law)
        if self.tokens is not None:
            wanted, why = self.tokens, f"one pass over {self.tokens:.4g} tokens"
        elif self.budget is not None:
            wanted = self.budget / (FLOPS_PER_PARAM_AND_TOKEN * params)
            why = f"{self.budget:.4g} FLOPs"
            why += f" for a loss of {self.loss:.4g}" if self.loss is not None else ""
            why += f" in {self.device_hours:g} device hours" if self.device_hours is not None else ""
        else:
            wanted, why = law.tokens_for(params), "a model of fixed size"
        # A relative 1e-9 keeps a budget of exactly k steps from losing one to rounding.
        steps = math.floor(wanted / tokens_per_step * (1 + 1e-9))
        if steps < 1:
            raise ValueError(
                f"{why}: {wanted:.4g} tokens for {params:.4g} parameters are less than one step of {tokens_per_step}; "
                f"use at most {max(1, math.floor(wanted))} tokens per step or a larger budget"
            )
        tokens = float(steps * tokens_per_step)
        flops = FLOPS_PER_PARAM_AND_TOKEN * params * tokens
        best = law.pair(flops)
        text = (
            f"{why}: {params:.4g} parameters on {tokens:.4g} tokens in {steps} steps, {tokens / params:.3g} tokens per "
            f"parameter where the law {law.name!r} has {best.tokens_per_param:.3g} ({law.source})"
        )
        return SizingPlan(params, tokens, steps, flops, law.surface(params, tokens), law.name, text)
