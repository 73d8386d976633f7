"""Mechanism: the process groups of one layout. The only place that makes groups; a `Mesh` is always an argument."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from lightning_parallel.layout import Coordinate, ParallelLayout

__all__ = ["Mesh", "build_mesh", "gather_groups", "gradient_group", "launched_world", "whole_world", "world_size"]


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands in a layout, and the groups it communicates in.

    A group of one rank is None: nothing is ever sent in it.

    Attributes:
        layout: sizes of the dimensions.
        rank: global rank of this process.
        device: device of the tensors that travel in the groups.
        world: every rank.
        tensor: ranks that hold slices of the same layers.
        data: ranks that hold the same slice for other samples.
        pipeline: one rank per stage, for collectives between the stages of a replica.
        boundary: the same ranks as `pipeline`, for activations and their gradients only, so that point-to-point
            traffic never interleaves with collectives.
        control: the same ranks on a host-side (gloo) group, for shapes and other Python values: reading them never
            waits for the device.
        model: every rank of one replica (tensor x pipeline); the group of `pipeline` if these are the same ranks.
        model_control: the same ranks on a host-side group.
        data_control: the data ranks on a host-side group.
        world_control: every rank on a host-side group; one of the two above if these are the same ranks.
        stage_pairs: see `add_stage_groups`.
        gradients: see `gradient_group`.
        gathers: see `gather_groups`.
        timeout: how long a collective may wait in groups that are made later.
    """

    layout: ParallelLayout
    rank: int
    device: torch.device
    world: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    boundary: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    model: dist.ProcessGroup | None = None
    model_control: dist.ProcessGroup | None = None
    data_control: dist.ProcessGroup | None = None
    world_control: dist.ProcessGroup | None = None
    stage_pairs: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    gradients: list[dist.ProcessGroup | None] = field(default_factory=list)
    gathers: list[dist.ProcessGroup | None] = field(default_factory=list)
    timeout: timedelta | None = None

    @cached_property
    def coordinate(self) -> Coordinate:
        """Coordinate of this rank."""
        return self.layout.coordinate(self.rank)

    @property
    def stage(self) -> int:
        """Pipeline stage of this rank."""
        return self.coordinate.pipeline

    @property
    def tensor_rank(self) -> int:
        """Index of this rank in its tensor group."""
        return self.coordinate.tensor

    @property
    def data_rank(self) -> int:
        """Index of this rank's replica."""
        return self.coordinate.data

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stage == self.layout.pipeline - 1

    def groups_by_id(self) -> dict[int, dist.ProcessGroup]:
        """Every group that exists yet, for copies of modules, which go on using those that modules refer to."""
        return {id(group): group for group in vars(self).values() if isinstance(group, dist.ProcessGroup)}

    def rank_of_stage(self, stage: int) -> int:
        """Global rank of another stage of the same replica and tensor index."""
        here = self.coordinate
        return self.layout.rank_of(pipeline=stage, data=here.data, tensor=here.tensor)


def _subset(
    groups: tuple[tuple[int, ...], ...], rank: int, timeout: timedelta | None, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Makes every group in the same order on every rank; returns the one that holds `rank`."""
    mine = None
    for ranks in groups:
        if len(ranks) == 1:
            continue
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if rank in ranks:
            mine = group
    return mine


def build_mesh(layout: ParallelLayout, device: torch.device, timeout: timedelta | None = None) -> Mesh:
    """Makes the groups of a layout. Collective: every rank of the world calls it with the same layout.

    Raises:
        ValueError: the world has another size than the layout.
    """
    world_size = dist.get_world_size()
    if layout.world_size != world_size:
        raise ValueError(
            f"the layout pipeline={layout.pipeline} x data={layout.data} x tensor={layout.tensor} needs "
            f"{layout.world_size} processes, but {world_size} are running"
        )
    rank = dist.get_rank()
    pipelines = layout.pipeline_groups()
    boundary = _subset(pipelines, rank, timeout)
    if boundary is not None:
        # Connects the ranks: the first transfer between two of them would wait for all others, which wait for it.
        dist.all_reduce(torch.zeros(1, device=device), group=boundary)
    tensor, data = _subset(layout.tensor_groups(), rank, timeout), _subset(layout.data_groups(), rank, timeout)
    pipeline, control = _subset(pipelines, rank, timeout), _subset(pipelines, rank, timeout, backend="gloo")
    model_control = _subset(layout.model_groups(), rank, timeout, backend="gloo")
    data_control = _subset(layout.data_groups(), rank, timeout, backend="gloo")
    # Groups cost connections, threads and device memory: what all ranks use one after the other is shared.
    world_control = model_control or data_control
    if layout.data > 1 and layout.tensor * layout.pipeline > 1:
        world_control = _subset((tuple(range(world_size)),), rank, timeout, backend="gloo")
    return Mesh(
        layout=layout,
        rank=rank,
        device=device,
        world=dist.group.WORLD if world_size > 1 else None,
        tensor=tensor,
        data=data,
        pipeline=pipeline,
        boundary=boundary,
        control=control,
        model=pipeline if layout.tensor == 1 else _subset(layout.model_groups(), rank, timeout),
        model_control=model_control,
        data_control=data_control,
        world_control=world_control,
        timeout=timeout,
    )


def add_stage_groups(mesh: Mesh, owners: tuple[tuple[int, ...], ...], timeout: timedelta | None = None) -> None:
    """Makes the groups that sum gradients of parameters owned by several stages. Collective over the world.

    Args:
        mesh: groups are added to `mesh.stage_pairs`, keyed by the tuple of stages.
        owners: sets of stages, in the same order on every rank.
    """
    for stages in owners:
        if stages in mesh.stage_pairs or len(stages) < 2:
            continue
        groups = tuple(tuple(ranks[s] for s in stages) for ranks in mesh.layout.pipeline_groups())
        mine = _subset(groups, mesh.rank, timeout)
        if mine is not None:
            mesh.stage_pairs[stages] = mine


def gradient_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """The data ranks in one more group, for gradients that are summed while a backward pass runs.

    When a bucket is full depends on what a rank has computed. What the user's own graph sends in `mesh.data` meanwhile
    (synchronized batch norms, gathered features) comes at another place in that order on each rank, and must not meet
    it: a group matches collectives by their order alone. Collective over the world when it is first called.
    """
    if not mesh.gradients:
        group = _subset(mesh.layout.data_groups(), mesh.rank, mesh.timeout)
        mesh.gradients.append(group)
        if group is not None:
            # Connects the ranks: the first bucket would wait for the others, in whatever they are by then.
            dist.all_reduce(torch.zeros(1, device=mesh.device), group=group)
    return mesh.gradients[0]


def gather_groups(mesh: Mesh) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The data ranks in two more groups, the second one host-side, for parameters that are gathered during steps.

    Ranks put these collectives into an order of their own, so that nothing else may travel in the same groups.
    Collective over the world when it is first called.
    """
    if not mesh.gathers:
        groups = mesh.layout.data_groups()
        mesh.gathers.append(_subset(groups, mesh.rank, mesh.timeout))
        mesh.gathers.append(_subset(groups, mesh.rank, mesh.timeout, backend="gloo"))
    return mesh.gathers[0], mesh.gathers[1]


@contextmanager
def launched_world(timeout: timedelta) -> Generator[dist.ProcessGroup | None, None, None]:
    """A host-side group of all processes that a launcher started, from its variables, for as long as it is needed.

    Raises:
        RuntimeError: not all of them came in time.
    """
    dist.init_process_group("gloo", timeout=timeout)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def whole_world() -> dist.ProcessGroup | None:
    """Every rank, before there is a mesh; None for one process."""
    return dist.group.WORLD if world_size() > 1 else None


def world_size() -> int:
    """Number of processes that were started together; 1 as long as none were."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
