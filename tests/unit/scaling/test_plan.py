"""From goals to sizes and steps; shapes by aspect ratio; meters, rates and outlooks."""

from __future__ import annotations

import math

import pytest

from lightning_parallel.scaling import Law, ParametricLoss, get_law, optimal, tokens_for
from lightning_parallel.scaling.meter import ComputeMeter, RateWindow
from lightning_parallel.scaling.micro_batches import candidates, largest_that_fits
from lightning_parallel.scaling.outlook import loss_band, outlook
from lightning_parallel.scaling.plan import SizingGoal, suggestion
from lightning_parallel.scaling.shapes import AspectRule, Shape


def body(shape: Shape) -> int:
    return 12 * shape.layers * shape.width**2


def test_a_budget_gives_the_optimal_size_and_whole_steps() -> None:
    goal = SizingGoal(flops=1e18)
    params = goal.params()
    assert params == optimal(1e18).params
    plan = goal.plan(params, 4096)
    assert plan.steps == math.floor(optimal(1e18).tokens / 4096)
    assert plan.tokens == plan.steps * 4096
    assert plan.flops == 6 * params * plan.tokens <= 1e18
    assert plan.loss == get_law("besiroglu").surface(params, plan.tokens)
    for part in ("1e+18 FLOPs", "'besiroglu'", "Besiroglu et al. 2024", f"{plan.steps} steps"):
        assert part in plan.why


def test_a_budget_of_whole_steps_loses_none_to_rounding() -> None:
    for steps in range(1, 60):
        assert SizingGoal(flops=6 * 12345 * 7 * 1024 * steps * 1.0).plan(12345, 7 * 1024).steps == steps


def test_other_goals_come_down_to_a_budget() -> None:
    hours = SizingGoal(device_hours=10, flops_per_second=1e14)
    assert hours.budget == pytest.approx(10 * 3600 * 1e14)
    assert "in 10 device hours" in hours.plan(1e9, 1000).why
    loss = SizingGoal(loss=2.5)
    assert loss.params() == pytest.approx(optimal(loss.budget or 0).params)
    assert optimal(loss.budget or 0).loss == pytest.approx(2.5)
    data = SizingGoal(tokens=2e10, law="twenty")
    assert data.params() == pytest.approx(1e9)
    assert data.plan(1.1e9, 1000).tokens == 2e10
    fixed = SizingGoal()
    assert fixed.plan(1e9, 1000).tokens == pytest.approx(tokens_for(1e9), rel=1e-6)
    own = Law.from_surface("own", "a sweep", ParametricLoss(1.0, 10.0, 10.0, 0.5, 0.5))
    for law in ("kaplan", "hoffmann-3", "besiroglu", own):
        goal = SizingGoal(tokens=1e11, law=law)
        assert optimal(goal.budget or 0, law).tokens == pytest.approx(1e11)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"flops": 1e18, "loss": 2.0}, "flops and loss each determine the size of a run; give one"),
        ({"flops": -1.0}, "flops=-1.0 is not within"),
        ({"tokens": 0.0}, "tokens=0.0 is not within"),
        ({"device_hours": 1.0}, "give both, for example device_hours=100"),
        ({"device_hours": -1.0, "flops_per_second": 1e14}, "device_hours=-1.0 is not within"),
        ({"law": "no"}, "law='no' is not known"),
    ],
)
def test_goals_that_make_no_sense(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SizingGoal(**given)  # type: ignore[arg-type]


def test_goals_that_cannot_be_met() -> None:
    with pytest.raises(ValueError, match="nothing determines the size of the model"):
        SizingGoal().params()
    with pytest.raises(ValueError, match=r"are less than one step of 1000000; use at most \d+ tokens per step"):
        SizingGoal(flops=1e9).plan(1e4, 1_000_000)
    with pytest.raises(ValueError, match="loss=0.1 is not reached"):
        _ = SizingGoal(loss=0.1).budget


def test_suggestions_are_those_of_the_paper() -> None:
    # DeepSeek LLM, 7B: C = 6 x 6.9e9 x 2e12 = 8.3e22, batch about 9.2M tokens, rate about 4.2e-4 (figure 3).
    found = suggestion(8.3e22)
    assert found.batch_tokens == pytest.approx(9.2e6, rel=0.1)
    assert found.learning_rate == pytest.approx(4.2e-4, rel=0.05)


def test_shapes_keep_their_aspect_and_find_the_nearest_size() -> None:
    rule = AspectRule(aspect=32, head_size=16)
    for layers in (1, 3, 10):
        assert rule.shape(layers) == Shape(layers, 32 * layers, 2 * layers)
    for target in (3e5, 1e6, 2e7, 1e9):
        shape, count = rule.closest(target, body)
        assert count == body(shape)
        distance = abs(math.log(count / target))
        for layers in (shape.layers - 1, shape.layers + 1):
            if layers:
                assert abs(math.log(body(rule.shape(layers)) / target)) >= distance
    with pytest.raises(ValueError, match="no shape of width 32 x layers has about 10 parameters, the nearest"):
        rule.closest(10, body)
    with pytest.raises(ValueError, match=r"aspect=0 is not within .* such as 64"):
        AspectRule(aspect=0)


def test_meter_stops_before_the_step_that_would_exceed() -> None:
    meter = ComputeMeter(0.1, budget=0.1 * 30)
    assert [meter.step(10) for _ in range(3)] == [True, True, False]
    uneven = ComputeMeter(1.0, budget=25.0)
    # After the short last batch of an epoch full ones follow.
    assert [uneven.step(tokens) for tokens in (10, 6)] == [True, False]
    assert uneven.flops == 16


def test_rates_look_back_over_a_window_and_leave_pauses_out() -> None:
    window = RateWindow(2)
    assert window.rates() is None
    for now in (0.0, 10.0, 12.0):
        window.add(now, steps=2, samples=8, tokens=80)
    window.shift(100.0)
    window.add(114.0, steps=2, samples=8, tokens=80)
    rates = window.rates()
    assert rates is not None
    assert (rates.steps_per_second, rates.samples_per_second, rates.tokens_per_second) == (1.0, 4.0, 40.0)
    with pytest.raises(ValueError, match="window=0 must be a whole number of at least 1"):
        RateWindow(0)


def test_outlook_judges_now_and_the_end() -> None:
    found = outlook(1e9, 2e9, planned_tokens=2e10, tokens_per_second=1e6, law="twenty")
    assert (found.now.verdict, found.final and found.final.verdict) == ("undertrained", "near-optimal")
    assert found.seconds_left == pytest.approx(1.8e4)
    assert found.flops == pytest.approx(6 * 1e9 * 2e9)
    figures = found.figures()
    assert figures["tokens_per_param"] == 2.0
    assert figures["final_loss_low"] <= figures["final_loss"] <= figures["final_loss_high"]
    endless = outlook(1e9, 2e9)
    assert (endless.final, endless.band, endless.seconds_left) == (None, None, None)
    assert "final_loss" not in endless.figures()
    assert loss_band(1e9, 2e10) == loss_band(1e9, 2e10, "hoffmann-3")


def test_micro_batches_divide_the_batch() -> None:
    assert candidates(12) == (1, 2, 3, 4, 6, 12)
    assert largest_that_fits(candidates(12), lambda size: size < 5) == 4
    assert largest_that_fits(candidates(12), lambda size: False) is None
    tried: list[int] = []
    largest_that_fits((1, 2, 4, 8), lambda size: not tried.append(size) and size < 2)  # type: ignore[func-returns-value]
    assert tried == [1, 2]
