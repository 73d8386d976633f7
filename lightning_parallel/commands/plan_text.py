"""Glue: the answer of the planner as tables and sentences for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from lightning_parallel.commands.answer import short, table
from lightning_parallel.planner.hardware import GIB
from lightning_parallel.planner.units import memory_text, plural

__all__ = ["plan_text"]

SHOWN = 8
SHOWN_BEYOND = 4


def plan_text(data: Mapping[str, Any]) -> list[RenderableType]:
    """Tables and sentences of an answer of `planner.report.result_data` with its ``advice``.

    Besides ``assumed`` sentences, it may have the ``order`` of its plans and what is ``listing`` all of them.
    """
    parts: list[RenderableType] = [*_assumed(data), ""]
    all_in = data.get("listing", "--json")
    if data["plans"]:
        best = data["plans"][0]
        parts += [_ranking(data), *_unseen(data["plans"][:SHOWN]), *_more(data["plans"], "layouts that fit", all_in)]
        parts += [_memory(best), *_elsewhere(best), _seconds(best), *_run(best, _device_of(data))]
        parts += ["", *_runs_it(best)]
        notes = ("precision_note", "recompute_note") if best["strategy"]["class_path"] else ()
        parts += [best[note] for note in notes if best[note]]
    if data["not_run_here"]:
        parts += [_beyond(data["not_run_here"]), *_more(data["not_run_here"], "such layouts", all_in, SHOWN_BEYOND)]
    too_large = [entry for entry in data["rejected"] if "memory_gib" in entry]
    others = [entry for entry in data["rejected"] if "memory_gib" not in entry]
    for entries, kind in ((too_large, "do not fit"), (others, "cannot be run like this")):
        parts += _reasons(entries, kind, all_in) if entries else []
    return [*parts, "", *data["advice"]]


def _batches_differ(plans: Sequence[Mapping[str, Any]]) -> bool:
    """Whether seconds of steps do not compare, because of a loader each replica of which reads as many sequences."""
    return len({plan["sequences_per_step"] for plan in plans}) > 1


def _assumed(data: Mapping[str, Any]) -> list[str]:
    """What is planned: sizes, machines and training, given or by default."""
    model, cluster, job = data["model"], data["cluster"], data["job"]
    kept = ", ".join(f"{name.replace('_', ' ')} {size:g}" for name, size in job["bytes_per_parameter"].items() if size)
    first = " of the first layout" if _batches_differ(data["plans"]) else ""
    trained = "" if job["trainable"] == 1 else f", {job['trainable']:.3g} of them trained"
    return [
        f"{model['parameters']:,} parameters{trained}: {plural(model['layers'], 'layer')}, hidden {model['hidden']}, "
        f"{plural(model['heads'], 'head')}, MLP {model['ffn']}, vocabulary {model['vocab']}",
        f"{plural(job['sequences_per_step'], 'sequence')} of {plural(model['seq'], 'token')} per step{first}, "
        f"products in {job['precision']}, {job['optimizer']}, {job['attention']} attention, {job['loss']} loss",
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
    plans = data["plans"][:SHOWN]
    varied = _batches_differ(plans)
    fields = [*(["batch"] if varied else []), *([] if varied and _recomputes_alike(plans) else ["recompute"])]
    order = data.get("order", "fastest first")
    title = f"layouts that fit, {order}: tensor x pipeline x data, sequences of a micro-batch"
    title += " and of a step (batch)," if varied else ","
    grid = table(
        f"{title} tokens/s per {_device_of(data)}, MFU and HFU in %",
        *("layout", "ZeRO", "micro", *fields, "memory", "s/step", "tok/s", "MFU/HFU"),
    )
    for plan in plans:
        layout = plan["layout"]
        known = {"batch": str(plan["sequences_per_step"]), "recompute": layout["recompute"]}
        figures = (
            memory_text(plan["memory_gib"]["total"] * GIB),
            f"{plan['step_seconds']['total']:.3g}",
            f"{plan['tokens_per_second_per_gpu']:.0f}",
            f"{plan['mfu']:.1%}/{plan['hfu']:.1%}".replace("%", ""),
        )
        grid.add_row(*_layout_cells(layout), str(layout["micro_batch"]), *(known[name] for name in fields), *figures)
    return grid


def _recomputes_alike(plans: Sequence[Mapping[str, Any]]) -> bool:
    return len({plan["layout"]["recompute"] for plan in plans}) == 1


def _unseen(plans: list[dict[str, Any]]) -> list[str]:
    """What the table has no room for: other schedules than the usual one, and what the module recomputes anyhow."""
    recompute = plans[0]["layout"]["recompute"]
    alike = _batches_differ(plans) and _recomputes_alike(plans) and recompute != "none"
    return [*([f"recompute: {recompute}"] if alike else []), *_other_schedules(plans)]


def _other_schedules(plans: list[dict[str, Any]]) -> list[str]:
    named: dict[str, list[str]] = {}
    for plan in plans:
        named.setdefault(plan["layout"]["schedule"], []).append(" with ZeRO ".join(_layout_cells(plan["layout"])))
    if len(named) == 1:
        return [f"schedule: {name}" for name in named if name != "1f1b"]
    return [f"schedule {name}: {', '.join(cells)}" for name, cells in named.items() if name != "1f1b"]


def _beyond(entries: list[dict[str, Any]]) -> RenderableType:
    """What is left to gain with other runtimes."""
    title = "faster, but nothing here runs them by itself"
    grid = table(title, "layout", "ZeRO", "memory", "tok/s", "faster", "needs")
    grid.columns[-1].justify = "left"
    for entry in entries[:SHOWN_BEYOND]:
        percent = entry["faster_percent"]
        grid.add_row(
            *_layout_cells(entry["layout"]),
            memory_text(entry["memory_gib"]["total"] * GIB),
            f"{entry['tokens_per_second_per_gpu']:.0f}",
            "" if percent is None else f"{percent:.0f}%",
            ", ".join(entry["needs"]),
        )
    return grid


def _more(entries: list[dict[str, Any]], what: str, all_in: str, shown: int = SHOWN) -> list[str]:
    return [f"{what} besides: {len(entries) - shown}; {all_in} lists all"] if len(entries) > shown else []


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
        f"host memory of a node: {hosts}",
        _start_explained(plan["host_memory_gib"]),
    ]


def _start_explained(host: Mapping[str, float]) -> str:
    """Whose weights lie in host memory before training."""
    if host["start_whole"] <= host["start"]:
        return "at the start: every process builds the model in 32 bit before it goes to its device"
    whole = memory_text(host["start_whole"] * GIB)
    return (
        "at the start: every process makes its own layers in 32 bit, from a model built on the meta device; "
        f"{whole} where it builds the whole model first, as in __init__"
    )


def _seconds(plan: Mapping[str, Any]) -> RenderableType:
    grid = table(f"one step of {plural(plan['sequences_per_step'], 'sequence')}", "term", "seconds")
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


def _reasons(rejected: list[dict[str, Any]], kind: str, all_in: str) -> list[RenderableType]:
    """Those that lack least come first; stages of ZeRO with the same reason share a row."""
    nearest = sorted(rejected, key=lambda entry: entry.get("memory_gib", {}).get("total", float("inf")))
    rows: dict[tuple[str, str], list[str]] = {}
    for entry in nearest:
        sizes, stage = _layout_cells(entry["layout"])
        rows.setdefault((sizes, entry["reason"]), []).append(stage)
    grid = table(f"layouts that {kind}: tensor x pipeline x data", "layout", "ZeRO", "reason")
    grid.columns[-1].justify = "left"
    shown = list(rows.items())[:SHOWN]
    for (sizes, reason), stages in shown:
        grid.add_row(sizes, ", ".join(dict.fromkeys(stages)), reason)
    return [grid, *_more(nearest, f"layouts that {kind}", all_in, sum(len(stages) for _, stages in shown))]
