"""GradientCompleter: parameters held in several places end with the gradient of one process, on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.gradient_sync import GradientCompleter, sum_over_holders
from lightning_parallel.layout import ParallelLayout
from lightning_parallel.mesh import Mesh, add_stage_groups, build_mesh
from lightning_parallel.parameters import ParameterTag
from lightning_parallel.tensor_parallel.sharding import ShardSpec, split_even, split_kv_heads, split_qkv
from lightning_parallel.tensor_parallel.shards import shard_tensor
from tests.distributed.formulas import wave
from tests.harness import Ranks

CPU = torch.device("cpu")


def mesh_of(**sizes: int) -> Mesh:
    return build_mesh(ParallelLayout(**sizes), CPU)


def close(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def parameter(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def filled(like: Tensor, value: float) -> Tensor:
    return torch.full_like(like, value, requires_grad=False)


def whole(name: str, p: Tensor, partial: bool = False, stages: tuple[int, ...] = (0,)) -> ParameterTag:
    return ParameterTag(name, tuple(p.shape), None, partial, stages)


# ------------------------------------------------------------------------------------------------ partial gradients
def check_partial(rank: int, world_size: int) -> None:
    names = ["a", "b", "frozen", "half", "nowhere", "plain", "somewhere"]
    parameters = {n: parameter(3, dtype=torch.bfloat16 if n == "half" else torch.float64) for n in names}
    parameters["frozen"].requires_grad_(False)
    tags = {n: whole(n, p, partial=n != "plain") for n, p in parameters.items()}
    completer = GradientCompleter(parameters, tags, mesh_of(tensor=world_size))
    assert not completer.is_empty
    total = world_size * (world_size + 1) / 2
    expected = {"a": total, "b": total, "half": total, "somewhere": 1.0, "plain": rank + 1.0, "frozen": rank + 1.0}
    for _ in range(2):
        for n, p in parameters.items():
            p.grad = None if n == "nowhere" or (n == "somewhere" and rank) else filled(p, rank + 1.0)
        completer.complete()
        for n, value in expected.items():
            close(parameters[n].grad, filled(parameters[n], value))
        assert parameters["nowhere"].grad is None


@pytest.mark.parametrize("world_size", [2, 3])
def test_partial_gradients_are_summed(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_partial)


# ------------------------------------------------------------------------------------------------ replicated heads
def specs(ranks: int) -> list[tuple[ShardSpec, tuple[int, ...]]]:
    """Shards that several ranks hold, with the shape of the whole parameter."""
    heads = ranks // 2
    return [
        (split_kv_heads(0, heads=1, head_dim=2, ranks=ranks), (2, 3)),
        (split_kv_heads(0, heads=heads, head_dim=3, ranks=ranks), (3 * heads,)),
        (split_kv_heads(1, heads=heads, head_dim=2, ranks=ranks), (5, 2 * heads)),
        (split_qkv(0, heads=ranks, kv_heads=1, head_dim=2, ranks=ranks), (2 * (ranks + 2), 3)),
    ]


def whole_gradient(local: dict[int, Tensor], shape: tuple[int, ...], spec: ShardSpec) -> Tensor:
    """Each element is the sum over the ranks that hold it and have a gradient."""
    total = torch.zeros(shape, dtype=torch.float64)
    for rank, mine in local.items():
        for segment, where in spec.local_slices(rank):
            piece = mine.narrow(spec.dim, where.start, where.stop - where.start)
            total.narrow(spec.dim, segment.start, segment.size).add_(piece)
    return total


def check_replicated(rank: int, world_size: int) -> None:
    mesh = mesh_of(tensor=world_size)
    assert mesh.tensor is not None
    for spec, shape in specs(world_size):
        assert spec.replicated
        local = {r: wave(*spec.local_shape(shape, r), phase=r) for r in range(world_size)}
        expected = shard_tensor(whole_gradient(local, shape, spec), spec, rank)
        gradient = local[rank].clone()
        sum_over_holders(gradient, spec, rank, mesh.tensor)
        close(gradient, expected)

        names = ["kv", "unused", "frozen"]
        parameters = {n: nn.Parameter(torch.zeros_like(gradient)) for n in names} | {"even": parameter(1)}
        parameters["frozen"].requires_grad_(False)
        tags = {n: ParameterTag(n, shape, spec) for n in names}
        tags["even"] = ParameterTag("even", (world_size,), split_even(0, world_size, world_size))
        completer = GradientCompleter(parameters, tags, mesh)
        parameters["kv"].grad = local[rank].clone()
        parameters["even"].grad = filled(parameters["even"], float(rank))
        completer.complete()
        close(parameters["kv"].grad, expected)
        close(parameters["even"].grad, filled(parameters["even"], float(rank)))
        assert parameters["unused"].grad is None, "what no rank used keeps None"
        assert parameters["frozen"].grad is None

        parameters["kv"].grad = local[0].clone() if rank == 0 else None
        completer.complete()
        close(parameters["kv"].grad, shard_tensor(whole_gradient({0: local[0]}, shape, spec), spec, rank))


@pytest.mark.parametrize("world_size", [2, 4])
def test_heads_that_several_ranks_hold(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_replicated)


def check_hooks(rank: int, world_size: int) -> None:
    mesh = mesh_of(tensor=world_size)
    spec, shape = specs(world_size)[0]
    local = {r: wave(*spec.local_shape(shape, r), phase=r) for r in range(world_size)}
    total = whole_gradient(local, shape, spec)
    norm, kv, frozen = parameter(3), nn.Parameter(torch.zeros_like(local[rank])), parameter(3)
    frozen.requires_grad_(False)
    tags = {
        "norm": whole("norm", norm, partial=True),
        "kv": ParameterTag("kv", shape, spec),
        "frozen": whole("frozen", frozen, partial=True),
    }
    handles = GradientCompleter({"norm": norm, "kv": kv, "frozen": frozen}, tags, mesh).hook_every_backward()
    for count in (1, 2):
        ((norm * (rank + 1)).sum() + (kv * local[rank]).sum()).backward()
        close(norm.grad, filled(norm, 3.0 * count))
        close(kv.grad, shard_tensor(total, spec, rank) * count)
    for handle in handles:
        handle.remove()
    norm.grad = None
    (norm * (rank + 1)).sum().backward()
    close(norm.grad, filled(norm, rank + 1.0))


def test_sums_in_every_backward_pass(ranks: Ranks) -> None:
    """So that any accumulation by the user is right."""
    ranks(2, check_hooks)


# ------------------------------------------------------------------------------------------------ several owners
OWNERS = {
    "zeta": (0, 2),
    "tied": (0, 1, 2),
    "alpha": (1, 2),
    "beta": (0, 1),
    "early": (0, 2),
    "own": (1,),
    "never": (0, 2),
}


def check_owners(rank: int, world_size: int) -> None:
    mesh = mesh_of(pipeline=world_size)
    dtypes = {"beta": torch.float32, "early": torch.float32}
    held = sorted((n for n, stages in OWNERS.items() if rank in stages), reverse=bool(rank % 2))
    parameters = {n: parameter(2, 2, dtype=dtypes.get(n, torch.float64)) for n in held}
    tags = {n: ParameterTag(n, (2, 2), None, False, stages) for n, stages in OWNERS.items()}
    add_stage_groups(mesh, tuple(sorted({stages for stages in OWNERS.values() if len(stages) > 1})))
    completer = GradientCompleter(parameters, tags, mesh)
    for step in range(3):
        for n, p in parameters.items():
            missing = n == "never" or (n == "early" and rank == 2)
            p.grad = None if missing else filled(p, 10.0**rank + step)
        completer.complete()
        for n, p in parameters.items():
            givers = [s for s in OWNERS[n] if not (n == "early" and s == 2)]
            if n == "never":
                assert p.grad is None
            else:
                close(p.grad, filled(p, sum(10.0**s + step for s in givers)))


def test_f18_overlapping_sets_of_owners(ranks: Ranks) -> None:
    """Groups overlap, and every stage declares its parameters in another order."""
    ranks(3, check_owners, timeout=30)


def check_mixed(rank: int, world_size: int) -> None:
    mesh = mesh_of(pipeline=2, tensor=2)
    p = parameter(2)
    add_stage_groups(mesh, ((0, 1),))
    completer = GradientCompleter({"norm": p}, {"norm": whole("norm", p, True, (0, 1))}, mesh)
    p.grad = filled(p, 10.0**rank)
    completer.complete()
    close(p.grad, filled(p, 1111.0))


def test_partial_and_shared_at_once(ranks: Ranks) -> None:
    """A norm under sequence parallelism that two stages share."""
    ranks(4, check_mixed)


def check_empty(rank: int, world_size: int) -> None:
    p = parameter(2)
    completer = GradientCompleter({"p": p}, {"p": whole("p", p)}, mesh_of(data=world_size))
    assert completer.is_empty
    p.grad = filled(p, float(rank))
    completer.complete()
    close(p.grad, filled(p, float(rank)))
    assert completer.hook_every_backward() == []


def test_nothing_to_complete(ranks: Ranks) -> None:
    ranks(2, check_empty)
