"""Glue: ``lightning-parallel explain``: the arithmetic of parallel training, worked with the code that runs it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from lightning_parallel.commands.answer import Answer, add_command, count, positive, table, up_to
from lightning_parallel.pipeline.schedules import SCHEDULE_NAMES, build_schedule
from lightning_parallel.pipeline.simulate import peak_put_off_micro_batches, simulate_equal_stages
from lightning_parallel.planner.explain import Ring, collectives, ring_all_reduce, split_product, wires, zero_rows
from lightning_parallel.planner.hardware import Cluster, find_gpu
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.typical import typical_shape
from lightning_parallel.planner.units import plural

if TYPE_CHECKING:
    from lightning_parallel.commands.answer import Subcommands

__all__ = ["add_parser"]

# Ranks of a ring whose every step is shown, and numbers of a vector: more fill screens.
MOST_SHOWN = 8
MOST_NUMBERS = 8


def add_parser(commands: Subcommands) -> None:
    """Adds ``explain`` with one subcommand per topic."""
    summary = "work through the arithmetic of parallel training"
    topics = commands.add_parser("explain", help=summary, description=summary).add_subparsers(
        dest="topic", required=True, metavar="TOPIC"
    )
    bubble = add_command(topics, "bubble", _bubble, summary="where the time of a pipeline goes")
    bubble.add_argument("--stages", type=up_to(64), default=4)
    bubble.add_argument("--micro-batches", type=up_to(1024), default=8)
    bubble.add_argument("--schedule", choices=SCHEDULE_NAMES, default="1f1b")
    bubble.add_argument("--plot", type=Path, help="also draw the schedule into this PNG or SVG file")
    ring = add_command(topics, "ring", _ring, summary="a ring all-reduce, step by step")
    ring.add_argument("--ranks", type=up_to(64), default=4)
    every = add_command(topics, "collectives", _collectives, summary="what each collective leaves on each rank")
    every.add_argument("--ranks", type=up_to(64), default=4)
    zero = add_command(topics, "zero", _zero, summary="what each ZeRO stage leaves on each rank")
    zero.add_argument("--params", type=positive, default=7e9)
    zero.add_argument("--ranks", type=count, default=4)
    tensor = add_command(topics, "tensor", _tensor, summary="a product of matrices over tensor ranks")
    tensor.add_argument("--ranks", type=up_to(64), default=2)
    topology = add_command(topics, "topology", _topology, summary="which traffic belongs on which wire")
    topology.add_argument("--params", type=positive, default=70e9)
    topology.add_argument("--gpu", default="h100-80gb")


def _bubble(arguments: argparse.Namespace) -> Answer:
    schedule = build_schedule(arguments.schedule, arguments.stages, arguments.micro_batches)
    run = simulate_equal_stages(schedule)
    stages, micro_batches = schedule.stages, schedule.micro_batches
    is_split, put_off = schedule.splits_backward, list(peak_put_off_micro_batches(schedule))
    over_ideal = sum(run.idle) / sum(run.busy)
    data = {
        "schedule": schedule.name,
        "stages": stages,
        "micro_batches": micro_batches,
        "bubble": run.bubble,
        "bubble_over_ideal": over_ideal,
        "peak_live_micro_batches": list(run.peak_live),
        "peak_put_off_micro_batches": put_off,
        "grid": run.timeline().splitlines(),
    }
    if arguments.plot is not None:
        # Only a drawing needs matplotlib.
        from lightning_parallel.commands.plots import draw_schedule

        draw_schedule(run, arguments.plot)
    text = (
        f"{schedule.name}: {stages} stages, {micro_batches} micro-batches; a backward takes as long as two forwards"
        + (", half of it (W) for the gradients of weights, for which no stage waits\n" if is_split else "\n"),
        run.timeline(),
        f"\nidle: {run.bubble:.1%} of the step{_formulas(stages, micro_batches, over_ideal, is_split)}",
        f"micro-batches whose activations a stage keeps at once: {', '.join(map(str, run.peak_live))}",
        *([f"and whose W it has put off at most: {', '.join(map(str, put_off))}"] if is_split else []),
    )
    return Answer(data, text)


def _formulas(stages: int, micro_batches: int, over_ideal: float, is_split: bool) -> str:
    """Where the idle share of p stages with m micro-batches comes from."""
    share, over = f"{stages - 1}/{micro_batches + stages - 1}", f"{over_ideal:.1%} on top of the ideal time"
    if is_split:
        usual = (stages - 1) / (micro_batches + stages - 1)
        return f", or {over}; without the split it is (p - 1) / (m + p - 1) = {share} = {usual:.1%}"
    return f" = (p - 1) / (m + p - 1) = {share}, or {over} = (p - 1) / m"


def _numbers(ranks: int) -> list[list[float]]:
    """A vector per rank in which every number tells its rank and place: rank 2 holds 20, 21, ..."""
    return [[10.0 * rank + place for place in range(ranks)] for rank in range(ranks)]


def _vector(values: Sequence[float]) -> str:
    return "[" + " ".join(f"{value:g}" for value in values) + "]"


def _short_vector(values: Sequence[float]) -> str:
    if len(values) <= MOST_NUMBERS:
        return _vector(values)
    return f"{_vector(values[:3])[:-1]} .. {values[-1]:g}]"


def _ring(arguments: argparse.Namespace) -> Answer:
    ring = ring_all_reduce(_numbers(arguments.ranks))
    steps = [
        {
            "phase": step.phase,
            "sends": [list(send) for send in step.sends],
            "complete": [list(c) for c in step.complete],
        }
        for step in ring.steps
    ]
    data = {"ranks": ring.ranks, "sends": ring.sends, "bytes_per_rank_over_size": ring.share, "steps": steps}
    n = ring.ranks
    if n > MOST_SHOWN:
        whole: RenderableType = f"ring all-reduce over {n} ranks in {len(ring.steps)} steps; --json lists each"
    else:
        whole = _ring_table(ring)
    text = (
        f"{ring.sends} sends = 2 (n - 1) n; each rank sends 2 (n - 1) / n = {ring.share:.3g} times the vector, "
        f"less than twice however many ranks there are; afterwards every rank holds {_short_vector(ring.result[n - 1])}"
    )
    return Answer({**data, "result": [list(vector) for vector in ring.result]}, (whole, text))


def _ring_table(ring: Ring) -> RenderableType:
    grid = table(
        f"ring all-reduce over {ring.ranks} ranks", "step", "sends rank>rank:chunk", "complete chunks per rank"
    )
    for number, step in enumerate(ring.steps):
        sends = " ".join(f"{a}>{b}:{chunk}" for a, b, chunk in step.sends)
        grid.add_row(f"{number} {step.phase}", sends, " ".join(_vector(chunks) for chunks in step.complete))
    return grid


def _collectives(arguments: argparse.Namespace) -> Answer:
    before = _numbers(arguments.ranks)
    after = collectives(before)
    ranks = len(before)
    shown = range(ranks) if ranks <= 4 else (0, 1, ranks - 1)
    grid = table("what each rank holds afterwards (root is rank 0)", "collective", *(f"rank {r}" for r in shown))
    for name, vectors in {"before": before, **after}.items():
        grid.add_row(name.replace("_", "-"), *(_short_vector(vectors[rank]) for rank in shown))
    data = {"before": before, **{name: [list(v) for v in vectors] for name, vectors in after.items()}}
    return Answer(data, (grid, "--json lists every rank with all its numbers"))


def _zero(arguments: argparse.Namespace) -> Answer:
    rows = zero_rows(arguments.params, arguments.ranks, Cluster(find_gpu("a100-80gb"), nodes=1))
    grid = table(
        f"{arguments.params:.3g} parameters over {plural(arguments.ranks, 'rank')} (GB, 1e9 bytes, per rank)",
        "ZeRO stage",
    )
    for name in ("weights", "gradients", "optimizer", "total"):
        grid.add_column(name, justify="right")
    for row in rows:
        figures = (row.weights, row.gradients, row.optimizer, row.total)
        grid.add_row(str(row.stage), *(f"{size / 1e9:.4g}" for size in figures))
    text = "2 bytes of weight, 2 of gradient, 12 of 32-bit weight and Adam's two moments per parameter"
    data = {
        "parameters": arguments.params,
        "ranks": arguments.ranks,
        "gb_per_rank": [
            {
                "stage": r.stage,
                **{name: getattr(r, name) / 1e9 for name in ("weights", "gradients", "optimizer", "total")},
            }
            for r in rows
        ],
    }
    return Answer(data, (grid, text))


def _tensor(arguments: argparse.Namespace) -> Answer:
    product = split_product(arguments.ranks)
    grid = table("Y = X A B; columns of A and rows of B on each rank", "rank", "columns and rows", "its part of Y")
    for rank, part in enumerate(product.partial):
        ranges = ", ".join(f"{segment.start}:{segment.stop}" for segment in product.columns.parts[rank])
        grid.add_row(str(rank), ranges, _vector(part))
    text = (
        f"the sum of the parts, one all-reduce, is Y = {_vector(product.total)}; between A and B nothing is sent. "
        "A block does this twice (attention, MLP) forward and twice backward: 4 sums of b s h numbers."
    )
    data = {"partial": [list(part) for part in product.partial], "total": list(product.total), "sums_per_block": 4}
    return Answer(data, (grid, text))


def _topology(arguments: argparse.Namespace) -> Answer:
    cluster = Cluster(find_gpu(arguments.gpu), nodes=8)
    job = TrainingJob(typical_shape(arguments.params), cluster, 256)
    found = wires(job, Candidate(tensor=8, data=8, zero_stage=1))
    grid = table("one step of 256 sequences, tensor 8 x data 8", "traffic", "GB summed", "s inside a node", "s across")
    for wire in found:
        grid.add_row(wire.kind, f"{wire.size / 1e9:.4g}", f"{wire.inside:.3g}", f"{wire.across:.3g}")
    tensor, data = found
    text = (
        f"Moving tensor parallelism to the network would cost {tensor.across - tensor.inside:.3g} s a step, moving "
        f"data parallelism there costs {data.across - data.inside:.3g} s: tensor inside a node, data across nodes."
    )
    keys = {wire.kind: {"gb": wire.size / 1e9, "inside": wire.inside, "across": wire.across} for wire in found}
    return Answer(keys, (grid, text))
