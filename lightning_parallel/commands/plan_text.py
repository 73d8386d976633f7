"""Glue: the answer of the planner as tables and sentences for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType

from lightning_parallel.commands.answer import short, table
from lightning_parallel.planner.hardware import GIB
from lightning_parallel.planner.units import memory_text, plural

__all__ = ["plan_text"]

SHOWN = 8
SHOWN_BEYOND = 4


def plan_text(data: Mapping[str, Any]) -> list[RenderableType]:
    """Tables and sentences of an answer of `planner.report.result_data` with its ``advice``."""
    parts: list[RenderableType] = [*_assumed(data), ""]
    if data["plans"]:
        best = data["plans"][0]
        parts += [_ranking(data), *_other_schedules(data["plans"][:SHOWN]), *_more(data["plans"], "layouts fit")]
        parts += [_memory(best), *_elsewhere(best), _seconds(best), *_run(best, _device_of(data))]
        parts += ["", *_runs_it(best)]
        notes = ("precision_note", "recompute_note") if best["strategy"]["class_path"] else ()
        parts += [best[note] for note in notes if best[note]]
    if data["not_run_here"]:
        parts += [_beyond(data["not_run_here"]), *_more(data["not_run_here"], "such layouts", SHOWN_BEYOND)]
    if data["rejected"]:
        parts += _reasons(data["rejected"])
    return [*parts, "", *data["advice"]]


def _assumed(data: Mapping[str, Any]) -> list[str]:
    """What is planned: sizes, machines and training, given or by default."""
    model, cluster, job = data["model"], data["cluster"], data["job"]
    kept = ", ".join(f"{name.replace('_', ' ')} {size:g}" for name, size in job["bytes_per_parameter"].items() if size)
    trained = "" if job["trainable"] == 1 else f", {job['trainable']:.3g} of them trained"
    return [
        f"{model['parameters']:,} parameters{trained}: {plural(model['layers'], 'layer')}, hidden {model['hidden']}, "
        f"{plural(model['heads'], 'head')}, MLP {model['ffn']}, vocabulary {model['vocab']}",
        f"{plural(job['sequences_per_step'], 'sequence')} of {plural(model['seq'], 'token')} per step, products in "
        f"{job['precision']}, {job['optimizer']}, {job['attention']} attention, {job['loss']} loss",
        f"{_states(job)}: bytes per parameter of {kept}",
        f"on {cluster['gpus']} x {cluster['gpu']} ({plural(cluster['nodes'], 'node')})",
        *data.get("assumed", ()),
    ]


def _states(job: Mapping[str, Any]) -> str:
    """What the kinds differ in are products that are narrower than 32 bit."""
    return "states" if job["precision"] in ("fp32", "tf32") else f"states {job['states']!r}"


def _device_of(data: Mapping[str, Any]) -> str:
    return "CPU" if data["cluster"]["gpu"] == "cpu" else "GPU"


def _layout_cells(layout: Mapping[str, Any]) -> list[str]:
    sizes = f"{layout['tensor']}x{layout['pipeline']}x{layout['data'] * layout['context']}"
    return [sizes, str(layout["zero_stage"]) + (f"+{layout['offload']}" if layout["offload"] != "none" else "")]


def _ranking(data: Mapping[str, Any]) -> RenderableType:
    columns = ("layout", "ZeRO", "micro", "recompute", "memory", "s/step", "tok/s", "MFU/HFU")
    order = data.get("order", "fastest first")
    title = f"layouts that fit, {order}: tensor x pipeline x data, sequences of a micro-batch,"
    grid = table(f"{title} tokens/s per {_device_of(data)}, MFU and HFU in %", *columns)
    for plan in data["plans"][:SHOWN]:
        layout = plan["layout"]
        figures = (
            memory_text(plan["memory_gib"]["total"] * GIB),
            f"{plan['step_seconds']['total']:.3g}",
            f"{plan['tokens_per_second_per_gpu']:.0f}",
            f"{plan['mfu']:.1%}/{plan['hfu']:.1%}".replace("%", ""),
        )
        grid.add_row(*_layout_cells(layout), str(layout["micro_batch"]), layout["recompute"], *figures)
    return grid


def _other_schedules(plans: list[dict[str, Any]]) -> list[str]:
    """What the table has no room for."""
    named: dict[str, list[str]] = {}
    for plan in plans:
        named.setdefault(plan["layout"]["schedule"], []).append(" with ZeRO ".join(_layout_cells(plan["layout"])))
    if len(named) == 1:
        return [f"schedule: {name}" for name in named if name != "1f1b"]
    return [f"schedule {name}: {', '.join(cells)}" for name, cells in named.items() if name != "1f1b"]


def _beyond(entries: list[dict[str, Any]]) -> RenderableType:
    """What is left to gain with other runtimes."""
    grid = table(
        "faster, but nothing here runs them by itself", "layout", "ZeRO", "memory", "s/step", "faster", "needs"
    )
    grid.columns[-1].justify = "left"
    for entry in entries[:SHOWN_BEYOND]:
        percent = entry["faster_percent"]
        grid.add_row(
            *_layout_cells(entry["layout"]),
            memory_text(entry["memory_gib"]["total"] * GIB),
            f"{entry['step_seconds']['total']:.3g}",
            "" if percent is None else f"{percent:.0f}%",
            ", ".join(entry["needs"]),
        )
    return grid


def _more(entries: list[dict[str, Any]], what: str, shown: int = SHOWN) -> list[str]:
    return [f"{len(entries) - shown} more {what}; --json lists all"] if len(entries) > shown else []


def _memory(plan: Mapping[str, Any]) -> RenderableType:
    grid = table("memory of the fullest rank", "term", "size", "figure")
    for name, value in plan["memory_gib"].items():
        if value:
            figure = "exact" if name in plan["memory_exact_terms"] else "estimated"
            grid.add_row(name.replace("_", " "), memory_text(value * GIB), "" if name == "total" else figure)
    return grid


def _elsewhere(plan: Mapping[str, Any]) -> list[str]:
    """Memory beside that of the fullest rank: of the other stages, and of the hosts."""
    stages = plan["memory_by_stage_gib"]
    totals = ", ".join(memory_text(stage["total"] * GIB) for stage in stages)
    held = {name: memory_text(value * GIB) for name, value in plan["host_memory_gib"].items() if value}
    where = {"start": "at the start", "offload": "of offloaded states", "nvme": "on NVMe"}
    hosts = ", ".join(f"{held[name]} {text}" for name, text in where.items() if name in held)
    return [
        *([f"total of each stage: {totals}"] if len(stages) > 1 else []),
        *([f"host memory of a node: {hosts}"] if hosts else []),
    ]


def _seconds(plan: Mapping[str, Any]) -> RenderableType:
    grid = table("one step", "term", "seconds")
    for name, value in plan["step_seconds"].items():
        if value:
            grid.add_row(name, f"{value:.3g}")
    return grid


def _run(plan: Mapping[str, Any], device: str) -> list[str]:
    """How long a run takes, and the one that was asked for."""
    hours = plan["gpu_hours_per_billion_tokens"]
    spelled = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
    rate = f"{short(plan['tokens_per_day'])} tokens per day, {spelled} {device}-hours per billion tokens"
    run = plan.get("run")
    if run is None:
        return [rate]
    cost = f", cost {run['cost']:,.0f} at {run['price']:g} per {device}-hour" if "cost" in run else ""
    took = f"{run['days']:,.3g} days, {run['gpu_hours']:,.0f} {device}-hours"
    return [rate, f"the whole run of {short(run['tokens'])} tokens: {took}{cost}"]


def _runs_it(plan: Mapping[str, Any]) -> list[str]:
    """The strategy of a plan, or why there is none."""
    strategy = plan["strategy"]
    if strategy["class_path"] is None:
        return [f"This plan cannot be run with Lightning: {strategy['why']}."]
    return [plan["trainer"], "", plan["yaml"], "", *(f"also: {line}" for line in plan["alternatives"])]


def _reasons(rejected: list[dict[str, Any]]) -> list[RenderableType]:
    """Those that lack least come first; stages of ZeRO with the same reason share a row."""
    nearest = sorted(rejected, key=lambda entry: entry.get("memory_gib", {}).get("total", float("inf")))
    rows: dict[tuple[str, str], list[str]] = {}
    for entry in nearest:
        sizes, stage = _layout_cells(entry["layout"])
        rows.setdefault((sizes, entry["reason"]), []).append(stage)
    grid = table("layouts that do not fit: tensor x pipeline x data", "layout", "ZeRO", "reason")
    grid.columns[-1].justify = "left"
    shown = list(rows.items())[:SHOWN]
    for (sizes, reason), stages in shown:
        grid.add_row(sizes, ", ".join(dict.fromkeys(stages)), reason)
    return [grid, *_more(nearest, "layouts do not fit", sum(len(stages) for _, stages in shown))]
