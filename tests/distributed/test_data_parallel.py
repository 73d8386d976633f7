"""GradientReducer: gradients over replicas are those of one process that sees every replica's samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel import data_parallel
from lightning_parallel.data_parallel import GradientReducer
from tests.distributed.formulas import wave
from tests.distributed.layer_tools import fill
from tests.harness import Ranks

TINY, MIDDLE, LARGE = 1, 80, 2**20
Gradients = dict[str, Tensor | None]
bucket_sizes = pytest.mark.parametrize("bucket_bytes", [TINY, MIDDLE, LARGE])


class Net(nn.Module):
    """Three layers; `part` chooses which run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor, part: str = "all") -> Tensor:
        x = self.first(x)
        if part != "no second":
            x = self.second(torch.tanh(x))
        if part == "twice":
            x = self.second(torch.tanh(x))
        return x if part == "no third" else self.third(x)


def inputs(rank: int, step: int) -> Tensor:
    return wave(2, 3, phase=rank + 10 * step)


def loss_of(net: nn.Module, rank: int, step: int, part: str = "all") -> Tensor:
    return net(inputs(rank, step), part).square().sum()


def reducer(net: nn.Module, **options: Any) -> GradientReducer:
    group = dist.group.WORLD
    assert group is not None
    return GradientReducer(net.parameters(), group, **options)


def gradients(net: nn.Module) -> Gradients:
    return {n: p.grad for n, p in net.named_parameters()}


def reference(world_size: int, steps: list[str], scale: float = 1.0) -> Gradients:
    """Of one process over every replica's losses; `steps` are the parts that run."""
    net = fill(Net())
    for step, part in enumerate(steps):
        for rank in range(world_size):
            (loss_of(net, rank, step, part) * scale).backward()
    return gradients(net)


def check_equal(net: nn.Module, expected: Gradients) -> None:
    for name, found in gradients(net).items():
        wanted = expected[name]
        if wanted is None or found is None:
            assert found is wanted, f"{name} has {'no' if found is None else 'a'} gradient"
        else:
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------ sums
def check_sums(rank: int, world_size: int, bucket_bytes: int, average: bool) -> None:
    net = fill(Net())
    reduce = reducer(net, bucket_bytes=bucket_bytes, average=average)
    for set_to_none in (True, False, True):
        reduce.prepare()
        for step in range(3):  # the last pass completes the gradients
            if step == 2:
                reduce.arm()
            loss_of(net, rank, step).backward()
        reduce.finish()
        check_equal(net, reference(world_size, ["all"] * 3, 1 / world_size if average else 1))
        net.zero_grad(set_to_none)


@pytest.mark.parametrize(("world_size", "average"), [(2, False), (2, True), (3, False)])
@bucket_sizes
def test_sums_with_accumulation(ranks: Ranks, world_size: int, average: bool, bucket_bytes: int) -> None:
    ranks(world_size, check_sums, bucket_bytes, average)


def check_buckets(rank: int, world_size: int) -> None:
    net = Net()
    sizes = [p.numel() for p in net.parameters()]
    for bucket_bytes, expected in ((TINY, sizes[::-1]), (LARGE, [sum(sizes)]), (MIDDLE, [2 + 8, 4 + 16, 4 + 12])):
        reduce = reducer(net, bucket_bytes=bucket_bytes)
        reduce.prepare()
        assert reduce.bucket_sizes == expected
        reduce.close()


def test_buckets_are_filled_from_the_last_parameter(ranks: Ranks) -> None:
    ranks(2, check_buckets)


def check_dtypes(rank: int, world_size: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16, torch.float16]
    net = nn.ParameterList(nn.Parameter(torch.ones(n, dtype=d)) for n, d in zip((3, 5, 0, 2, 1), dtypes, strict=True))
    for bucket_bytes in (TINY, LARGE):
        reduce = reducer(net, bucket_bytes=bucket_bytes)
        reduce.arm()
        torch.stack([(p * (rank + 1)).double().sum() for p in net]).sum().backward()
        reduce.finish()
        for p in net:
            assert p.grad is not None
            assert p.grad.dtype == p.dtype
            assert p.grad.tolist() == [3.0] * p.numel()
            p.grad = None
        reduce.close()


def test_every_dtype_and_an_empty_parameter(ranks: Ranks) -> None:
    ranks(2, check_dtypes)


def check_twice(rank: int, world_size: int) -> None:
    net = fill(Net())
    reduce = reducer(net, bucket_bytes=TINY)
    reduce.arm()
    loss_of(net, rank, 0, "twice").backward()
    reduce.finish()
    check_equal(net, reference(world_size, ["twice"]))


def test_a_parameter_used_twice(ranks: Ranks) -> None:
    ranks(2, check_twice)


# ------------------------------------------------------------------------------------------------ unused parameters
def check_unused(rank: int, world_size: int, bucket_bytes: int) -> None:
    net = fill(Net())
    reduce = reducer(net, bucket_bytes=bucket_bytes)
    for parts in (["no second"] * 2, ["all", "no third"], ["no third", "all"], ["no second", "no third"], ["all"] * 2):
        reduce.arm()
        loss_of(net, rank, 0, parts[rank]).backward()
        reduce.finish()
        plain = fill(Net())
        for other, part in enumerate(parts):
            loss_of(plain, other, 0, part).backward()
        check_equal(net, gradients(plain))
        net.zero_grad()


@bucket_sizes
def test_f19_parameters_unused_on_some_or_all_ranks(ranks: Ranks, bucket_bytes: int) -> None:
    ranks(2, check_unused, bucket_bytes)


def check_early(rank: int, world_size: int, bucket_bytes: int) -> None:
    net = fill(Net())
    reduce = reducer(net, bucket_bytes=bucket_bytes)
    for prepared in (False, True):
        if prepared:
            reduce.prepare()
        loss_of(net, rank, 0).backward()
        reduce.arm()
        loss_of(net, rank, 1, "no second").backward()
        reduce.finish()
        check_equal(net, reference(world_size, ["all", "no second"]))
        net.zero_grad()


@bucket_sizes
def test_the_last_pass_need_not_touch_what_earlier_ones_accumulated(ranks: Ranks, bucket_bytes: int) -> None:
    ranks(2, check_early, bucket_bytes)


# ------------------------------------------------------------------------------------------------ freezing
def check_freezing(rank: int, world_size: int, bucket_bytes: int) -> None:
    net, plain = fill(Net()), fill(Net())
    reduce = reducer(net, bucket_bytes=bucket_bytes)
    for step, frozen in enumerate(
        [("first",), ("none",), ("second", "third"), ("first", "second", "third"), ("none",)]
    ):
        for model in (net, plain):
            for name, p in model.named_parameters():
                p.requires_grad_(not name.startswith(frozen))
            model.zero_grad()
        reduce.arm()
        if any(p.requires_grad for p in net.parameters()):
            loss_of(net, rank, step).backward()
            for other in range(world_size):
                loss_of(plain, other, step).backward()
        reduce.finish()
        check_equal(net, gradients(plain))


@bucket_sizes
def test_f19_freezing_and_unfreezing_between_steps(ranks: Ranks, bucket_bytes: int) -> None:
    ranks(2, check_freezing, bucket_bytes)


def check_unfreezing_while_accumulating(rank: int, world_size: int) -> None:
    net, plain = fill(Net()), fill(Net())
    reduce = reducer(net)
    for trains in (False, True):
        for model in (net, plain):
            model.third.requires_grad_(trains)
        if trains:
            reduce.arm()
        else:
            reduce.prepare()
        loss_of(net, rank, int(trains)).backward()
        for other in range(world_size):
            loss_of(plain, other, int(trains)).backward()
    reduce.finish()
    check_equal(net, gradients(plain))


def test_unfreezing_while_gradients_accumulate(ranks: Ranks) -> None:
    ranks(2, check_unfreezing_while_accumulating)


# ------------------------------------------------------------------------------------------------ overlap
def check_overlap(rank: int, world_size: int) -> None:
    net = fill(Net())
    reduce = reducer(net, bucket_bytes=TINY)
    events: list[str] = []
    original = data_parallel.comm.all_reduce_

    def counted(tensor: Tensor, group: Any, **options: Any) -> Any:
        assert options == {"async_op": True}, "nothing waits inside the backward pass"
        events.append(f"reduce {tensor.numel()}")
        return original(tensor, group, **options)

    data_parallel.comm.all_reduce_ = counted  # type: ignore[assignment]
    try:
        reduce.prepare()
        loss_of(net, rank, 0).backward()
        assert events == [], "passes that only accumulate send nothing"
        net.zero_grad()
        reduce.arm()
        hidden = net.first(inputs(rank, 0))
        hidden.register_hook(lambda g: events.append("first layer"))
        net.third(net.second(torch.tanh(hidden))).square().sum().backward()
        in_backward = list(events)
        reduce.finish()
    finally:
        data_parallel.comm.all_reduce_ = original
    assert in_backward.index("first layer") >= 2, "the last layer is under way before the first layer is computed"
    in_order = [f"reduce {n + 1}" for n in (2, 8, 4, 16, 4, 12)]  # one slot more for the count
    assert [e for e in in_backward if e != "first layer"] == in_order
    assert events == in_backward, "finish() finds nothing left to start"
    check_equal(net, reference(world_size, ["all"]))


def test_reductions_start_while_the_backward_pass_runs(ranks: Ranks) -> None:
    ranks(2, check_overlap)


def check_no_copies(rank: int, world_size: int) -> None:
    net = fill(Net())
    reduce = reducer(net)
    reduce.prepare()
    loss_of(net, rank, 0).backward()
    places = [g.data_ptr() for g in gradients(net).values() if g is not None]
    reduce.arm()
    loss_of(net, rank, 1).backward()
    reduce.finish()
    assert [g.data_ptr() for g in gradients(net).values() if g is not None] == places


def test_gradients_live_in_the_buckets(ranks: Ranks) -> None:
    ranks(2, check_no_copies)


# ------------------------------------------------------------------------------------------------ errors
def check_checkpoint(rank: int, world_size: int, reentrant: bool) -> None:
    net = fill(Net())
    reduce = reducer(net, bucket_bytes=TINY)
    reduce.arm()

    def segment(x: Tensor) -> Tensor:
        return net.second(torch.tanh(x))

    x = net.first(inputs(rank, 0))
    for _ in range(2):
        x = checkpoint(segment, x, use_reentrant=reentrant)
    loss = net.third(x).square().sum()
    if reentrant:
        with pytest.raises(RuntimeError, match="arrived twice in one backward pass.* use_reentrant=False"):
            loss.backward()
        reduce.disarm()
    else:
        loss.backward()
        reduce.finish()
        check_equal(net, reference(world_size, ["twice"]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_segments_that_share_parameters(ranks: Ranks, reentrant: bool) -> None:
    ranks(2, check_checkpoint, reentrant)


def check_calls(rank: int, world_size: int) -> None:
    net = fill(Net())
    reduce = reducer(net)
    with pytest.raises(RuntimeError, match=r"finish\(\) needs arm\(\) before the backward pass"):
        reduce.finish()
    reduce.arm()
    reduce.disarm()
    with pytest.raises(RuntimeError, match="needs arm"):
        reduce.finish()
    loss_of(net, rank, 7).backward()
    net.zero_grad()
    reduce.arm()
    loss_of(net, rank, 0).backward()
    reduce.finish()
    check_equal(net, reference(world_size, ["all"]))
    reduce.close()
    check_equal(net, reference(world_size, ["all"]))
    net.zero_grad()
    loss_of(net, rank, 0).backward()
    plain = fill(Net())
    loss_of(plain, rank, 0).backward()
    check_equal(net, gradients(plain))


def test_order_of_calls_and_the_end(ranks: Ranks) -> None:
    ranks(2, check_calls)


def check_sparse(rank: int, world_size: int) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    reduce = reducer(embedding)
    reduce.arm()
    with pytest.raises(ValueError, match=r"parameter of shape \(4, 2\) is sparse.* use sparse=False"):
        embedding(torch.tensor([1])).sum().backward()


def test_sparse_gradients_are_refused(ranks: Ranks) -> None:
    ranks(2, check_sparse)


def check_nothing(rank: int, world_size: int) -> None:
    reduce = reducer(nn.Module())
    reduce.prepare()
    reduce.arm()
    reduce.finish()
    assert reduce.bucket_sizes == []


def test_no_parameters(ranks: Ranks) -> None:
    ranks(2, check_nothing)
