"""Glue: the answer of the planner as tables and sentences for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType

from lightning_parallel.commands.answer import table

__all__ = ["plan_text"]

SHOWN = 8


def plan_text(data: Mapping[str, Any]) -> list[RenderableType]:
    """Tables and sentences of an answer of `planner.report.result_data` with its ``advice``."""
    model, cluster = data["model"], data["cluster"]
    parts: list[RenderableType] = [
        f"{model['parameters']:,} parameters on {cluster['gpus']} x {cluster['gpu']} ({cluster['nodes']} nodes)\n"
    ]
    if data["plans"]:
        parts += [_ranking(data["plans"]), _terms("memory of the fullest rank (GiB)", data["plans"][0], "memory_gib")]
        parts += [_terms("one step (seconds)", data["plans"][0], "step_seconds")]
        best = data["plans"][0]
        parts += ["", best["trainer"], "", best["yaml"], ""]
        parts += [f"also: {line}" for line in best["alternatives"]]
        parts += [best[note] for note in ("precision_note", "recompute_note") if best[note]]
    parts += [_reasons(data["rejected"])] if data["rejected"] else []
    return [*parts, *data["advice"]]


def _layout_cells(layout: Mapping[str, Any]) -> list[str]:
    sizes = f"{layout['tensor']} x {layout['pipeline']} x {layout['data'] * layout['context']}"
    zero = str(layout["zero_stage"]) + (f" +{layout['offload']}" if layout["offload"] != "none" else "")
    return [sizes, zero, str(layout["micro_batch"]), layout["recompute"]]


def _ranking(plans: list[dict[str, Any]]) -> RenderableType:
    columns = ("tensor x pipeline x data", "ZeRO", "micro-batch", "recompute", "GiB", "s/step", "tokens/s/GPU", "MFU")
    grid = table("layouts that fit, fastest first", *columns)
    for plan in plans[:SHOWN]:
        figures = (
            f"{plan['memory_gib']['total']:.1f}",
            f"{plan['step_seconds']['total']:.3g}",
            f"{plan['tokens_per_second_per_gpu']:.0f}",
            f"{plan['mfu']:.1%}",
        )
        grid.add_row(*_layout_cells(plan["layout"]), *figures)
    return grid


def _terms(title: str, plan: Mapping[str, Any], key: str) -> RenderableType:
    terms = [(name.replace("_", " "), value) for name, value in plan[key].items() if value]
    grid = table(title, *(name for name, _ in terms))
    grid.add_row(*(f"{value:.3g}" for _, value in terms))
    return grid


def _reasons(rejected: list[dict[str, Any]]) -> RenderableType:
    grid = table("layouts that do not", "tensor x pipeline x data", "ZeRO", "micro-batch", "recompute", "reason")
    for entry in rejected:
        grid.add_row(*_layout_cells(entry["layout"]), entry["reason"])
    return grid
