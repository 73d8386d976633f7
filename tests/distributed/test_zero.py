"""ZeRO 1 and 2: weights and optimizer states are those of one process that sees every replica's loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from lightning_parallel import comm
from lightning_parallel.zero.memory import state_bytes
from lightning_parallel.zero.sharder import ZeroSharder
from lightning_parallel.zero.states import load_full_state, whole_state
from tests.distributed.zero_tools import (
    OPTIMIZERS,
    Odd,
    loss_of,
    plain_state,
    sharded_backward,
    sharder,
    two_groups,
    values,
)
from tests.harness import Ranks

STEPS = 4


def schedule(optimizer: torch.optim.Optimizer) -> optim.lr_scheduler.LambdaLR:
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))


def reference(name: str, world_size: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    net = Odd()
    optimizer = OPTIMIZERS[name](two_groups(net))
    rates = schedule(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        skip = ("five",) if step == 1 else ()
        sum((loss_of(net, rank, step, skip) for rank in range(world_size)), torch.zeros(())).backward()
        optimizer.step()
        rates.step()
    return values(net), plain_state(optimizer)


def train(
    name: str, rank: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same on shards; after two steps everything is saved and loaded into new objects."""
    net = Odd(dtype)
    optimizer = OPTIMIZERS[name](two_groups(net))
    sharded = sharder(net, [optimizer], **options)
    rates = schedule(optimizer)
    for step in range(STEPS):
        if step == 2:
            with whole_state(sharded.optimizers[0], dist.group.WORLD, keep=True):
                saved = plain_state(optimizer)
            weights, later = values(net), rates.state_dict()
            sharded.close()
            net = Odd(dtype)
            net.load_state_dict(weights)
            optimizer = OPTIMIZERS[name](two_groups(net))
            sharded = sharder(net, [optimizer], **options)
            rates = schedule(optimizer)
            rates.load_state_dict(later)
            load_full_state(sharded.optimizers[0], saved)
        optimizer.zero_grad()
        skip = ("five",) if step == 1 else ()
        sharded_backward(sharded, [loss_of(net, rank, step, skip)])
        optimizer.step()
        rates.step()
    with whole_state(sharded.optimizers[0], dist.group.WORLD, keep=True):
        state = plain_state(optimizer)
    sharded.close()
    return values(net), state


def train_all(rank: int, world_size: int, names: list[str]) -> Any:
    variants: list[dict[str, Any]] = [{"stage": 1}, {"stage": 2}, {"stage": 2, "shows_gradients": True}]
    return {(name, str(options)): train(name, rank, **options) for name in names for options in variants}


@pytest.mark.parametrize(
    ("world_size", "names"), [(2, list(OPTIMIZERS)), (3, ["adamw", "spectral"]), (4, ["adamw", "adagrad", "twisted"])]
)
def test_every_optimizer_trains_as_without_shards(ranks: Ranks, world_size: int, names: list[str]) -> None:
    """Parameters with 0, 1, few elements and none in some step; groups; a schedule; saved and loaded in between."""
    for rank, found in enumerate(ranks(world_size, train_all, names)):
        for (name, options), (weights, state) in found.items():
            expected, expected_state = reference(name, world_size)
            where = f"{name}, {options}, rank {rank}"
            exact = {"atol": 0, "rtol": 0} if name == "adamw" else {"atol": 1e-6, "rtol": 1e-6}
            torch.testing.assert_close(weights, expected, **exact, msg=where)
            assert state["param_groups"] == expected_state["param_groups"], where
            assert {i: list(e) for i, e in state["state"].items()} == {
                i: list(e) for i, e in expected_state["state"].items()
            }, where
            torch.testing.assert_close(state["state"], expected_state["state"], **exact, msg=where)


# ------------------------------------------------------------------------------------------------ gradients
class Two(nn.Module):
    """A used and a rarely used parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.often = nn.Parameter(torch.zeros(3, dtype=dtype))
        self.rarely = nn.Parameter(torch.ones(5, dtype=dtype))


def full_gradients(net: nn.Module, sharded: Any) -> dict[str, Tensor | None]:
    """Every gradient in full, from the shards."""
    found: dict[str, Tensor | None] = {}
    for name, p in net.named_parameters():
        bucket, place = sharded.find(p)
        held = [None if shard is None else shard.grad for shard in bucket.shards]
        missing = bool(torch.tensor([held[place] is None and bucket.pieces[place] is not None]))
        flags = comm.gather_objects(missing, bucket.group)
        full = bucket.gather_full(held, bucket.wide)[place]
        found[name] = None if any(flags) else full
    return found


def accumulation(rank: int, world_size: int, stage: int) -> Any:
    calls = []
    original = comm.reduce_scatter_into

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[1].numel())
        return original(*args, **kwargs)

    comm.reduce_scatter_into = counted
    try:
        net = Two()
        optimizer = optim.SGD(net.parameters(), lr=1.0)
        sharded = sharder(net, [optimizer], stage=stage, bucket_bytes=1)
        # Means of 1, 2, 3 and 4, half of them on each rank; `rarely` has a gradient on rank 1 alone.
        losses = [value / 4 * net.often.sum() for value in ((1, 3) if rank == 0 else (2, 4))]
        losses[0] = losses[0] + (net.rarely.sum() if rank == 1 else 0)
        sharded_backward(sharded, losses)
        window = full_gradients(net, sharded)
        count = len(calls)
        # Every backward pass reduced by itself, as under manual optimization: the sums add up.
        for value in (1.0, 2.0):
            sharded_backward(sharded, [value * net.often.sum()])
        twice = full_gradients(net, sharded)
        optimizer.step()
        stepped = values(net)
        optimizer.zero_grad(set_to_none=False)
        zeroed = full_gradients(net, sharded)
        optimizer.zero_grad()
        sharded.prepare()
        net.often.sum().backward()  # forgotten by zero_grad before it was reduced
        optimizer.zero_grad()
        sharded_backward(sharded, [net.often.sum()])
        return window, count, twice, stepped, zeroed, full_gradients(net, sharded)
    finally:
        comm.reduce_scatter_into = original


@pytest.mark.parametrize("stage", [1, 2])
def test_windows_sums_and_zeroing(ranks: Ranks, stage: int) -> None:
    ones = torch.ones(5)
    for window, count, twice, stepped, zeroed, last in ranks(2, accumulation, stage):
        torch.testing.assert_close(window, {"often": torch.full((3,), 2.5), "rarely": ones}, atol=0, rtol=0)
        assert count == 2, "one reduction per bucket, whatever the number of backward passes"
        torch.testing.assert_close(twice, {"often": torch.full((3,), 8.5), "rarely": ones}, atol=0, rtol=0)
        torch.testing.assert_close(stepped, {"often": torch.full((3,), -8.5), "rarely": 0 * ones}, atol=0, rtol=0)
        torch.testing.assert_close(zeroed, {"often": torch.zeros(3), "rarely": 0 * ones}, atol=0, rtol=0)
        torch.testing.assert_close(last["often"], torch.full((3,), 2.0), atol=0, rtol=0)
        assert last["rarely"] is None


def small_steps(net: Two, optimizer: optim.Optimizer, sharded: ZeroSharder, rank: int) -> tuple[Any, Any, Any]:
    """Values after 16 steps, the state at that time, and values after somebody's writing; then the state is loaded."""
    for _ in range(16):  # steps too small for bfloat16 to notice near 1
        sharded_backward(sharded, [net.rarely.sum() * (rank + 1)])
        optimizer.step()
        optimizer.zero_grad()
    small = values(net)["rarely"]
    with whole_state(sharded.optimizers[0], dist.group.WORLD, keep=True):
        saved = plain_state(optimizer)
    with torch.no_grad():
        net.rarely[1:3] = 7.0  # somebody writes into the parameter
    sharded_backward(sharded, [net.rarely.sum() * (rank + 1)])
    optimizer.step()
    written = values(net)["rarely"]
    load_full_state(sharded.optimizers[0], saved)
    return small, saved["state"], written


def half_precision(rank: int, world_size: int, stage: int, sums_wide: bool) -> Any:
    net = Two(torch.bfloat16)
    optimizer = optim.SGD(net.parameters(), lr=2.0**-12)
    sharded = sharder(net, [optimizer], stage=stage, sums_wide=sums_wide)
    losses = [net.often.sum() * (2.0**-8 if rank == 0 else 0.0) for _ in range(512)]
    sharded_backward(sharded, losses)
    summed = full_gradients(net, sharded)["often"]
    gradients = [shard.grad for bucket in sharded.buckets for shard in bucket.shards if shard is not None]
    kinds = {gradient.dtype for gradient in gradients if gradient is not None}
    optimizer.zero_grad()
    small, saved, written = small_steps(net, optimizer, sharded, rank)
    with whole_state(sharded.optimizers[0], dist.group.WORLD, keep=True):
        loaded = plain_state(optimizer)
    sharded.close()
    return summed, kinds, small, saved, written, loaded["state"], net.rarely.dtype


@pytest.mark.parametrize(
    ("stage", "sums_wide", "kind", "total"),
    [(1, True, torch.float32, 2.0), (2, True, torch.float32, 2.0), (2, False, torch.bfloat16, 1.0)],
    ids=["1", "2", "in bfloat16"],
)
def test_bfloat16_sums_and_steps_in_float32(
    ranks: Ranks, stage: int, sums_wide: bool, kind: torch.dtype, total: float
) -> None:
    """512 times 2**-8, which bfloat16 stops to notice at 1."""
    for summed, kinds, small, saved, written, loaded, dtype in ranks(2, half_precision, stage, sums_wide):
        assert kinds <= {kind}
        assert summed.tolist() == [total] * 3
        assert dtype is torch.bfloat16
        after = 1 - 16 * 3 * 2.0**-12
        assert small.tolist() == torch.full((5,), after).bfloat16().tolist()
        assert small[0] != 1
        assert saved[1]["master_weight"].tolist() == [after] * 5
        assert written.tolist() == [small[0].item(), 7.0, 7.0, small[0].item(), small[0].item()]
        assert loaded[1]["master_weight"].tolist() == [after] * 5


# ------------------------------------------------------------------------------------------------ freezing
def thawing(rank: int, world_size: int, stage: int) -> Any:
    """`five` thaws in step 1 with a group of its own; `matrix` freezes in step 2; `seven` belongs to no optimizer."""
    net = Odd()
    five, seven = net.get_parameter("five"), net.get_parameter("seven")
    five.requires_grad_(False)
    chosen = [p for name, p in net.named_parameters() if name not in ("five", "seven")]
    optimizer = optim.AdamW(chosen, lr=0.1)
    sharded = sharder(net, [optimizer], stage=stage) if world_size > 1 else None
    seen: list[Tensor | None] = []
    for step in range(4):
        if step == 1:
            five.requires_grad_(True)
            optimizer.add_param_group({"params": [five], "lr": 0.2})
        if step == 2:
            net.get_parameter("matrix").requires_grad_(False)
        seven.grad = None
        optimizer.zero_grad()
        if sharded is None:
            (loss_of(net, 0, step) + loss_of(net, 1, step)).backward()
        else:
            sharded_backward(sharded, [loss_of(net, rank, step)])
        seen.append(None if seven.grad is None else seven.grad.clone())
        optimizer.step()
    if sharded is not None:
        sharded.close()
    return values(net), seen


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_thaw_freeze_and_belong_to_no_optimizer(ranks: Ranks, stage: int) -> None:
    expected = thawing(0, 1, stage)
    for found in ranks(2, thawing, stage):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


# ------------------------------------------------------------------------------------------------ overlap and memory
class Chain(nn.Module):
    """Equal linears, one bucket each."""

    def __init__(self, width: int = 64, depth: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(depth)])


def storages(tensors: list[Any]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(found.values())


def memory(rank: int, world_size: int, stage: int, dtype: torch.dtype, sums_wide: bool) -> Any:
    net = Chain(dtype=dtype)
    count = sum(p.numel() for p in net.parameters())
    optimizer = optim.AdamW(net.parameters(), lr=0.01)
    sharded = sharder(net, [optimizer], stage=stage, bucket_bytes=64 * 64, sums_wide=sums_wide)
    during: list[tuple[int, int]] = []

    def look(grad: Tensor) -> None:
        states = [bucket.state.name for bucket in sharded.buckets]
        held = [bucket._buffer for bucket in sharded.buckets]
        during.append((states.count("REDUCING"), sum(b is not None for b in held)))

    handle = next(net.parameters()).register_hook(look)
    for _ in range(2):
        optimizer.zero_grad()
        sharded_backward(sharded, [net.layers(torch.ones(2, 64, dtype=dtype)).sum()])
        held = [b._buffer for b in sharded.buckets]
        grads = [s.grad for b in sharded.buckets for s in b.shards if s is not None]
        gradients = storages([*held, *grads, *[p.grad for p in net.parameters()]]) / count
        optimizer.step()
        after = [s.grad for b in sharded.buckets for s in b.shards if s is not None]
        gradients = max(gradients, storages([*held, *after]) / count)
    handle.remove()
    masters = [b.master for b in sharded.buckets if b.master is not b.own]
    moments = [value for state in optimizer.state.values() for k, value in state.items() if k != "step"]
    return {
        "parameters": storages(list(net.parameters())) / count,
        "gradients": gradients,
        "optimizer": storages([*moments, *masters]) / count,
        "during": during,
    }


PRECISIONS = [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]


@pytest.mark.parametrize(("dtype", "sums_wide"), PRECISIONS)
@pytest.mark.parametrize("stage", [1, 2])
def test_bytes_per_rank_and_reduction_during_backward(
    ranks: Ranks, stage: int, dtype: torch.dtype, sums_wide: bool
) -> None:
    for world_size in (2, 4):
        expected = state_bytes(stage, world_size, dtype.itemsize, gradient_bytes=4 if sums_wide else dtype.itemsize)
        for found in ranks(world_size, memory, stage, dtype, sums_wide):
            assert found["parameters"] == pytest.approx(expected.parameters, rel=0.02)
            assert found["gradients"] == pytest.approx(expected.gradients, rel=0.02)
            assert found["optimizer"] == pytest.approx(expected.optimizer, rel=0.02)
            for travelling, full in found["during"]:
                assert travelling >= 1, "buckets travel while the first layer still waits for its gradient"
                assert stage == 1 or full <= 5, "stage 2 frees full gradients during the backward pass"
