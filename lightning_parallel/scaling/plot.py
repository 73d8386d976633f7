"""Pure: figures of laws and runs: loss over model size at equal compute, and the frontier of optimal sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_parallel.scaling.checks import BUDGETS, check_range
from lightning_parallel.scaling.isoflop import Valley
from lightning_parallel.scaling.laws import FLOPS_PER_PARAM_AND_TOKEN, LAWS, Law
from lightning_parallel.scaling.runs import Run, why_unwritable

__all__ = ["check_image", "plot_scaling"]

SIDES = 10.0
"""Curves reach from this factor below the optimal size to this factor above it, and to every run."""
SIDES_OF_RUNS = 3.0
"""The same in figures with runs, whose valleys would look flat beside curves that go much further."""
POINTS = 81


def plot_scaling(
    path: str | Path,
    law: Law,
    budgets: Sequence[float],
    runs: Sequence[Run] = (),
    valleys: Sequence[Valley] = (),
) -> Path:
    """Draws isoFLOP curves of a law and the frontiers of it and every published law into an image.

    Args:
        path: of the image; its suffix says the format, such as ``.png``.
        law: whose curves to draw.
        budgets: FLOPs, one curve each.
        runs: finished runs, drawn as points.
        valleys: parabolas through runs, drawn through them; their bottoms are drawn on the frontier.

    Raises:
        ValueError: a suffix that is no image format, or no budget.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if not budgets:
        raise ValueError("a figure needs at least one budget, such as 1e20")
    if not runs:
        for flops in budgets:
            check_range("budgets", flops, BUDGETS, "1e20")
    figure = _new_figure()
    check_image(path)
    left, right = figure.subplots(1, 2)
    _draw_curves(left, law, sorted(budgets), runs, valleys)
    _draw_frontiers(right, law, sorted(budgets), valleys)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return Path(path)


def check_image(path: str | Path) -> None:
    """Raises ValueError if no image can have this name, ModuleNotFoundError if none can be drawn."""
    suffix = Path(path).suffix.lstrip(".").lower()
    if suffix not in _new_figure().canvas.get_supported_filetypes():
        raise ValueError(f"{str(path)!r} does not end like an image; use for example 'scaling.png'")
    why_not = why_unwritable(path)
    if why_not:
        raise ValueError(why_not)


def _new_figure() -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("figures need matplotlib: pip install 'lightning-parallel[plots]'") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_curves(axes: Any, law: Law, budgets: Sequence[float], runs: Sequence[Run], valleys: Sequence[Valley]) -> None:
    """Loss over parameters, one colour per budget; dots are runs, stars the optima, dotted lines the parabolas."""
    optima = [law.pair(flops) for flops in budgets]
    axes.plot([best.params for best in optima], [best.loss for best in optima], color="0.7", zorder=1)
    for place, (flops, best) in enumerate(zip(budgets, optima, strict=True)):
        colour = f"C{place % 10}"
        near = [run for run in runs if _nearest(run.flops, budgets) == flops]
        reach = SIDES_OF_RUNS if runs else SIDES
        low = min([best.params / reach, *(run.params for run in near)])
        high = max([best.params * reach, *(run.params for run in near)])
        sizes = _between(low, high)
        losses = [law.surface(size, flops / FLOPS_PER_PARAM_AND_TOKEN / size) for size in sizes]
        axes.plot(sizes, losses, color=colour, label=f"{flops:.2g} FLOPs")
        axes.plot([best.params], [best.loss], marker="*", markersize=11, color=colour)
        axes.plot([run.params for run in near], [run.loss for run in near], "o", color=colour)
        for valley in (valley for valley in valleys if _nearest(valley.flops, budgets) == flops):
            sizes = _between(valley.runs[0].params, valley.runs[-1].params)
            axes.plot(sizes, [valley.parabola(size) for size in sizes], ":", color=colour)
    keys = [("-", "*", "optima of the law"), *([("none", "o", "runs")] if runs else [])]
    keys += [(":", "none", "parabolas through the runs")] if valleys else []
    for line, marker, name in keys:
        axes.plot([], [], linestyle=line, marker=marker, color="0.5", label=name)
    axes.set(xscale="log", xlabel="parameters", ylabel="loss, nats per token", title=f"equal compute, law {law.name!r}")
    axes.legend(fontsize="small")


def _nearest(flops: float, budgets: Sequence[float]) -> float:
    return min(budgets, key=lambda budget: abs(math.log(budget / flops)))


def _between(low: float, high: float) -> list[float]:
    return [low * (high / low) ** (index / (POINTS - 1)) for index in range(POINTS)]


def _draw_frontiers(axes: Any, law: Law, budgets: Sequence[float], valleys: Sequence[Valley]) -> None:
    """Optimal parameters over FLOPs of every law, over the budgets and a decade around them."""
    ends = (budgets[0] / SIDES, budgets[-1] * SIDES)
    for other in (published for published in LAWS if published.name != law.name):
        axes.plot(ends, [other.optimal_params(flops) for flops in ends], linewidth=1, alpha=0.7, label=other.name)
    axes.plot(ends, [law.optimal_params(flops) for flops in ends], "k", linewidth=2, label=law.name)
    if valleys:
        for inside, marker, name in (
            (True, "full", "bottoms of the parabolas"),
            (False, "none", "beyond the sizes run"),
        ):
            found = [(valley.flops, valley.params) for valley in valleys if valley.inside == inside]
            if found:
                axes.plot(*zip(*found, strict=True), "ks", fillstyle=marker, label=name)
    axes.set(xscale="log", yscale="log", xlabel="training FLOPs", ylabel="parameters", title="compute-optimal sizes")
    axes.legend(fontsize="small")
