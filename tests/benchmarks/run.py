"""Command line: runs heats, prints tables, writes JSON.

python -m tests.benchmarks.run --only tp,dp,pp,overhead --configs mid,tiny --out benchmarks.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.benchmarks.heats import HEATS, Heat
from tests.benchmarks.model import CONFIGS
from tests.benchmarks.referee import HeatOptions, Job, Result, run_heat
from tests.benchmarks.report import compare, targets_table, times_table


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of a run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.run")
    parser.add_argument("--only", default="tp,dp,pp,overhead", help="heats to run")
    parser.add_argument("--configs", default="mid,tiny", help="sizes to run them with")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each job")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of the pipelines")
    parser.add_argument("--packages", type=Path, help="folder that megatron-core and deepspeed were installed into")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a heat may take")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args(arguments)


def is_available(job: Job, packages: Path | None) -> bool:
    """Whether a job's optional package is there."""
    if job.needs is None:
        return True
    top = job.needs.partition(".")[0]
    return importlib.util.find_spec(top) is not None or (packages is not None and (packages / top).is_dir())


def measure(heat: Heat, config: str, options: argparse.Namespace, console: Console) -> dict[str, Result]:
    """Runs one heat; jobs whose package is missing are left out with a note."""
    missing = [job for job in heat.jobs if not is_available(job, options.packages)]
    for job in missing:
        console.print(f"[yellow]{job.name} is left out: {job.needs} is not installed (see tests/benchmarks/README.md)")
    heat_options = HeatOptions(
        sizes=CONFIGS[config],
        steps=options.steps,
        warmup=options.warmup,
        micro_batches=options.micro_batches,
        packages=None if options.packages is None else str(options.packages.resolve()),
        timeout=options.timeout,
    )
    return run_heat([job for job in heat.jobs if job not in missing], heat_options)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Runs what the command line asks for.

    Returns:
        One entry per heat: its name, configuration, results of every job and comparisons.
    """
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    records = []
    for config in options.configs.split(","):
        for name in options.only.split(","):
            heat = HEATS[name]
            results = measure(heat, config, options, console)
            console.print(times_table(heat, config, results), targets_table(heat, config, results))
            jobs = {job: asdict(result) for job, result in results.items()}
            comparisons = compare(heat, config, results)
            records.append({"heat": name, "config": config, "jobs": jobs, "comparisons": comparisons})
            if options.out is not None:
                options.out.write_text(json.dumps(records, indent=1))
    return records


if __name__ == "__main__":
    failed = [job for record in main() for job in record["jobs"].values() if job["error"] is not None]
    sys.exit(1 if failed else 0)
