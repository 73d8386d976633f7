"""Verdicts, models made smaller to be cheap to use, limited data, FLOPs per token."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from lightning_parallel.scaling import (
    DATA_LIMITED,
    LAWS,
    Convention,
    TransformerSize,
    budget_table,
    lifetime_optimal,
    loss,
    optimal,
    verdict,
)
from lightning_parallel.scaling.sizing import minimise


def test_verdict_carries_its_numbers() -> None:
    gpt3 = verdict(175e9, 300e9)
    assert gpt3.optimal == optimal(6 * 175e9 * 300e9)
    assert gpt3.ratio == pytest.approx((300 / 175) / gpt3.optimal.tokens_per_param)
    assert gpt3.optimal.params == pytest.approx(53.0e9, rel=1e-3)
    assert gpt3.optimal.tokens == pytest.approx(0.990e12, rel=1e-3)
    assert gpt3.loss == loss(175e9, 300e9) > gpt3.optimal.loss
    # "a 175 billion model should be trained with ... over 4.2 trillion tokens" by approach 2 of the paper.
    assert verdict(175e9, 300e9, "hoffmann-2").tokens_for_params == pytest.approx(4.3e12, rel=0.01)
    for part in ("undertrained", "'besiroglu'", "1.71 tokens per parameter", "5.302e+10", "9.901e+11"):
        assert part in str(gpt3)


def test_verdict_turns_at_twice_and_half_the_optimal_tokens_per_parameter() -> None:
    words = [verdict(1e9, 20e9 * factor, "twenty").verdict for factor in (0.49, 0.51, 1.99, 2.01)]
    assert words == ["undertrained", "near-optimal", "near-optimal", "overtrained"]


def test_table_of_budgets() -> None:
    rows = budget_table()
    assert [row[0].flops for row in rows] == [1e20, 5.6e21, 3.6e23, 2e25]
    assert all([cell.law for cell in row] == [law.name for law in LAWS] for row in rows)
    for row in rows:
        for cell in row:
            assert 6 * cell.params * cell.tokens == pytest.approx(cell.flops, rel=1e-9)


def test_models_for_much_use_are_smaller_and_trained_longer() -> None:
    goal = optimal(5.76e23)
    assert lifetime_optimal(goal.loss, 0).params == pytest.approx(goal.params, rel=1e-6)
    before = goal.params
    for served in (1e11, 1e12, 1e13, 1e14):
        best = lifetime_optimal(goal.loss, served)
        assert best.params < before
        assert loss(best.params, best.tokens) == pytest.approx(goal.loss, rel=1e-9)
        assert best.training_flops > goal.flops
        assert best.training_flops + best.inference_flops == pytest.approx(
            (1 - best.saved) * (goal.flops + 2 * goal.params * served)
        )
        # A minimum: neither a slightly smaller nor a slightly larger model of this loss is cheaper.
        total = best.training_flops + best.inference_flops
        for factor in (0.98, 1.02):
            params = best.params * factor
            tokens = (2085.43 / (goal.loss - 1.82 - 482.01 / params**0.3478)) ** (1 / 0.3658)
            assert params * (6 * tokens + 2 * served) > total
        before = best.params
    with pytest.raises(ValueError, match="law='kaplan' has no loss E"):
        lifetime_optimal(2.0, 1e12, "kaplan")
    with pytest.raises(ValueError, match="inference_tokens=-1 is not within"):
        lifetime_optimal(2.0, -1)


def test_repeated_tokens_are_worth_less() -> None:
    law = DATA_LIMITED
    assert law.effective_tokens(1e9, 1e10) == 1e9
    assert law.effective_tokens(1e10, 1e10) == 1e10
    # Up to four epochs repeating is almost as good as new data; in the limit D' is 16.4 times the different tokens.
    assert law.effective_tokens(4e10, 1e10) == pytest.approx(4e10, rel=0.08)
    assert law.effective_tokens(1e15, 1e10) == pytest.approx(1e10 * 16.387756)
    # With alpha = beta the parameters that D tokens fill are D (A / B)^(1 / alpha).
    filled = 1e10 * math.exp((6.255414 - 7.3049974) / 0.3526596)
    assert law.effective_params(filled / 2, 1e10) == filled / 2
    assert law.effective_params(1e15, 1e10) == pytest.approx(filled * 6.309743)
    assert law.loss(1e8, 1e10, 1e12) == law.surface(1e8, 1e10)
    assert law.loss(1e9, 1e11, 1e10) > law.loss(1e9, 1e11, 1e11)


def test_best_model_for_limited_data() -> None:
    law = DATA_LIMITED
    free = law.optimal(1e22, 1e15)
    # The free optimum of the same surface: with alpha = beta, N = sqrt(C / 6) (A / B)^(1 / (2 alpha)).
    expected = math.sqrt(1e22 / 6) * (math.exp(6.255414) / math.exp(7.3049974)) ** (1 / (2 * 0.3526596))
    assert free.params == pytest.approx(expected, rel=1e-4)
    assert free.epochs == 1.0
    # Appendix: scarce data shift compute from parameters to epochs.
    scarce = law.optimal(1e22, 25e9)
    assert scarce.params < free.params
    assert scarce.epochs == pytest.approx(1e22 / 6 / scarce.params / 25e9)
    assert scarce.loss > free.loss
    assert 6 * scarce.params * scarce.tokens == pytest.approx(1e22)
    assert "Muennighoff" in scarce.source
    for factor in (0.9, 1.1):
        params = scarce.params * factor
        assert law.loss(params, 1e22 / 6 / params, 25e9) > scarce.loss
    # The largest budget with one token: no error about sizes that nobody gave.
    assert law.optimal(1e32, 1).epochs > 1e12
    with pytest.raises(ValueError, match="unique_tokens=0 is not within"):
        law.optimal(1e22, 0)


def test_conventions_differ_by_what_they_name() -> None:
    size = TransformerSize(1000, 70, 30, layers=2, attention_width=8, context=16)
    attention = 12 * 2 * 8 * 16
    found = {
        (a, e): size.flops_per_token(Convention(a, e))  # type: ignore[arg-type]
        for a in ("full", "causal", "none")
        for e in ("all", "head", "none")
    }
    for (a, e), value in found.items():
        share = {"full": 1, "causal": 0.5, "none": 0}[a]
        counted = {"all": 1100, "head": 1030, "none": 1000}[e]
        assert value == 6 * counted + share * attention
    assert size.flops_per_token() == found["full", "head"]
    with pytest.raises(ValueError, match="attention='half' is not a convention"):
        Convention("half")  # type: ignore[arg-type]
    for wrong in ({"body_params": 0}, {"head_params": -1}, {"layers": 0}, {"context": 1.5}):
        with pytest.raises(ValueError, match="must be a whole number of at least"):
            TransformerSize(**{**asdict(size), **wrong})
    with pytest.raises(ValueError, match="embeddings='some' is not a convention"):
        Convention(embeddings="some")  # type: ignore[arg-type]


def test_minimise_finds_the_valley() -> None:
    assert minimise(lambda x: abs(x - 7.25), -100, 100) == pytest.approx(7.25, abs=1e-6)
