"""What runs in every step never makes the host wait for an accelerator, and gives each group tensors of its side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.gradient_sync import GradientCompleter
from lightning_parallel.layout import ParallelLayout
from lightning_parallel.mesh import Mesh
from lightning_parallel.parameters import ParameterTag
from lightning_parallel.pipeline.batch import merge_outputs
from lightning_parallel.pipeline.cut import StageResult
from lightning_parallel.pipeline.placeholder import PipelineCutError
from lightning_parallel.pipeline.runtime import PipelineRuntime
from lightning_parallel.pipeline.schedules import build_schedule
from lightning_parallel.pipeline.share import TreeBroadcast
from lightning_parallel.strategies.logs import LogCall, combine_calls
from lightning_parallel.strategies.precision import _overflow_flags
from lightning_parallel.strategies.span import ModelSpan
from lightning_parallel.strategies.weights import ReplicaCombiner, global_loss, loss_weights
from lightning_parallel.tensor_parallel import linear
from lightning_parallel.tensor_parallel.loss import vocab_parallel_cross_entropy
from lightning_parallel.tensor_parallel.sharding import split_kv_heads
from lightning_parallel.zero import host_storage
from lightning_parallel.zero.gathering import UnitGatherer
from lightning_parallel.zero.homecoming import POSTPONED
from lightning_parallel.zero.link import HostLink
from lightning_parallel.zero.sharder import ShardOptions, ZeroSharder
from lightning_parallel.zero.shards import Item, plan_buckets
from lightning_parallel.zero.unit_bucket import UnitBucket
from lightning_parallel.zero.unit_sharder import UnitSharder
from tests.harness.accelerator import DEVICE, HostWait, UnfinishedCopy, accelerator, lone_rank
from tests.harness.streams import Streams

# A warning of torch's about tensors without data, whose addresses tell only which is which.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


def group() -> dist.ProcessGroup:
    """A new one of both ranks."""
    return dist.new_group([0, 1], backend="cpu:fake,lazy:fake")


def randn(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, device=DEVICE, requires_grad=requires_grad)


def train(model: nn.Module) -> None:
    F.cross_entropy(model(randn(3, 4)), torch.zeros(3, dtype=torch.int64, device=DEVICE)).backward()


def model() -> nn.Sequential:
    """Two linears, so that there are several buckets."""
    with DEVICE:
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))


# ------------------------------------------------------------------------------------------------ the tool itself
def to_the_host() -> Any:
    return randn(2).cpu()


def from_the_host() -> Any:
    return torch.tensor(3.0, device=DEVICE)


def into_the_host() -> Any:
    return torch.zeros(2).copy_(randn(2))


def reads() -> Any:
    return bool(randn(1))


def selects() -> Any:
    return randn(4).nonzero()


@pytest.mark.parametrize("wait", [to_the_host, from_the_host, into_the_host, reads, selects])
def test_waits_are_seen(wait: Callable[[], Any]) -> None:
    with accelerator(), pytest.raises((HostWait, RuntimeError), match="waits for the device|aten"):
        wait()


def test_copies_that_do_not_wait_are_fine_if_nobody_reads_them() -> None:
    with accelerator():
        assert torch.ones(2).to(DEVICE, non_blocking=True).device == DEVICE
        with pytest.raises(UnfinishedCopy):
            randn(2).to("cpu", non_blocking=True)


# ------------------------------------------------------------------------------------------------ weights and logs
def values() -> list[LogCall]:
    """Logged by a step: every reduction, with a batch size of the user's and without, on the host too."""
    calls = [LogCall("step", r, randn(), None, 3, {"reduce_fx": r, "on_step": True}) for r in ("mean", "sum", "max")]
    calls.append(LogCall("step", "sized", randn(), 2.0, 2, {"reduce_fx": "mean"}))
    return [*calls, LogCall("step", "counter", torch.zeros((), dtype=torch.int64, device=DEVICE), 2.0, 2, {})]


@pytest.mark.parametrize("rule", ["samples", "valid_labels", lambda part: 0.5, lambda part: (part["y"] > 0).sum()])
def test_weights_losses_and_logs(rule: Any) -> None:
    with lone_rank(2), accelerator():
        mesh = Mesh(ParallelLayout(data=2), 0, DEVICE, data=group())
        parts = [{"x": randn(3, 2), "y": torch.ones(3, dtype=torch.int64, device=DEVICE)} for _ in range(2)]
        weights = loss_weights(parts, rule, True, DEVICE)
        calls = combine_calls([values(), values()], weights)
        loss = merge_outputs([randn(), randn()], [3, 3], weights)
        value, total, merged = ReplicaCombiner(mesh, looks=False)(loss, torch.stack(weights).sum(), calls)
        assert value is not None
        assert {c.value.device for c in merged if c.value is not None} == {DEVICE}
        global_loss(randn(requires_grad=True), value, weights[0] / total).backward()


# ------------------------------------------------------------------------------------------------ gradients
def test_sums_over_replicas() -> None:
    with lone_rank(2), accelerator():
        module = model()
        reducer = GradientReducer(module.parameters(), group(), bucket_bytes=64)
        for _ in range(2):
            reducer.prepare()
            reducer.arm()
            train(module)
            reducer.finish()


@pytest.mark.parametrize("stage", [1, 2])
def test_shards(stage: int) -> None:
    with lone_rank(2), accelerator():
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=False)
        sharder = ZeroSharder(module.parameters(), [optimizer], group(), ShardOptions(stage, bucket_bytes=64))
        for _ in range(2):
            sharder.prepare()
            sharder.arm()
            train(module)
            sharder.finish()
            sharder.deliver()
            optimizer.step()
            optimizer.zero_grad()


def test_sums_over_tensor_ranks_and_stages_and_clipping() -> None:
    with lone_rank(2), accelerator():
        mesh = Mesh(ParallelLayout(pipeline=2, tensor=2), 0, DEVICE, tensor=group(), model=group())
        mesh.stage_pairs[0, 1] = group()
        held = {n: nn.Parameter(randn(4, 2)) for n in ("partial", "replicated", "tied")}
        shard = split_kv_heads(0, 1, 4, 2)
        tags = {
            "partial": ParameterTag("partial", (4, 2), None, True),
            "replicated": ParameterTag("replicated", (4, 2), shard),
            "tied": ParameterTag("tied", (4, 2), None, False, (0, 1)),
        }
        for p in held.values():
            p.grad = randn(4, 2)
        GradientCompleter(held, tags, mesh).complete()
        span = ModelSpan(mesh, tags, {id(p): n for n, p in held.items()}, "ignore")
        span.clip_by_norm(held.values(), 1.0)
        span.share_overflow([torch.zeros((), device=DEVICE)])


def test_the_scale_for_gradients_on_the_host_is_waited_for() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    scaler: Any = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with accelerator():
        scaler._lazy_init_scale_growth_tracker(DEVICE)
        with pytest.raises(HostWait):
            _overflow_flags(scaler, optimizer)


def units_from_the_host(count: int, streams: Streams, monkeypatch: pytest.MonkeyPatch) -> list[UnitBucket]:
    """Of one parameter each, whose shares lie in host memory."""
    monkeypatch.setattr(host_storage, "HostLink", partial(HostLink, streams=streams))
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)  # wants streams of hardware
    monkeypatch.setattr(comm, "all_gather_into", lambda *args: streams.collective("gather"))
    (layout,), storage = plan_buckets([Item(16)], 2, 100), host_storage.HostStorage(DEVICE)
    units = [UnitBucket(layout, [nn.Parameter(randn(16))], group(), group(), storage=storage) for _ in range(count)]
    for unit in units:
        storage.house(unit)
    streams.host_waits = 0
    return units


def test_parameters_come_from_the_host_while_others_are_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what uses them waits; memory is used again after what was computed with it; the host never waits."""
    with lone_rank(2), accelerator(), Streams() as streams:
        units = units_from_the_host(3, streams, monkeypatch)
        computed = []
        units[0].gather()
        for number, unit in enumerate(units):
            unit.complete()
            if number + 1 < len(units):
                units[number + 1].gather()
            computed.append(streams.give("compute"))
            if number < POSTPONED:
                unit.drop()
        ups, gathers = streams.all_of("up"), streams.all_of("gather")
        assert (len(ups), len(gathers), streams.host_waits) == (3, 3, 0)
        assert len(streams.all_of("down")) == len(units) + POSTPONED, "the shares at the start, and what tells changes"
        for number, compute in enumerate(computed):
            assert streams.comes_after(gathers[number], ups[number])
            assert streams.comes_after(compute, gathers[number])
            for later in (*ups[number + 1 :], *gathers[number + 1 :]):
                assert not streams.comes_after(compute, later), "the next unit does not hold up this one"
            for later in (*ups[number + 2 :], *gathers[number + 2 :]):
                assert streams.comes_after(later, compute), "its memory may be that of the one before"


def test_parameters_in_shares_leave_the_device_without_becoming_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving what only looks whole would make it so: on the device for the copy, and on the host."""
    with lone_rank(2), accelerator():
        module = model()
        gatherer = UnitGatherer({0: module[0]}, group(), group())
        units = {p: 0 if place < 2 else 1 for place, p in enumerate(module.parameters())}
        sharder = UnitSharder(units, [], group(), ShardOptions(stage=3), gatherer)
        with pytest.raises(HostWait):
            module.to("cpu")
        shown: dict[nn.Parameter, Tensor] = {}  # `p.data = value` works between GPUs and CPUs, but not for this device
        monkeypatch.setattr(UnitBucket, "_show", lambda b, new: shown.update(zip(b.parameters, new, strict=True)))
        sharder.leave_device()
        assert {p: value.shape for p, value in shown.items()} == {p: p.shape for p in module.parameters()}
        assert {(value.device.type, value.untyped_storage().nbytes()) for value in shown.values()} == {("cpu", 4)}


# ------------------------------------------------------------------------------------------------ layers
def test_layers_and_loss_of_tensor_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "autocast_dtype", lambda x: None)  # does not know this device
    with lone_rank(2), accelerator():
        tensor = group()
        x, target = randn(2, 3, 4, requires_grad=True), torch.ones(2, 3, dtype=torch.int64, device=DEVICE)
        up, down, head = (randn(*shape, requires_grad=True) for shape in ((6, 4), (4, 6), (5, 4)))
        (y,) = linear.column_linears(x, tensor, up, None)
        (logits,) = linear.column_linears(linear.row_linear(y, tensor, down, None), tensor, head, None)
        vocab_parallel_cross_entropy(logits, target, tensor, label_smoothing=0.1, z_loss=0.1, vocab_size=9).backward()
        assert head.grad is not None


# ------------------------------------------------------------------------------------------------ the pipeline
class _Cut:
    """One layer, whose output goes to the next stage."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def run(self, step: Callable[[], Any], *received: Any) -> StageResult:
        return StageResult(boundary=(step() @ self.weight, torch.ones(3, dtype=torch.int16, device=DEVICE)))


class _Callbacks:
    def forward(self, micro_batch: int) -> Any:
        return randn(3, 4)

    def backward(self, output: Any, micro_batch: int) -> torch.Tensor:
        raise AssertionError("only the last stage starts a backward pass")

    def before_last_backward(self) -> None:
        """Nothing to do."""

    def reduce(self) -> None:
        """Nothing to do."""


def test_stages_keep_both_sides_apart() -> None:
    with lone_rank(2), accelerator() as traffic:
        host: dict[str, Any] = {"control": group()}
        device: dict[str, Any] = {"pipeline": group(), "boundary": group()}
        mesh = Mesh(ParallelLayout(pipeline=2), 0, DEVICE, **host, **device)
        weight = randn(4, 4, requires_grad=True)
        cut: Any = _Cut(weight)
        PipelineRuntime(mesh, cut).run(build_schedule("1f1b", 2, 3), _Callbacks())
        assert weight.grad is not None
        link = PipelineRuntime(mesh, cut).link
        with pytest.raises(PipelineCutError, match="layer 3 returns a tensor on cpu, but stages exchange"):
            link.pack((randn(2), torch.ones(2)), "layer 3")
        last = TreeBroadcast(Mesh(ParallelLayout(pipeline=2), 1, DEVICE, **host, **device))
        last({"loss": randn(), "accuracy": 0.5, "count": 3, "name": "text", "flags": randn(2) > 0})
        sides = {name: traffic.devices[mine.group_name] for name, mine in (host | device).items()}
        assert sides == {"control": {"cpu"}, "pipeline": {DEVICE.type}, "boundary": {DEVICE.type}}
