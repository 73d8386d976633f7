"""Glue: the small table that says, before training starts, what was chosen."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table

from lightning_parallel.layout import ParallelLayout
from lightning_parallel.pipeline.schedules import build_schedule
from lightning_parallel.pipeline.simulate import simulate_equal_stages
from lightning_parallel.planner.units import plural
from lightning_parallel.strategies.config import ZeroConfig

__all__ = ["LayoutReport", "layout_tables"]


def _stage_rows(partition: Any, layout: ParallelLayout) -> list[tuple[str, str, str]]:
    plan = partition.cut_plan
    rows = []
    for stage in range(layout.pipeline):
        held = [tag for tag in partition.tags.values() if stage in tag.stages]
        local = sum(_numel(tag.local_shape(0)) for tag in held)
        local = local if partition.units is None else -(-local // layout.data)
        blocks = "whole model"
        if plan is not None:
            start, stop = plan.bounds[stage]
            blocks = plan.blocks[start] if stop - start == 1 else f"{plan.blocks[start]} .. {plan.blocks[stop - 1]}"
            blocks += f"  ({plural(stop - start, 'block')})"
        rows.append((str(stage), blocks, f"{local:,}"))
    return rows


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def predicted_bubble(schedule: str, stages: int, micro_batches: int) -> float:
    """Share of the time that stages wait, for equal stages: from the same schedule that runs."""
    return simulate_equal_stages(build_schedule(schedule, stages, micro_batches)).bubble


def _sharded(zero: ZeroConfig, replicas: int) -> str:
    """What each replica has a share of, and where the rest is."""
    what = ("optimizer states", "optimizer states and gradients", "optimizer states, gradients and parameters")
    where = {None: "", "cpu": ", states in host memory", "nvme": ", states in files"}[zero.offload]
    return f"stage {zero.stage}: {what[zero.stage - 1]} in {plural(replicas, 'share')}{where}"


def layout_tables(
    layout: ParallelLayout, partition: Any, options: Any, module: LightningModule, zero: ZeroConfig
) -> list[Table]:
    """Tables of the layout, the layers and the stages."""
    head = Table(title="lightning_parallel", show_header=False, title_justify="left")
    head.add_row(
        "processes", f"{layout.world_size} = pipeline {layout.pipeline} x data {layout.data} x tensor {layout.tensor}"
    )
    if zero.shards_anything(layout.data):
        head.add_row("ZeRO", _sharded(zero, layout.data))
    parts = f"up to {options.micro_batches} per batch"
    if layout.pipeline > 1:
        bubble = predicted_bubble(options.schedule, layout.pipeline, options.micro_batches)
        head.add_row("micro-batches", f"{parts}, schedule {options.schedule}")
        head.add_row("predicted bubble", f"{bubble:.1%} of the time")
    elif options.micro_batches > 1:
        head.add_row("micro-batches", parts)
    total = sum(tag.numel for tag in partition.tags.values())
    head.add_row("parameters", f"{total:,} in {type(module).__name__}")
    stages = Table("stage", "blocks", "parameters per rank")
    for row in _stage_rows(partition, layout):
        stages.add_row(*row)
    tables = [head, stages]
    if layout.tensor > 1:
        layers = Table("layers", "style", "split")
        for layer_row in partition.tensor_plan.describe():
            layers.add_row(*layer_row)
        tables.insert(1, layers)
    return tables


class LayoutReport:
    """Prints the tables on rank 0, again only if they have changed since the trainer's last run."""

    def __init__(self) -> None:
        self._printed = ""

    @rank_zero_only
    def show(self, tables: list[Table]) -> None:
        """Prints tables as they are; see `layout_tables`."""
        console = Console()
        with console.capture() as capture:
            for table in tables:
                console.print(table)
        text = capture.get()
        if text != self._printed:
            console.file.write(text)
            console.file.flush()
        self._printed = text
