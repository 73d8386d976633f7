"""Tables of what a heat measured, and the same as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from rich.table import Table

from tests.benchmarks.heats import Heat, Target
from tests.benchmarks.referee import Result


def loss_difference(result: Result, reference: Result) -> float:
    """Largest difference of the losses of any step."""
    return max(abs(a - b) for a, b in zip(result.losses, reference.losses, strict=True))


def times_table(heat: Heat, config: str, results: Mapping[str, Result]) -> Table:
    """One row per job."""
    table = Table("job", "s/step median", "min", "CPU s/step", "loss difference", title=f"{heat.title}, {config}")
    reference = results[heat.jobs[0].name]
    for job in heat.jobs:
        result = results.get(job.name)
        if result is None or result.error is not None:
            table.add_row(job.name, "skipped: not installed" if result is None else f"failed: {result.error}")
            continue
        difference = f"{loss_difference(result, reference):.0e}" if reference.error is None else "-"
        table.add_row(
            job.name,
            f"{median(result.seconds):.4f}",
            f"{min(result.seconds):.4f}",
            f"{median(result.cpu_seconds):.4f}",
            difference,
        )
    return table


def targets_table(heat: Heat, config: str, results: Mapping[str, Result]) -> Table:
    """One row per comparison."""
    table = Table("compared", "measure", "median", "of minima", "target", "holds")
    for row in compare(heat, config, results):
        limit = "-" if row["limit"] is None else f"{row['limit']:.3f}"
        holds = {None: "-", True: "yes", False: "no"}[row["holds"]]
        names = f"{row['ours']} / {row['other']}"
        table.add_row(names, row["measure"], f"{row['median']:.3f}", f"{row['minimum']:.3f}", limit, holds)
    return table


def compare(heat: Heat, config: str, results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """Every comparison whose two jobs have run."""
    return [_row(target, config, results) for target in heat.targets if _has_run(target, results)]


def _has_run(target: Target, results: Mapping[str, Result]) -> bool:
    return all(n in results and results[n].error is None for n in (target.ours, target.other))


def _row(target: Target, config: str, results: Mapping[str, Result]) -> dict[str, Any]:
    middle = target.by_median(results)
    return {
        "ours": target.ours,
        "other": target.other,
        "measure": target.measure,
        "median": middle,
        "minimum": target.by_minimum(results),
        "limit": target.limit.get(config),
        "holds": target.holds(middle, config),
    }
