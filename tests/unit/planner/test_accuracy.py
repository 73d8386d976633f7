"""The planner against published runs: as near as promised, and as docs/planner-accuracy.md says."""

from __future__ import annotations

import statistics

import pytest

from tests.benchmarks.planner_accuracy import PAGE, Spread, by_source, page, sweeps, timed, too_large, weighed
from tests.benchmarks.planner_runs import Outcome, bubble_errors, predict, read_runs


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return predict(read_runs())


def test_step_times(outcomes: list[Outcome]) -> None:
    found = timed(outcomes)
    spread = Spread(tuple(o.time_error for o in found))
    assert len(found) > 400
    assert spread.median <= 0.10
    assert spread.p90 <= 0.30
    assert statistics.median(s.median for s in by_source(found, lambda o: o.time_error).values()) <= 0.14


def test_memory(outcomes: list[Outcome]) -> None:
    found = weighed(outcomes)
    assert len(found) > 100
    assert Spread(tuple(o.memory_error for o in found)).median <= 0.12


def test_sweeps(outcomes: list[Outcome]) -> None:
    found = sweeps(outcomes)
    right, pairs = (sum(counts) for counts in zip(*(sweep.ordered for sweep in found), strict=True))
    assert len(found) >= 13
    assert right >= 0.81 * pairs
    assert statistics.mean(sweep.regret for sweep in found) <= 0.04


def test_printed_bubble_rates(outcomes: list[Outcome]) -> None:
    errors = bubble_errors(outcome.run for outcome in outcomes)
    assert len(errors) > 50
    assert max(map(abs, errors)) <= 0.015


def test_runs_that_did_not_fit(outcomes: list[Outcome]) -> None:
    failed = [o for o in outcomes if o.run.out_of_memory]
    assert len(failed) > 3
    assert [o.run.row["id"] for o in failed if not too_large(o)] == ["BS-957"], "the page tells why"
    assert [o.run.row["id"] for o in weighed(outcomes) if too_large(o)] == [], "these ran"


def test_the_page_is_up_to_date(outcomes: list[Outcome]) -> None:
    assert PAGE.read_text() == page(outcomes), "run python -m tests.benchmarks.planner_accuracy"
