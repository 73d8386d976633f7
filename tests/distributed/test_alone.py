"""Computing alone: what takes part in no collective leaves nobody waiting and gets values of the right shape."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten

from lightning_parallel import comm
from lightning_parallel.alone import Alone
from lightning_parallel.pipeline.boundary import Boundary
from lightning_parallel.pipeline.outline import Outline, TensorMeta
from lightning_parallel.pipeline.stand_in import arrival_of
from lightning_parallel.tensor_parallel import mappings
from tests.harness import Ranks


def every_collective(group: dist.ProcessGroup) -> dict[str, list[float]]:
    own = torch.tensor([1.0, 2.0])
    whole, part, received, total = torch.empty(4), torch.empty(1), torch.full((2,), 7.0), own.clone()
    comm.all_gather_into(whole, own, group)
    comm.reduce_scatter_into(part, own, group)
    comm.all_reduce_(total, group)
    comm.broadcast_(own, 1, group)
    comm.reduce_(own, 1, group)
    ops = [comm.SendRecv(own, 1, send=True), comm.SendRecv(received, 1, send=False)]
    for work in comm.exchange(ops, group):
        work.wait()
    parts = [torch.empty(2) for _ in range(2)]
    dist.all_gather(parts, own, group=group)
    dist.barrier(group)
    x = torch.ones(2, requires_grad=True)
    gathered = mappings.gather_sequence(mappings.copy_to_group(x, group), group, 0)
    gathered.sum().backward()
    assert x.grad is not None
    tensors = {"whole": whole, "part": part, "total": total, "received": received, "parts": torch.cat(parts)}
    tensors |= {"gathered": gathered.detach(), "gradient": x.grad}
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def alone_then_together(rank: int, world_size: int) -> tuple[dict[str, list[float]], float]:
    found = {}
    if rank == 0:
        with Alone():
            found = every_collective(dist.group.WORLD)
    total = torch.tensor(rank + 1.0)
    comm.all_reduce_(total, dist.group.WORLD)
    return found, float(total)


def test_a_rank_alone_waits_for_nobody(ranks: Ranks) -> None:
    (found, total), (_, other_total) = ranks(2, alone_then_together)
    assert total == other_total == 3.0  # nothing was sent before, so nothing is mistaken for it
    assert found == {
        "whole": [1.0, 2.0, 1.0, 2.0],
        "part": [3.0],
        "total": [1.0, 2.0],
        "received": [0.0, 0.0],
        "parts": [1.0, 2.0, 1.0, 2.0],
        "gathered": [1.0, 1.0, 1.0, 1.0],
        "gradient": [2.0, 2.0],
    }


def test_what_arrives_grows_with_the_samples() -> None:
    def outline(samples: int) -> Outline:
        value = {"x": torch.empty(samples, 5, 3), "flat": torch.empty(5 * samples, requires_grad=True), "n": samples}
        return Outline.of({**value, "word": "a"})

    arrival = arrival_of((outline(1), (outline(1),)), (outline(2), (outline(2),)), 7)
    assert arrival == (outline(7), (outline(7),))
    boundary = Boundary.like(*arrival, torch.device("cpu"))
    assert [tuple(t.shape) for t in boundary.tensors] == [(7, 5, 3), (35,)]
    assert boundary.needs_gradient == [False, True]
    leaf = TensorMeta((2,), torch.float32, False)
    pair = [Outline((leaf,) * count, tree_flatten([0] * count)[1]) for count in (1, 2)]
    with pytest.raises(ValueError, match=r"built differently from one sample and from two.*micro_batches=8"):
        arrival_of((pair[0], ()), (pair[1], ()), 3)
