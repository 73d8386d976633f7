"""Meshes: every group of every layout of 4 ranks holds the ranks that the layout says, on every rank."""

from __future__ import annotations

import copy
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_parallel.layout import ParallelLayout
from lightning_parallel.mesh import Mesh, add_stage_groups, build_mesh, gather_groups, gradient_group
from tests.harness import Ranks

CPU = torch.device("cpu")
LAYOUTS = [(p, d, 4 // p // d) for p in (1, 2, 4) for d in (1, 2, 4) if 4 % (p * d) == 0]
FIELDS = {
    "tensor": "tensor_groups",
    "data": "data_groups",
    "pipeline": "pipeline_groups",
    "boundary": "pipeline_groups",
    "control": "pipeline_groups",
    "model": "model_groups",
    "model_control": "model_groups",
    "data_control": "data_groups",
}


def members(group: Any) -> list[int] | None:
    """Ranks that a collective over the group reaches."""
    if group is None:
        return None
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, dist.get_rank(), group=group)
    return found


def check_groups(rank: int, world_size: int) -> None:
    for pipeline, data, tensor in LAYOUTS:
        layout = ParallelLayout(pipeline, data, tensor)
        mesh = build_mesh(layout, CPU, timedelta(seconds=15))
        for field, groups in FIELDS.items():
            mine = next(ranks for ranks in getattr(layout, groups)() if rank in ranks)
            expected = list(mine) if len(mine) > 1 else None
            assert members(getattr(mesh, field)) == expected, f"{field} of {layout}"
        assert members(mesh.world) == members(mesh.world_control) == [0, 1, 2, 3]
        check_place(mesh, layout, rank)


def check_place(mesh: Mesh, layout: ParallelLayout, rank: int) -> None:
    here = layout.coordinate(rank)
    assert (mesh.layout, mesh.rank, mesh.device) == (layout, rank, CPU)
    assert (mesh.stage, mesh.data_rank, mesh.tensor_rank) == (here.pipeline, here.data, here.tensor)
    assert mesh.coordinate == here
    assert mesh.is_last_stage == (here.pipeline == layout.pipeline - 1)
    holder = SimpleNamespace(group=mesh.data, plain=[1])
    copied = copy.deepcopy(holder, mesh.groups_by_id())
    assert copied.group is mesh.data
    assert copied.plain is not holder.plain
    found = [mesh.rank_of_stage(stage) for stage in range(layout.pipeline)]
    assert found == list(next(ranks for ranks in layout.pipeline_groups() if rank in ranks))


def test_groups_of_every_layout(ranks: Ranks) -> None:
    ranks(4, check_groups)


def check_apart(rank: int, world_size: int) -> None:
    mesh = build_mesh(ParallelLayout(pipeline=2, data=2), CPU)
    assert len({id(g) for g in (mesh.pipeline, mesh.boundary, mesh.control)}) == 3
    assert mesh.data is not mesh.data_control
    gradients = gradient_group(mesh)
    assert gradients is gradient_group(mesh), "it is made once"
    assert gradients not in (mesh.data, mesh.data_control, *gather_groups(mesh))
    assert members(gradients) == members(mesh.data)
    assert all(dist.get_backend(g) == "gloo" for g in (mesh.control, mesh.data_control))


def test_groups_over_the_same_ranks_are_apart(ranks: Ranks) -> None:
    """What is sent in one is not received in another."""
    ranks(4, check_apart)


def check_owners(rank: int, world_size: int, pipeline: int, data: int, tensor: int) -> None:
    layout = ParallelLayout(pipeline, data, tensor)
    mesh = build_mesh(layout, CPU)
    owners = tuple(s for s in ((0, 1), (0, 3), (0, 1, 3), (1, 2, 3), (2,)) if max(s) < pipeline)
    add_stage_groups(mesh, owners)
    add_stage_groups(mesh, owners)  # known ones are kept
    line = next(ranks for ranks in layout.pipeline_groups() if rank in ranks)
    expected = {s: [line[stage] for stage in s] for s in owners if mesh.stage in s and len(s) > 1}
    assert {s: members(group) for s, group in mesh.stage_pairs.items()} == expected


@pytest.mark.parametrize("layout", [(4, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_groups_of_owners(ranks: Ranks, layout: tuple[int, int, int]) -> None:
    ranks(4, check_owners, *layout)


def check_size(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="layout pipeline=2 x data=1 x tensor=2 needs 4 processes, but 2 are running"):
        build_mesh(ParallelLayout(2, 1, 2), CPU)


def test_a_world_of_another_size(ranks: Ranks) -> None:
    ranks(2, check_size)


def check_alone(rank: int, world_size: int) -> None:
    mesh = build_mesh(ParallelLayout(), CPU)
    assert [getattr(mesh, field) for field in (*FIELDS, "world")] == [None] * (len(FIELDS) + 1)
    assert mesh.is_last_stage
    add_stage_groups(mesh, ((0,),))
    assert mesh.stage_pairs == {}
    assert gradient_group(mesh) is None


def test_one_rank_needs_no_group(ranks: Ranks) -> None:
    ranks(1, check_alone)
