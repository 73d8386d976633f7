"""Glue: ``lightning-parallel explain``: the arithmetic of parallel training, worked with the code that runs it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lightning_parallel.commands.answer import Answer, add_command
from lightning_parallel.pipeline.schedules import SCHEDULE_NAMES, build_schedule
from lightning_parallel.pipeline.simulate import simulate

if TYPE_CHECKING:
    from lightning_parallel.commands.answer import Subcommands

__all__ = ["add_parser"]


def add_parser(commands: Subcommands) -> None:
    """Adds ``explain`` with one subcommand per topic."""
    summary = "work through the arithmetic of parallel training"
    topics = commands.add_parser("explain", help=summary, description=summary).add_subparsers(
        dest="topic", required=True, metavar="TOPIC"
    )
    bubble = add_command(topics, "bubble", _bubble, summary="where the time of a pipeline goes")
    bubble.add_argument("--stages", type=int, default=4)
    bubble.add_argument("--micro-batches", type=int, default=8)
    bubble.add_argument("--schedule", choices=SCHEDULE_NAMES, default="1f1b")


def _bubble(arguments: argparse.Namespace) -> Answer:
    schedule = build_schedule(arguments.schedule, arguments.stages, arguments.micro_batches)
    run = simulate(schedule)
    stages, micro_batches = schedule.stages, schedule.micro_batches
    data = {
        "schedule": schedule.name,
        "stages": stages,
        "micro_batches": micro_batches,
        "bubble": run.bubble,
        "bubble_over_ideal": (stages - 1) / micro_batches,
        "peak_live_micro_batches": list(run.peak_live),
        "grid": run.timeline().splitlines(),
    }
    text = (
        f"{schedule.name}: {stages} stages, {micro_batches} micro-batches; a backward takes as long as two forwards\n",
        run.timeline(),
        f"\nidle: {run.bubble:.1%} of the step = (p - 1) / (m + p - 1) = {stages - 1}/{micro_batches + stages - 1}, "
        f"or {(stages - 1) / micro_batches:.1%} on top of the ideal time = (p - 1) / m",
        f"micro-batches whose activations a stage keeps at once: {', '.join(map(str, run.peak_live))}",
    )
    return Answer(data, text)
