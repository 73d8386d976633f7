"""Pure: loss as a function of parameters and tokens: the two published forms, and Kaplan's laws of one variable."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from lightning_parallel.scaling.checks import check_range

__all__ = [
    "PETAFLOP_DAY",
    "KaplanLoss",
    "LossSurface",
    "ParametricLoss",
    "kaplan_critical_batch",
    "kaplan_loss_of_compute",
    "kaplan_loss_of_params",
    "kaplan_loss_of_tokens",
]

PETAFLOP_DAY = 1e15 * 86400
"""FLOPs of one PF-day, the unit of compute in Kaplan et al."""


class LossSurface(Protocol):
    """Loss in nats per token."""

    @property
    def floor(self) -> float:
        """Loss that no model and no amount of data get below."""

    def __call__(self, params: float, tokens: float) -> float:
        """Loss of a model of ``params`` parameters after ``tokens`` tokens."""


@dataclass(frozen=True)
class ParametricLoss:
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, eq. 2).

    >>> round(ParametricLoss(1.69, 406.4, 410.7, 0.34, 0.28)(70e9, 1.4e12), 4)
    1.9366
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        check_range("E", self.E, (0.0, 1e6), "1.69")
        for name in ("A", "B", "alpha", "beta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} of a loss E + A/N^alpha + B/D^beta must be positive and finite: "
                    "else the loss would not fall as the model or its data grow"
                )

    @property
    def floor(self) -> float:
        """E, the entropy of the text."""
        return self.E

    @property
    def exponent(self) -> float:
        """a of N_opt = coefficient * C^a (eq. 4)."""
        return self.beta / (self.alpha + self.beta)

    @property
    def coefficient(self) -> float:
        """N_opt = G (C / 6)^a, written as coefficient * C^a (eq. 4)."""
        scale = self.alpha * self.A / (self.beta * self.B)
        return float(scale ** (1 / (self.alpha + self.beta)) / 6**self.exponent)

    def __call__(self, params: float, tokens: float) -> float:
        """Loss in nats per token."""
        return float(self.E + self.A / params**self.alpha + self.B / tokens**self.beta)

    def tokens_to_reach(self, loss: float, params: float) -> float:
        """Tokens after which a model of ``params`` has this loss; infinite if it never has."""
        left = loss - self.E - self.A / params**self.alpha
        return float((self.B / left) ** (1 / self.beta)) if left > 0 else math.inf


@dataclass(frozen=True)
class KaplanLoss:
    """L(N, D) = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D (Kaplan et al. 2020, eq. 1.5 and table 2).

    N counts parameters without embeddings.
    """

    alpha_n: float = 0.076
    alpha_d: float = 0.103
    n_c: float = 6.4e13
    d_c: float = 1.8e13

    @property
    def floor(self) -> float:
        """The form has no entropy term."""
        return 0.0

    def __call__(self, params: float, tokens: float) -> float:
        """Loss in nats per token."""
        return float(((self.n_c / params) ** (self.alpha_n / self.alpha_d) + self.d_c / tokens) ** self.alpha_d)


def kaplan_loss_of_params(params: float) -> float:
    """L(N), without a limit of data: (8.8e13 / N)^0.076 (Kaplan et al. 2020, eq. 1.1)."""
    return float((8.8e13 / params) ** 0.076)


def kaplan_loss_of_tokens(tokens: float) -> float:
    """L(D), large models stopped early: (5.4e13 / D)^0.095 (Kaplan et al. 2020, eq. 1.2)."""
    return float((5.4e13 / tokens) ** 0.095)


def kaplan_loss_of_compute(flops: float, *, small_batches: bool = True) -> float:
    """L(C_min), or L(C) at the fixed batch of the paper (Kaplan et al. 2020, table 5).

    Args:
        flops: training compute.
        small_batches: compute far below the critical batch, (3.1e8 PF-days / C)^0.050; otherwise (1.6e7 / C)^0.057.
    """
    days = flops / PETAFLOP_DAY
    return float((3.1e8 / days) ** 0.050 if small_batches else (1.6e7 / days) ** 0.057)


def kaplan_critical_batch(loss: float) -> float:
    """Tokens per step above which larger batches stop paying: 2.1e8 / L^(1 / 0.21) (Kaplan et al. 2020, eq. 1.4)."""
    return float(2.1e8 / loss ** (1 / 0.21))
