"""Pure: published laws of compute-optimal training: how a budget of FLOPs divides into parameters and tokens.

Every law is one power law N_opt = coefficient * C^exponent with D_opt = C / (6 N_opt), so that 6ND = C holds exactly.
Laws that publish no loss are read on the loss surface of the default law, and every answer says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_parallel.scaling.checks import BUDGETS, COUNTS, check_range
from lightning_parallel.scaling.surfaces import PETAFLOP_DAY, KaplanLoss, LossSurface, ParametricLoss

__all__ = [
    "DEFAULT_LAW",
    "LAWS",
    "LAW_NAMES",
    "Law",
    "Optimum",
    "compute_for",
    "get_law",
    "loss",
    "optimal",
    "spread",
    "tokens_for",
]

DEFAULT_LAW = "besiroglu"
FLOPS_PER_PARAM_AND_TOKEN = 6
MIDDLE_OF_THE_RUNS = math.sqrt(6e18 * 3e21)
"""Geometric middle of the budgets that Hoffmann et al. swept: there exponent and coefficient are independent."""


@dataclass(frozen=True)
class Optimum:
    """The best pair for a budget, by one law.

    Attributes:
        params: parameters N.
        tokens: training tokens D.
        flops: the budget, 6 N D.
        loss: predicted loss in nats per token, on the surface of ``loss_law``.
        law: name of the law.
        loss_law: name of the law whose loss surface was read.
        params_interval: 80% interval from the published interval of the exponent; None if none was published.
        tokens_interval: likewise.
    """

    params: float
    tokens: float
    flops: float
    loss: float
    law: str
    loss_law: str
    params_interval: tuple[float, float] | None = None
    tokens_interval: tuple[float, float] | None = None

    @property
    def tokens_per_param(self) -> float:
        """D / N."""
        return self.tokens / self.params


@dataclass(frozen=True)
class Law:
    """One published law.

    Attributes:
        name: how it is asked for.
        source: where its constants were printed.
        coefficient: of N_opt = coefficient * C^exponent, C in FLOPs.
        exponent: likewise.
        surface: loss of any pair, optimal or not.
        surface_law: whose surface it is.
        exponent_interval: 80% interval of the exponent, where one was published.
    """

    name: str
    source: str
    coefficient: float
    exponent: float
    surface: LossSurface
    surface_law: str
    exponent_interval: tuple[float, float] | None = None

    @classmethod
    def from_surface(
        cls, name: str, source: str, surface: ParametricLoss, interval: tuple[float, float] | None = None
    ) -> Law:
        """The law that minimises a parametric loss under 6ND = C (Hoffmann et al. 2022, eq. 4)."""
        return cls(name, source, surface.coefficient, surface.exponent, surface, name, interval)

    def optimal_params(self, flops: float) -> float:
        """N_opt of a budget."""
        return float(self.coefficient * flops**self.exponent)

    def optimal(self, flops: float) -> Optimum:
        """The pair for a budget, with loss and interval.

        Raises:
            ValueError: a budget that is no number, negative or absurd.
        """
        return self.pair(check_range("flops", flops, BUDGETS, "5.76e23"))

    def pair(self, flops: float) -> Optimum:
        """As ``optimal``, for budgets of any size: what the first step of a run has spent is absurdly little."""
        params = self.optimal_params(flops)
        tokens = flops / (FLOPS_PER_PARAM_AND_TOKEN * params)
        around = self._interval(flops, params)
        return Optimum(
            params,
            tokens,
            flops,
            self.surface(params, tokens),
            self.name,
            self.surface_law,
            around,
            None if around is None else (params * tokens / around[1], params * tokens / around[0]),
        )

    def _interval(self, flops: float, params: float) -> tuple[float, float] | None:
        if self.exponent_interval is None:
            return None
        distance = flops / MIDDLE_OF_THE_RUNS
        bounds = [params * distance ** (end - self.exponent) for end in self.exponent_interval]
        return min(*bounds, params), max(*bounds, params)

    def tokens_for(self, params: float) -> float:
        """Tokens that make a model of this size the optimal one for what its training costs."""
        check_range("params", params, COUNTS, "70e9")
        flops = (params / self.coefficient) ** (1 / self.exponent)
        return float(flops / (FLOPS_PER_PARAM_AND_TOKEN * params))

    def compute_for(self, loss: float) -> Optimum:
        """The cheapest pair with this loss.

        Raises:
            ValueError: no budget reaches the loss, or a negligible one does.
        """
        floor = self.surface.floor
        lowest, highest = math.log(BUDGETS[0]), math.log(BUDGETS[1])
        best, worst = self.pair(math.exp(highest)).loss, self.pair(math.exp(lowest)).loss
        if not isinstance(loss, int | float) or not best <= loss <= worst:
            raise ValueError(
                f"loss={loss!r} is not reached by the law {self.surface_law!r}, whose loss falls towards {floor:.4g} "
                f"and is {worst:.4g} at {BUDGETS[0]:g} FLOPs and {best:.4g} at {BUDGETS[1]:g}; use a value in between, "
                f"such as {self.pair(1e21).loss:.2f}"
            )
        for _ in range(200):
            middle = (lowest + highest) / 2
            if self.pair(math.exp(middle)).loss > loss:
                lowest = middle
            else:
                highest = middle
        return self.pair(math.exp((lowest + highest) / 2))


def _published() -> tuple[Law, ...]:
    """Every law, in the order of publication."""
    refit = ParametricLoss(1.82, 482.01, 2085.43, 0.3478, 0.3658)
    printed = ParametricLoss(1.69, 406.4, 410.7, 0.34, 0.28)
    unrounded = ParametricLoss(math.exp(0.5267228), math.exp(6.0073404), math.exp(6.0179186), 0.33917084, 0.2849083)
    # One standard error of the exponent is 0.020 (Besiroglu et al.); 80% of a normal lie within 1.2816 of them.
    narrow = (0.454, 0.455)
    spread_of_refit = (refit.exponent - 0.0256, refit.exponent + 0.0256)
    hoffmann = "Hoffmann et al. 2022 (arXiv 2203.15556)"
    kaplan = "Kaplan et al. 2020 (arXiv 2001.08361) table 6, N_opt = 1.3e9 (C / PF-day)^0.73 without embeddings"
    return (
        Law("kaplan", kaplan, 1.3e9 / PETAFLOP_DAY**0.73, 0.73, KaplanLoss(), "kaplan"),
        # Their coefficients were not printed: least squares in logarithms through the tables that were. The row of
        # 67B is left out, its size being rounded.
        Law(
            "hoffmann-1",
            f"{hoffmann} approach 1, power law through table 3",
            0.09934867109270717,
            0.4980916124990646,
            refit,
            DEFAULT_LAW,
            (0.488, 0.502),
        ),
        Law(
            "hoffmann-2",
            f"{hoffmann} approach 2, power law through table A3",
            0.145574371123876,
            0.4899273325201703,
            refit,
            DEFAULT_LAW,
            (0.462, 0.534),
        ),
        Law.from_surface("hoffmann-3", f"{hoffmann} approach 3, constants of its TeX source", unrounded, narrow),
        Law.from_surface("hoffmann-3-printed", f"{hoffmann} approach 3, eq. 10 as printed", printed, narrow),
        Law.from_surface(
            "besiroglu", "Besiroglu et al. 2024 (arXiv 2404.10102), refit of approach 3", refit, spread_of_refit
        ),
        Law("twenty", "rule of thumb: 20 tokens per parameter", (6 * 20) ** -0.5, 0.5, refit, DEFAULT_LAW),
        Law("sqrt", "rule of thumb: N = 0.1 sqrt(C), D = 1.7 sqrt(C)", 0.1, 0.5, refit, DEFAULT_LAW),
    )


LAWS = _published()
LAW_NAMES = tuple(law.name for law in LAWS)


def get_law(law: str | Law = DEFAULT_LAW) -> Law:
    """A published law by name; a `Law` (of a fit of one's own) is returned as it is.

    Raises:
        ValueError: no such name.
    """
    if isinstance(law, Law):
        return law
    for published in LAWS:
        if published.name == law:
            return published
    raise ValueError(f"law={law!r} is not known; use one of {', '.join(LAW_NAMES)}")


def optimal(flops: float, law: str | Law = DEFAULT_LAW) -> Optimum:
    """The model size and number of tokens for a compute budget.

    >>> best = optimal(5.76e23)
    >>> f"{best.params:.4g} {best.tokens:.4g} {best.loss:.3f} {best.law}"
    '7.225e+10 1.329e+12 1.977 besiroglu'
    """
    return get_law(law).optimal(flops)


def loss(params: float, tokens: float, law: str | Law = DEFAULT_LAW) -> float:
    """Predicted loss in nats per token of any pair.

    >>> round(loss(70e9, 1.4e12), 4), round(loss(70e9, 1.4e12, "hoffmann-3"), 4)
    (1.9767, 1.9208)
    """
    check_range("params", params, COUNTS, "70e9")
    check_range("tokens", tokens, COUNTS, "1.4e12")
    return get_law(law).surface(params, tokens)


def tokens_for(params: float, law: str | Law = DEFAULT_LAW) -> float:
    """Tokens with which a model of this size is the compute-optimal one.

    >>> round(tokens_for(70e9, "twenty") / 70e9, 9)
    20.0
    """
    return get_law(law).tokens_for(params)


def compute_for(loss: float, law: str | Law = DEFAULT_LAW) -> Optimum:
    """The cheapest pair that reaches a loss.

    >>> f"{compute_for(optimal(1e22).loss).flops:.6g}"
    '1e+22'
    """
    return get_law(law).compute_for(loss)


def spread(flops: float) -> dict[str, tuple[float, float]]:
    """Smallest and largest answer of all published laws, for ``params`` and ``tokens``.

    >>> {name: f"{low:.3g} .. {high:.3g}" for name, (low, high) in spread(5.76e23).items()}
    {'params': '3.22e+10 .. 8.04e+11', 'tokens': '1.19e+11 .. 2.98e+12'}
    """
    answers = [law.optimal(flops) for law in LAWS]
    params = [answer.params for answer in answers]
    tokens = [answer.tokens for answer in answers]
    return {"params": (min(params), max(params)), "tokens": (min(tokens), max(tokens))}
