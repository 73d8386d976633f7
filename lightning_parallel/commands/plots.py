"""Glue: drawings of what the command line explains (needs the extra ``plots``)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lightning_parallel.pipeline.actions import Kind
from lightning_parallel.pipeline.simulate import Simulation

__all__ = ["draw_schedule"]

COLOURS = {Kind.FORWARD: "#4c72b0", Kind.BACKWARD: "#dd8452", Kind.WEIGHT: "#55a868"}
FORMATS = (".png", ".svg")


def draw_schedule(run: Simulation, path: Path) -> None:
    """Draws one bar per action and one row per stage into a PNG or SVG file.

    Raises:
        ValueError: another kind of file, one that cannot be written, or matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"--plot {path} is no drawing; use a name that ends in {' or '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; install lightning-parallel[plots]")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, run.makespan / 4), 0.6 * len(run.spans) + 1.2))
    axes = figure.subplots()
    for row, spans in enumerate(run.spans):
        for span in spans:
            length = span.stop - span.start
            axes.barh(row, length, left=span.start, color=COLOURS[span.action.kind], edgecolor="white")
            axes.text(
                span.start + length / 2, row, str(span.action.micro_batch), ha="center", va="center", color="white"
            )
    axes.set_yticks(range(len(run.spans)), [f"stage {row}" for row in range(len(run.spans))])
    axes.invert_yaxis()
    axes.set_xlabel("time (forwards)")
    axes.set_title(f"{run.schedule.name}: {run.bubble:.1%} idle")
    try:
        figure.savefig(path, bbox_inches="tight")
    except OSError as error:
        raise ValueError(f"--plot {path} cannot be written: {error.strerror or error}") from error
