"""Collectives against what one process computes from all ranks' tensors, which every rank can make by formula.

fp64, so tolerances are those of one reordered sum (1e-12).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.tensor_parallel import mappings
from tests.distributed.formulas import wave
from tests.harness import Ranks

worlds = pytest.mark.parametrize("world_size", [2, 3, 4])


def close(actual: Tensor | None, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def leaf(*shape: int, phase: float = 0.0) -> Tensor:
    return wave(*shape, phase=phase).requires_grad_()


def backward(y: Tensor, weight: Tensor) -> None:
    (y * weight).sum().backward()


# ---- pairs of tensor parallelism


def check_copy_and_reduce(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    weights = [wave(3, 4, phase=r) for r in range(world_size)]
    x = leaf(3, 4)
    y = mappings.copy_to_group(x, group)
    close(y, x.detach())
    backward(y, weights[rank])
    close(x.grad, torch.stack(weights).sum(0))

    parts = [wave(3, 4, phase=5 + r) for r in range(world_size)]
    part = parts[rank].clone().requires_grad_()
    total = mappings.reduce_from_group(part, group)
    close(total, torch.stack(parts).sum(0))
    close(part, parts[rank])
    backward(total, weights[0])
    close(part.grad, weights[0])


@worlds
def test_copy_and_reduce(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_copy_and_reduce)


def check_gather_and_split(rank: int, world_size: int, sizes: list[int] | None) -> None:
    for dim in (0, 1, -1):
        check_gather_and_split_along(rank, world_size, dim, sizes)


def check_gather_and_split_along(rank: int, world_size: int, dim: int, sizes: list[int] | None) -> None:
    group = dist.group.WORLD
    widths = sizes or [2] * world_size
    shape = [3, 2, 5]
    shape[dim] = sum(widths)
    full, weight = wave(*shape), wave(*shape, phase=1)
    parts, weight_parts = full.split(widths, dim), weight.split(widths, dim)
    x = parts[rank].clone().requires_grad_()
    y = mappings.gather_from_group(x, group, dim, sizes)
    close(y, full)
    backward(y, weight)
    close(x.grad, weight_parts[rank])

    x = full.clone().requires_grad_()
    y = mappings.split_to_group(x, group, dim, sizes)
    close(y, parts[rank])
    backward(y, weight_parts[rank])
    close(x.grad, weight)


@worlds
@pytest.mark.parametrize("uneven", [False, True])
def test_gather_and_split(ranks: Ranks, world_size: int, uneven: bool) -> None:
    ranks(world_size, check_gather_and_split, [3, 1, 0, 2][:world_size] if uneven else None)


# ---- pairs of sequence parallelism


def check_sequence(rank: int, world_size: int, length: int) -> None:
    for dim in (0, 1, -1):
        check_sequence_along(rank, world_size, dim, length)


def check_sequence_along(rank: int, world_size: int, dim: int, length: int) -> None:
    group = dist.group.WORLD
    shape = [3, 2, 4]
    shape[dim] = length
    sizes = comm.chunk_sizes(length, world_size)
    assert sizes == [p.shape[dim] for p in wave(*shape).chunk(world_size, dim)] + [0] * sizes.count(0)
    full = [wave(*shape, phase=r) for r in range(world_size)]
    weights = [wave(*shape, phase=9 + r) for r in range(world_size)]

    x = full[rank].clone().requires_grad_()
    y = mappings.reduce_scatter_sequence(x, group, dim)
    close(y, torch.stack(full).sum(0).split(sizes, dim)[rank])
    backward(y, weights[0].split(sizes, dim)[rank])
    close(x.grad, weights[0])

    x = full[0].split(sizes, dim)[rank].clone().requires_grad_()
    y = mappings.gather_sequence(x, group, dim, sizes)
    close(y, full[0])
    backward(y, weights[rank])
    close(x.grad, torch.stack(weights).sum(0).split(sizes, dim)[rank])

    x = full[0].clone().requires_grad_()
    y = mappings.scatter_sequence(x, group, dim)
    close(y, full[0].split(sizes, dim)[rank])
    backward(y, weights[0].split(sizes, dim)[rank])
    close(x.grad, weights[0])


@worlds
@pytest.mark.parametrize("length", [12, 5])
def test_sequence(ranks: Ranks, world_size: int, length: int) -> None:
    ranks(world_size, check_sequence, length)


def check_half_precision_scatter(rank: int, world_size: int, dtype: torch.dtype) -> None:
    x = torch.full((world_size * 2, 3), 0.5 + rank, dtype=dtype)
    y = comm.reduce_scatter_dim(x, dist.group.WORLD, 0)
    assert y.dtype == dtype
    assert y.tolist() == [[0.5 * world_size + sum(range(world_size))] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scatter(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks(2, check_half_precision_scatter, dtype)


# ---- what autograd does around them


def check_awkward_gradients(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    # An expanded gradient, as sum() sends it.
    x = leaf(2, 3)
    mappings.copy_to_group(x, group).sum().backward()
    close(x.grad, torch.full((2, 3), float(world_size), dtype=torch.float64))
    # A transposed one.
    x, weight = leaf(2, 3), wave(3, 2)
    backward(mappings.copy_to_group(x, group).t(), weight)
    close(x.grad, weight.t() * world_size)
    # One that autograd hands to two nodes: reducing it in place would change the other's.
    x, other = leaf(2, 3), leaf(2, 3)
    backward(mappings.copy_to_group(x, group) + other, wave(2, 3, phase=3))
    close(x.grad, wave(2, 3, phase=3) * world_size)
    close(other.grad, wave(2, 3, phase=3))
    # Accumulated over several backward passes.
    x = leaf(2, 3)
    for step in range(3):
        backward(mappings.copy_to_group(x, group), wave(2, 3, phase=step))
    close(x.grad, torch.stack([wave(2, 3, phase=step) for step in range(3)]).sum(0) * world_size)


@worlds
def test_awkward_gradients(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_awkward_gradients)


def check_changes_in_place(rank: int, world_size: int) -> None:
    """Results belong to the caller: changing them in place neither fails nor reaches the input."""
    group = dist.group.WORLD
    for dim in (0, 1):
        for function in (
            mappings.gather_from_group,
            mappings.split_to_group,
            mappings.gather_sequence,
            mappings.reduce_scatter_sequence,
            mappings.scatter_sequence,
        ):
            x = leaf(3, 3)
            sizes = {"sizes": [3] * world_size} if "gather" in function.__name__ else {}
            y = function(x, group, dim, **sizes)
            doubled = y.detach() * 2
            y.mul_(2)
            close(y, doubled)
            close(x, wave(3, 3))
            y.sum().backward()
    x = leaf(3, 3)
    mappings.reduce_from_group(x, group).mul_(2).sum().backward()
    close(x, wave(3, 3))
    close(x.grad, torch.full((3, 3), 2.0, dtype=torch.float64))


def test_changes_in_place(ranks: Ranks) -> None:
    ranks(2, check_changes_in_place)


def check_second_derivatives(rank: int, world_size: int) -> None:
    """Penalty on the input gradient of sum_r w_r * (W_r x)^3, against the same in one process."""
    group = dist.group.WORLD
    weights = [wave(2, 3, phase=r) for r in range(world_size)]
    coefficients = wave(2 * world_size, phase=4)

    def penalty(x: Tensor, y: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((coefficients * y**3).sum(), x, create_graph=True)
        return slope.square().sum()

    x, weight = leaf(3), weights[rank].clone().requires_grad_()
    penalty(x, mappings.gather_from_group(weight @ mappings.copy_to_group(x, group), group, 0)).backward()
    expected, whole = leaf(3), torch.cat(weights).requires_grad_()
    penalty(expected, whole @ expected).backward()
    assert expected.grad is not None
    assert whole.grad is not None
    close(x.grad, expected.grad)
    close(weight.grad, whole.grad.chunk(world_size)[rank])


@worlds
def test_second_derivatives(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_second_derivatives)


# ---- plain collectives


def check_plain(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    x = torch.tensor([float(rank), -float(rank)])
    assert comm.all_reduce_(x, group) is None
    assert x.tolist() == [sum(range(world_size)), -sum(range(world_size))]
    for op, expected in (("max", world_size - 1), ("min", 0)):
        x = torch.tensor([rank])
        work = comm.all_reduce_(x, group, op=op, async_op=True)  # type: ignore[arg-type]
        assert work is not None
        work.wait()
        assert x.tolist() == [expected]
    with pytest.raises(AssertionError, match=r"contiguous, got shape \(2, 3\) with strides \(1, 2\)"):
        comm.all_reduce_(torch.ones(3, 2).t(), group)

    x = torch.full((2,), float(rank))
    comm.broadcast_(x, world_size - 1, group)
    assert x.tolist() == [world_size - 1] * 2
    for dtype in (torch.float32, torch.int16, torch.float8_e5m2):  # backends have no name for the last two
        single = torch.tensor(rank + 1.0).to(dtype)
        comm.broadcast_(single, world_size - 1, group)
        assert single.float() == world_size
        gathered = torch.empty(world_size, 2, dtype=dtype)
        comm.all_gather_into(gathered, torch.full((2,), float(rank)).to(dtype), group)
        assert gathered.float().tolist() == [[r, r] for r in range(world_size)]
    assert comm.gather_objects({"rank": rank}, group) == [{"rank": r} for r in range(world_size)]
    assert comm.broadcast_object(("from", rank), 1, group) == ("from", 1)
    assert (comm.group_size(group), comm.group_rank(group)) == (world_size, rank)


@worlds
def test_plain(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_plain)


def check_large_slices(rank: int, world_size: int) -> None:
    """Transfers that begin and are waited for later, into memory of their own and into where the slices lie."""
    group, share = dist.group.WORLD, 2**16 + 3
    expected = torch.arange(world_size).repeat_interleave(share).float()
    own = torch.full((share,), float(rank))
    whole = torch.empty(world_size, share)
    comm.all_gather_into(whole, own, group)
    close(whole.view(-1), expected)
    whole[:rank], whole[rank + 1 :] = -1, -1
    work = comm.all_gather_into(whole, whole[rank], group, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    close(whole.view(-1), expected)

    counted = torch.empty(world_size, 2 * share, dtype=torch.int16)  # backends have no name for it
    comm.all_gather_into(counted, torch.full((2 * share,), rank, dtype=torch.int16), group)
    assert [row.unique().tolist() for row in counted] == [[r] for r in range(world_size)]

    part = torch.empty(share)
    comm.reduce_scatter_into(part, whole * (rank + 1), group)
    total = torch.full((share,), rank * sum(range(1, world_size + 1)), dtype=torch.float)
    close(part, total)
    whole.mul_(rank + 1)
    work = comm.reduce_scatter_into(whole[rank], whole, group, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    close(whole[rank], total)


@worlds
def test_large_slices(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_large_slices)


def check_wrong_sizes(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="one size for each of 2 ranks, got 3"):
        mappings.split_to_group(wave(6), group, 0, [2, 2, 2])
    with pytest.raises(ValueError, match=f"rank {rank} holds 3 along dimension 0, but it holds 2"):
        mappings.gather_from_group(wave(2), group, 0, [3, 3])


def test_wrong_sizes(ranks: Ranks) -> None:
    ranks(2, check_wrong_sizes)


def check_sub_group(rank: int, world_size: int) -> list[float]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    x = torch.full((2, 1), float(rank))
    # Ranks of broadcasts and transfers are global, the order of gathered slices is that of the group.
    comm.broadcast_(x, 2 + rank % 2, group)
    y = mappings.gather_from_group(torch.full((1,), float(rank)), group, 0)
    received = torch.empty(1)
    peer = (rank + 2) % 4
    sent = torch.full((1,), float(rank))
    for work in comm.exchange([comm.SendRecv(sent, peer, True), comm.SendRecv(received, peer, False)], group):
        work.wait()
    return [*x.flatten().tolist(), *y.tolist(), *received.tolist()]


def test_sub_group(ranks: Ranks) -> None:
    assert ranks(4, check_sub_group) == [[2, 2, 0, 2, 2], [3, 3, 1, 3, 3], [2, 2, 0, 2, 0], [3, 3, 1, 3, 1]]


def check_exchange(rank: int, world_size: int) -> None:
    """Every rank sends four tensors to the next and one back, in one batch with all receives."""
    group = dist.group.WORLD
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size

    def forward(sender: int) -> list[Tensor]:
        small = torch.tensor(sender, dtype=torch.int16)
        return [wave(2, 3, phase=sender), torch.tensor([sender, -1]), torch.tensor([sender > 0, True, False]), small]

    received = [torch.empty_like(t) for t in forward(0)]
    back = torch.empty(3, 2, dtype=torch.float64)
    transfers = [comm.SendRecv(t, following, send=True) for t in forward(rank)]
    transfers += [comm.SendRecv(t, previous, send=False) for t in received]
    transfers.append(comm.SendRecv(wave(2, 3, phase=10 + rank).t(), previous, send=True))
    transfers.append(comm.SendRecv(back, following, send=False))
    works = comm.exchange(transfers, group)
    for work in works:
        work.wait()
    for tensor, expected in zip(received, forward(previous), strict=True):
        assert torch.equal(tensor, expected)
    assert torch.equal(back, wave(2, 3, phase=10 + following).t())
    assert comm.exchange([], group) == []


@worlds
def test_exchange(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_exchange)


# ---- nothing to communicate


@pytest.mark.parametrize(
    "function",
    [
        mappings.copy_to_group,
        mappings.reduce_from_group,
        mappings.reduce_from_group_,
        lambda x, g: mappings.gather_from_group(x, g, 0),
        lambda x, g: mappings.split_to_group(x, g, 0),
        lambda x, g: mappings.scatter_sequence(x, g, 0),
        lambda x, g: mappings.gather_sequence(x, g, 0),
        lambda x, g: mappings.reduce_scatter_sequence(x, g, 0),
        lambda x, g: comm.all_gather_dim(x, g, 0),
        lambda x, g: comm.reduce_scatter_dim(x, g, 0),
    ],
)
def test_no_group_returns_the_very_tensor(function: Callable[[Tensor, None], Tensor]) -> None:
    x = wave(4)
    assert function(x, None) is x


def check_group_of_one(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    x = wave(4)
    assert mappings.copy_to_group(x, group) is x
    assert mappings.reduce_from_group(x, group) is x
    assert comm.all_reduce_(x, group, async_op=True) is None
    assert comm.broadcast_(x, 0, group) is None
    assert comm.gather_objects(7, group) == [7]
    assert torch.equal(x, wave(4))


def test_group_of_one(ranks: Ranks) -> None:
    ranks(1, check_group_of_one)
