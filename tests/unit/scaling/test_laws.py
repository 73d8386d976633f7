"""Laws at the budget of Chinchilla, their frontiers, losses, intervals and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_parallel.scaling import (
    DEFAULT_LAW,
    LAW_NAMES,
    LAWS,
    Law,
    ParametricLoss,
    compute_for,
    get_law,
    loss,
    optimal,
    spread,
    tokens_for,
)
from lightning_parallel.scaling.surfaces import kaplan_loss_of_params, kaplan_loss_of_tokens

GOPHER = 5.76e23
BUDGETS = (1e9, 1e15, 6e18, 1e20, 5.6e21, GOPHER, 2e25, 1e30)


@pytest.mark.parametrize(
    ("law", "params", "tokens"),
    [
        ("hoffmann-3-printed", 32.19e9, 2.982e12),
        ("besiroglu", 72.25e9, 1.329e12),
        ("twenty", 69.28e9, 1.386e12),
        ("hoffmann-3", 40.36e9, 2.379e12),  # "40B" in the text of the paper
        ("sqrt", 75.9e9, 1.265e12),
    ],
)
def test_optimum_at_the_budget_of_chinchilla(law: str, params: float, tokens: float) -> None:
    best = optimal(GOPHER, law)
    assert best.params == pytest.approx(params, rel=5e-4)
    assert best.tokens == pytest.approx(tokens, rel=5e-4)


@pytest.mark.parametrize(
    ("law", "exponent", "digits"),
    [("kaplan", 0.73, 1e-9), ("hoffmann-1", 0.50, 0.003), ("hoffmann-2", 0.49, 0.001), ("hoffmann-3", 0.46, 0.005)]
    + [("besiroglu", 0.513, 0.001), ("twenty", 0.5, 1e-12), ("sqrt", 0.5, 1e-12)],
)
def test_exponents_as_printed(law: str, exponent: float, digits: float) -> None:
    assert get_law(law).exponent == pytest.approx(exponent, abs=digits)


@pytest.mark.parametrize("law", LAW_NAMES)
@pytest.mark.parametrize("flops", BUDGETS)
def test_six_times_params_times_tokens_is_the_budget(law: str, flops: float) -> None:
    best = optimal(flops, law)
    assert 6 * best.params * best.tokens == pytest.approx(flops, rel=1e-9)
    assert (best.law, best.flops) == (law, flops)
    assert tokens_for(best.params, law) == pytest.approx(best.tokens, rel=1e-9)


@pytest.mark.parametrize("law", ["besiroglu", "hoffmann-3", "hoffmann-3-printed"])
def test_closed_form_is_the_minimum_of_the_loss(law: str) -> None:
    for flops in BUDGETS:
        best = optimal(flops, law)
        for factor in (0.9, 0.99, 1.01, 1.1):
            params = best.params * factor
            assert loss(max(params, 1.0), flops / 6 / params, law) > best.loss or params < 1


@pytest.mark.parametrize("law", LAW_NAMES)
def test_compute_for_inverts_the_frontier(law: str) -> None:
    for flops in (1e18, GOPHER):
        assert compute_for(optimal(flops, law).loss, law).flops == pytest.approx(flops, rel=1e-9)


def test_losses_name_the_law_they_come_from() -> None:
    assert optimal(GOPHER, "twenty").loss_law == DEFAULT_LAW
    assert optimal(GOPHER, "twenty").loss == pytest.approx(1.9773, abs=1e-4)
    assert optimal(GOPHER, "kaplan").loss_law == "kaplan"
    assert optimal(GOPHER).law == DEFAULT_LAW == "besiroglu"
    # By hand: 1.82 + 482.01 / (70e9)^0.3478 + 2085.43 / (1.4e12)^0.3658.
    assert loss(70e9, 1.4e12) == pytest.approx(1.82 + 0.08222 + 0.07447, abs=2e-4)


def test_kaplans_joint_law_tends_to_those_of_one_variable() -> None:
    """With the constants of its own fit, so within 5%."""
    assert loss(1e9, 1e20, "kaplan") == pytest.approx(kaplan_loss_of_params(1e9), rel=0.05)
    assert loss(1e20, 1e10, "kaplan") == pytest.approx(kaplan_loss_of_tokens(1e10), rel=0.05)


def test_intervals_follow_the_published_exponents() -> None:
    middle = math.sqrt(6e18 * 3e21)
    best = optimal(middle * 1e4, "hoffmann-2")
    assert best.params_interval is not None
    assert best.tokens_interval is not None
    low, high = best.params_interval
    # 80% of the exponent: 0.462 .. 0.534, over four decades.
    assert high / low == pytest.approx(1e4 ** (0.534 - 0.462))
    assert low < best.params < high
    assert best.tokens_interval == pytest.approx((best.flops / 6 / high, best.flops / 6 / low))
    assert optimal(1e25, "twenty").params_interval is None
    for law in LAWS:
        around = law.optimal(1e25).params_interval
        assert around is None or around[0] <= law.optimal(1e25).params <= around[1]


def test_spread_covers_every_law() -> None:
    around = spread(GOPHER)
    assert around["params"] == (optimal(GOPHER, "hoffmann-3-printed").params, optimal(GOPHER, "kaplan").params)
    assert around["tokens"] == (optimal(GOPHER, "kaplan").tokens, optimal(GOPHER, "hoffmann-3-printed").tokens)


def test_a_law_of_ones_own() -> None:
    own = Law.from_surface("own", "my sweep", ParametricLoss(1.0, 10.0, 10.0, 0.5, 0.5))
    best = optimal(6e12, own)
    assert best.params == pytest.approx(1e6)
    assert best.tokens == pytest.approx(1e6)
    assert best.loss == pytest.approx(1.02)
    assert (best.law, best.loss_law, best.params_interval) == ("own", "own", None)


def test_numbers_of_numpy_are_numbers() -> None:
    for flops in (np.float32(1e20), np.float64(1e20), np.int64(10**18), 10**20):
        assert optimal(flops).params == pytest.approx(optimal(float(flops)).params)


@pytest.mark.parametrize("flops", [0, -1e20, math.nan, math.inf, 1e3, 1e60, 10**400, True, "1e20"])
def test_absurd_budgets_are_refused(flops: float) -> None:
    with pytest.raises(ValueError, match=r"^flops=.* is not within 1e\+06 .. 1e\+32; use a value such as 5.76e23$"):
        optimal(flops)


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="law='chinchilla' is not known; use one of kaplan, hoffmann-1"):
        optimal(1e20, "chinchilla")
    with pytest.raises(ValueError, match=r"params=-1 is not within .*70e9"):
        loss(-1, 1e9)
    with pytest.raises(ValueError, match=r"tokens=0 is not within .*1.4e12"):
        loss(1e9, 0)
    with pytest.raises(ValueError, match=r"params=0 is not within"):
        tokens_for(0)
    with pytest.raises(ValueError, match=r"loss=1.5 is not reached by the law 'besiroglu', whose .* towards 1.82"):
        compute_for(1.5)
    with pytest.raises(ValueError, match=r"loss=1000 is not reached"):
        compute_for(1000)
    with pytest.raises(ValueError, match=r"beta=-0.1 of a loss .* must be positive"):
        ParametricLoss(1.0, 1.0, 1.0, 0.5, -0.1)
    with pytest.raises(ValueError, match=r"A=inf of a loss .* must be positive and finite"):
        ParametricLoss(1.0, math.inf, 1.0, 0.5, 0.5)
    for floor in (-1.0, math.nan, "1.8"):
        with pytest.raises(ValueError, match=r"E=.* is not within"):
            ParametricLoss(floor, 1.0, 1.0, 0.5, 0.5)  # type: ignore[arg-type]
