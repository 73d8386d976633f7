"""Pure: compute-optimal sizing: published laws, fits to runs of one's own, verdicts, data limits, FLOPs per token."""

from __future__ import annotations

from lightning_parallel.scaling.flops import Convention, TransformerSize
from lightning_parallel.scaling.laws import (
    DEFAULT_LAW,
    LAW_NAMES,
    LAWS,
    Law,
    Optimum,
    compute_for,
    get_law,
    loss,
    optimal,
    spread,
    tokens_for,
)
from lightning_parallel.scaling.repeats import DATA_LIMITED, DataLimitedLaw
from lightning_parallel.scaling.sizing import Lifetime, Verdict, budget_table, lifetime_optimal, verdict
from lightning_parallel.scaling.surfaces import KaplanLoss, ParametricLoss

__all__ = [
    "DATA_LIMITED",
    "DEFAULT_LAW",
    "LAWS",
    "LAW_NAMES",
    "Convention",
    "DataLimitedLaw",
    "KaplanLoss",
    "Law",
    "Lifetime",
    "Optimum",
    "ParametricLoss",
    "TransformerSize",
    "Verdict",
    "budget_table",
    "compute_for",
    "get_law",
    "lifetime_optimal",
    "loss",
    "optimal",
    "spread",
    "tokens_for",
    "verdict",
]
