"""Pure: training on limited data: what a repeated token is worth, and the best model for data that must be repeated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_parallel.scaling.checks import BUDGETS, COUNTS, check_range
from lightning_parallel.scaling.laws import FLOPS_PER_PARAM_AND_TOKEN
from lightning_parallel.scaling.sizing import minimise
from lightning_parallel.scaling.surfaces import ParametricLoss

__all__ = ["DATA_LIMITED", "DataLimitedLaw", "DataLimitedOptimum"]


@dataclass(frozen=True)
class DataLimitedOptimum:
    """The best pair for a budget when only so many different tokens exist.

    Attributes:
        params: parameters N.
        tokens: training tokens D, repetitions included.
        epochs: D over the different tokens.
        loss: predicted loss in nats per token.
        flops: 6 N D.
        source: of the law.
    """

    params: float
    tokens: float
    epochs: float
    loss: float
    flops: float
    source: str


@dataclass(frozen=True)
class DataLimitedLaw:
    """L = E + A / N'^alpha + B / D'^beta with effective sizes that saturate (Muennighoff et al. 2023, eq. 5 and 7).

    Attributes:
        surface: loss without repetition.
        tokens_decay: R*_D, repetitions after which another one is worth 1/e of a fresh token.
        params_decay: R*_N, likewise for parameters beyond those that the data can fill.
        source: where the constants were printed.
    """

    surface: ParametricLoss
    tokens_decay: float
    params_decay: float
    source: str

    def effective_tokens(self, tokens: float, unique_tokens: float) -> float:
        """D': different tokens, plus what their repetitions are worth."""
        unique = min(tokens, unique_tokens)
        repetitions = tokens / unique - 1
        return unique * (1 + self.tokens_decay * -math.expm1(-repetitions / self.tokens_decay))

    def effective_params(self, params: float, unique_tokens: float) -> float:
        """N': parameters that the different tokens can fill, plus what those beyond are worth."""
        used = min(params, self._params_filled_by(unique_tokens))
        return used * (1 + self.params_decay * -math.expm1(-(params / used - 1) / self.params_decay))

    def _params_filled_by(self, tokens: float) -> float:
        """The N for which D is optimal: from N = k C^a and C = 6ND, N = (k (6D)^a)^(1 / (1 - a))."""
        a = self.surface.exponent
        return float((self.surface.coefficient * (FLOPS_PER_PARAM_AND_TOKEN * tokens) ** a) ** (1 / (1 - a)))

    def loss(self, params: float, tokens: float, unique_tokens: float) -> float:
        """Predicted loss in nats per token.

        Args:
            params: parameters N.
            tokens: training tokens D, repetitions included.
            unique_tokens: different tokens that exist.
        """
        check_range("params", params, COUNTS, "8.7e9")
        check_range("tokens", tokens, COUNTS, "1e12")
        check_range("unique_tokens", unique_tokens, COUNTS, "1e11")
        return self._loss(params, tokens, unique_tokens)

    def _loss(self, params: float, tokens: float, unique_tokens: float) -> float:
        seen = min(tokens, unique_tokens)
        return self.surface(self.effective_params(params, seen), self.effective_tokens(tokens, unique_tokens))

    def optimal(self, flops: float, unique_tokens: float) -> DataLimitedOptimum:
        """The best pair for a budget.

        >>> DATA_LIMITED.optimal(1e22, 25e9).epochs > 1
        True
        """
        check_range("flops", flops, BUDGETS, "1e22")
        check_range("unique_tokens", unique_tokens, COUNTS, "1e11")

        def cost(log_params: float) -> float:
            params = math.exp(log_params)
            tokens = max(1.0, flops / (FLOPS_PER_PARAM_AND_TOKEN * params))
            return self._loss(params, tokens, unique_tokens)

        params = math.exp(minimise(cost, 0.0, math.log(flops / FLOPS_PER_PARAM_AND_TOKEN)))
        tokens = flops / (FLOPS_PER_PARAM_AND_TOKEN * params)
        epochs = max(1.0, tokens / unique_tokens)
        return DataLimitedOptimum(params, tokens, epochs, self._loss(params, tokens, unique_tokens), flops, self.source)


DATA_LIMITED = DataLimitedLaw(
    ParametricLoss(math.exp(0.6254804), math.exp(6.255414), math.exp(7.3049974), 0.3526596, 0.3526596),
    tokens_decay=15.387756,
    params_decay=5.309743,
    source="Muennighoff et al. 2023 (arXiv 2305.16264), constants of appendix A",
)
