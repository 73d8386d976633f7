"""Pure: a loss law of one's own, fitted to finished runs as Hoffmann et al. 2022 (approach 3) and their refit do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_parallel.scaling.fit_options import FitOptions
from lightning_parallel.scaling.laws import Law
from lightning_parallel.scaling.runs import Run
from lightning_parallel.scaling.surfaces import ParametricLoss

__all__ = ["FitOptions", "LawFit", "check_determined", "fit_law", "huber_objective"]

Vector: TypeAlias = NDArray[np.float64]

CONSTANTS = 5
SIZES_NEEDED = 3
LEAST_SPREAD = 0.02
"""How far runs must stray from a line in (log N, log D), as a share of their extent along it."""
LARGEST_EXPONENT = 4.0
LOWEST_LOG_E = -40.0
NO_FLOOR = 1e-3
"""An E below this share of the lowest loss is none: there the objective is flat in log E, and no descent leaves it."""


@dataclass(frozen=True)
class LawFit:
    """A fitted loss, and what resampled runs would have given.

    Attributes:
        surface: the loss with the lowest objective.
        objective: sum of Huber losses of the log loss.
        data: the runs.
        samples: fits of resampled runs.
    """

    surface: ParametricLoss
    objective: float
    data: tuple[Run, ...]
    samples: tuple[ParametricLoss, ...]

    @property
    def runs(self) -> int:
        """Number of runs."""
        return len(self.data)

    def interval(self, figure: Callable[[ParametricLoss], float], level: float = 0.8) -> tuple[float, float] | None:
        """Bootstrap interval of any figure of the law, such as ``lambda law: law(1e9, 2e10)``; None without samples."""
        if not self.samples:
            return None
        values = [figure(sample) for sample in self.samples]
        low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    @property
    def deviation(self) -> float:
        """Root of the mean square of the log loss left over: 0.01 says that the fit is off by 1%."""
        left = [math.log(self.surface(run.params, run.tokens) / run.loss) for run in self.data]
        return math.sqrt(sum(r * r for r in left) / len(left))

    @property
    def has_floor(self) -> bool:
        """Whether the runs show how low the loss can get."""
        return self.surface.E / min(run.loss for run in self.data) >= NO_FLOOR

    def law(self, name: str = "fit") -> Law:
        """The fit as a law for ``optimal``, ``verdict`` and the rest."""
        source = f"fit to {self.runs} runs"
        return Law.from_surface(name, source, self.surface, self.interval(lambda sample: sample.exponent))


def huber_objective(surface: ParametricLoss, runs: Sequence[Run], delta: float = 1e-3) -> float:
    """The objective of the fit for any constants: the sum, not the mean, over runs."""
    residuals = [math.log(surface(run.params, run.tokens)) - math.log(run.loss) for run in runs]
    return sum(0.5 * r * r if abs(r) <= delta else delta * (abs(r) - 0.5 * delta) for r in residuals)


def fit_law(runs: Sequence[Run], options: FitOptions | None = None) -> LawFit:
    """Fits L(N, D) = E + A / N^alpha + B / D^beta to the final losses of runs.

    Huber loss of the log loss, summed over runs (a mean makes the optimizer stop early, Besiroglu et al. 2024), from
    many starts with L-BFGS. The same runs always give the same answer.

    Raises:
        ValueError: too few or too similar runs for five constants, or losses that do not fall with size and data.
        ModuleNotFoundError: scipy is not installed.
    """
    chosen = options or FitOptions()
    check_determined(runs)
    data = _Data.of(runs, chosen.delta)
    ranked = data.best_starts(chosen.starts)
    best = min((data.descend(start) for start in ranked), key=lambda found: found[0])
    surface = data.surface(best[1])
    generator = np.random.default_rng(chosen.seed)
    samples: list[ParametricLoss] = []
    while len(samples) < chosen.bootstraps:
        picked = [runs[index] for index in generator.integers(0, len(runs), len(runs))]
        if _shortage(picked, CONSTANTS) is None:
            again = _Data.of(picked, chosen.delta)
            ends = [again.descend(start) for start in again.starts_near(surface)]
            samples.append(again.surface(min(ends, key=lambda found: found[0])[1], strict=False))
    return LawFit(surface, best[0] * chosen.delta**2, tuple(runs), tuple(samples))


def check_determined(runs: Sequence[Run]) -> None:
    """Raises ValueError if runs of such sizes and lengths, whatever their losses, cannot determine five constants.

    Also of runs that are only planned.
    """
    shortage = _shortage(runs)
    if shortage is not None:
        raise ValueError(shortage)


def _shortage(runs: Sequence[Run], needed: int = CONSTANTS + 1) -> str | None:
    """What the runs lack to determine the five constants; a repeated pair of size and length tells nothing new."""
    sizes, lengths = len({run.params for run in runs}), len({run.tokens for run in runs})
    pairs = len({(run.params, run.tokens) for run in runs})
    if pairs < needed or min(sizes, lengths) < SIZES_NEEDED:
        repeated = "" if pairs == len(runs) else f", {pairs} of them different,"
        return (
            f"E, A, B, alpha and beta need at least {needed} different runs with at least {SIZES_NEEDED} numbers of "
            f"parameters and {SIZES_NEEDED} of tokens; these are {len(runs)} runs{repeated} with {sizes} and {lengths}"
        )
    points = np.log([[run.params, run.tokens] for run in runs])
    along, across = np.linalg.svd(points - points.mean(0), compute_uv=False)
    if across < LEAST_SPREAD * along:
        return (
            f"all {len(runs)} runs lie on one line of log parameters and log tokens, which does not tell the two "
            "apart: add runs of the same sizes with twice and half the tokens"
        )
    return None


@dataclass(frozen=True)
class _Data:
    """Logarithms of runs, centred so that log A and alpha (log B and beta) can be moved independently."""

    params: Vector
    tokens: Vector
    losses: Vector
    middle: tuple[float, float]
    delta: float

    @classmethod
    def of(cls, runs: Sequence[Run], delta: float) -> _Data:
        table = np.log(np.array([[run.params, run.tokens, run.loss] for run in runs]))
        middle = (float(table[:, 0].mean()), float(table[:, 1].mean()))
        return cls(table[:, 0] - middle[0], table[:, 1] - middle[1], table[:, 2], middle, delta)

    def theta(self, surface: ParametricLoss) -> Vector:
        """(log A, log B, log E, alpha, beta) with A and B taken at the middle of the runs."""
        s = surface
        log_a, log_b = math.log(s.A) - s.alpha * self.middle[0], math.log(s.B) - s.beta * self.middle[1]
        return np.array([log_a, log_b, math.log(max(s.E, math.exp(LOWEST_LOG_E))), s.alpha, s.beta])

    def starts_near(self, surface: ParametricLoss) -> list[Vector]:
        """Where the fit of resampled runs begins: at the fit of all, and without a floor also at one of half the loss.

        Else the samples of a fit without a floor would all be without one, as if that were certain.
        """
        start, lowest = self.theta(surface), float(self.losses.min())
        if surface.E / math.exp(lowest) >= NO_FLOOR:
            return [start]
        rest = math.log(math.exp(float(self.losses.mean())) - math.exp(lowest) / 2) - math.log(2)
        return [start, np.array([rest, rest, lowest - math.log(2), *start[3:]])]

    def surface(self, theta: Vector, *, strict: bool = True) -> ParametricLoss:
        """Back to constants; refuses exponents at their limits."""
        log_a, log_b, log_e, alpha, beta = (float(value) for value in theta)
        for name, value, what in (("alpha", alpha, "parameters"), ("beta", beta, "tokens")):
            if strict and not 1e-3 < value < LARGEST_EXPONENT - 1e-3:
                raise ValueError(
                    f"the fit ends with {name}={value:.3g}: these runs do not show how the loss falls with {what}; add "
                    f"runs that span at least a factor of 10 in {what}, or leave out runs that diverged"
                )
        return ParametricLoss(
            math.exp(log_e),
            math.exp(log_a + alpha * self.middle[0]),
            math.exp(log_b + beta * self.middle[1]),
            max(alpha, 1e-9),
            max(beta, 1e-9),
        )

    def best_starts(self, count: int) -> list[Vector]:
        """The most promising points of the grid of Hoffmann et al. 2022 (appendix D.3)."""
        exponents = (0.0, 0.5, 1.0, 1.5, 2.0)
        logarithms = (0.0, 5.0, 10.0, 15.0, 20.0, 25.0)
        grid = itertools.product(logarithms, logarithms, (-1.0, -0.5, 0.0, 0.5, 1.0), exponents, exponents)
        starts = np.array(list(grid))
        starts[:, 0] -= starts[:, 3] * self.middle[0]
        starts[:, 1] -= starts[:, 4] * self.middle[1]
        values = np.concatenate([self.value(part) for part in np.array_split(starts, 45)])
        return list(starts[np.argsort(values, kind="stable")[:count]])

    def _terms(self, theta: Vector) -> tuple[Vector, Vector]:
        """Logarithms of the three terms (..., runs, 3), and the residuals of the log loss (..., runs)."""
        t = theta[..., None, :]
        terms = np.stack(
            np.broadcast_arrays(t[..., 0] - t[..., 3] * self.params, t[..., 1] - t[..., 4] * self.tokens, t[..., 2]),
            axis=-1,
        )
        top = terms.max(-1, keepdims=True)
        total = top[..., 0] + np.log(np.exp(terms - top).sum(-1))
        return terms - total[..., None], total - self.losses

    def value(self, theta: Vector) -> Vector:
        """The objective in units of delta^2, for one or many points."""
        return self._huber(self._terms(theta)[1])

    def _huber(self, residuals: Vector) -> Vector:
        size = np.abs(residuals) / self.delta
        return np.asarray(np.where(size <= 1, 0.5 * size**2, size - 0.5).sum(-1), dtype=np.float64)

    def value_and_gradient(self, theta: Vector) -> tuple[float, Vector]:
        """The objective and its derivatives at one point."""
        logs, residuals = self._terms(theta)
        pull = np.clip(residuals / self.delta, -1, 1)[:, None] * np.exp(logs) / self.delta
        slopes = (-(pull[:, 0] @ self.params), -(pull[:, 1] @ self.tokens))
        return float(self._huber(residuals)), np.array([*pull.sum(0), *slopes])

    def descend(self, start: Vector) -> tuple[float, Vector]:
        """Objective (in units of delta^2) and place of the minimum below a start."""
        limits = [(None, None)] * 2 + [(LOWEST_LOG_E, None)] + [(0.0, LARGEST_EXPONENT)] * 2
        accuracy = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-14, "gtol": 1e-9, "maxcor": 20}
        found = _scipy_optimize().minimize(
            self.value_and_gradient, start, jac=True, method="L-BFGS-B", bounds=limits, options=accuracy
        )
        return float(found.fun), np.asarray(found.x, dtype=np.float64)


def _scipy_optimize() -> ModuleType:
    try:
        from scipy import optimize
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("fitting needs scipy: pip install 'lightning-parallel[scaling]'") from error
    module: ModuleType = optimize
    return module
