"""Offloaded shards: weights and states are those of a plain run, and lie where they are said to lie."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, optim

from lightning_parallel.zero.disk_storage import DiskStorage
from lightning_parallel.zero.gathering import UnitGatherer
from lightning_parallel.zero.memory import offloaded_bytes
from lightning_parallel.zero.offload import Offload
from lightning_parallel.zero.sharder import ShardOptions, ZeroSharder
from lightning_parallel.zero.states import whole_state
from lightning_parallel.zero.unit_sharder import UnitSharder
from tests.distributed.test_zero import Chain, Two, full_gradients, reference, small_steps, storages, train
from tests.distributed.test_zero3 import backward, sharded
from tests.distributed.zero_tools import OPTIMIZERS, plain_state, sharded_backward, sharder, values
from tests.harness import Ranks

ELEMENTWISE = [name for name in OPTIMIZERS if name not in ("spectral", "clipping", "twisted")]
CELLS = [(stage, kind, False) for stage in (1, 2, 3) for kind in (None, "cpu", "nvme")]
CELLS += [(3, "cpu", True), (3, "nvme", True)]


def offload(kind: str | None, folder: str, parameters: bool = False) -> dict[str, Any]:
    """The option of a sharder."""
    return {"offload": None if kind is None else Offload(kind, folder if kind == "nvme" else None, parameters)}


def train_all(rank: int, world_size: int, names: list[str], folder: str) -> Any:
    variants = [("cpu", {"stage": 1}), ("nvme", {"shows_gradients": True})]
    found = {
        (name, kind, str(options)): train(name, rank, **options, **offload(kind, folder))
        for name in names
        for kind, options in variants
        if kind == "cpu" or name in ELEMENTWISE
    }
    gc.collect()
    dist.barrier()
    return found, [path.name for path in Path(folder).glob("*")]


def test_every_optimizer_trains_as_without_offload(ranks: Ranks, tmp_path: Path) -> None:
    """Odd sizes, groups, a schedule; saved and loaded in between. A fused kernel of torch's rounds otherwise."""
    for rank, (found, left) in enumerate(ranks(2, train_all, list(OPTIMIZERS), str(tmp_path))):
        assert left == [], "folders go with their sharders"
        for (name, kind, options), (weights, state) in found.items():
            expected, expected_state = reference(name, 2)
            where = f"{name}, {kind}, {options}, rank {rank}"
            exact = {"atol": 0, "rtol": 0} if name == "adamw" else {"atol": 1e-6, "rtol": 1e-6}
            torch.testing.assert_close(weights, expected, **exact, msg=where)
            assert state["param_groups"] == expected_state["param_groups"], where
            assert {i: list(e) for i, e in state["state"].items()} == {
                i: list(e) for i, e in expected_state["state"].items()
            }, where
            torch.testing.assert_close(state["state"], expected_state["state"], **exact, msg=where)


def train_narrow(rank: int, world_size: int, folder: str) -> Any:
    """Whole numbers, which bfloat16 sums exactly: gradients in it change nothing. Buckets have as many elements."""
    widths = ({"sums_wide": True, "bucket_bytes": 64}, {"sums_wide": False, "bucket_bytes": 32})
    return [
        [train(name, rank, torch.bfloat16, stage=stage, **width, **offload(kind, folder)) for width in widths]
        for name in ("adamw", "sgd", "foreach adamw", "spectral")
        for stage, kind in ((1, None), (2, None), (1, "cpu"), (2, "nvme"))
        if kind != "nvme" or name in ELEMENTWISE
    ]


def test_gradients_of_half_precision_step_as_wide_ones(ranks: Ranks, tmp_path: Path) -> None:
    """Also after states were saved and loaded, which keep their 32 bits."""
    for found in ranks(2, train_narrow, str(tmp_path)):
        assert len(found) == 15
        for wide, narrow in found:
            torch.testing.assert_close(narrow, wide, atol=0, rtol=0)


# ------------------------------------------------------------------------------------------------ accumulation
def cell(net: Two, optimizer: optim.Optimizer, stage: int, chosen: dict[str, Any]) -> ZeroSharder:
    if stage < 3:
        return sharder(net, [optimizer], stage=stage, bucket_bytes=1, **chosen)
    gatherer = UnitGatherer({}, dist.new_group(), dist.new_group())
    units = dict.fromkeys(net.parameters(), gatherer.root.number)
    return UnitSharder(units, [optimizer], dist.group.WORLD, ShardOptions(stage=3, **chosen), gatherer)


def window(sharded: ZeroSharder, losses: list[Callable[[], Tensor]]) -> None:
    """Backward passes of one optimizer step; stage 3 reduces each of them by itself."""
    if isinstance(sharded, UnitSharder):
        for make in losses:
            with sharded.step("train"):
                sharded_backward(sharded, [make()])
    else:
        sharded_backward(sharded, [make() for make in losses])


def loss(net: Two, slope: float, rarely: bool = False) -> Tensor:
    return slope * net.often.sum() + (net.rarely.sum() if rarely else 0)


def accumulate(rank: int, world_size: int, folder: str) -> Any:
    """The mean of 1, 2, 3 and 4, half of them on each rank; a second window on top; the step; zeroing."""
    first, second = (1, 3) if rank == 0 else (2, 4)

    def observe(stage: int, kind: str | None, parameters: bool) -> Any:
        net = Two()
        optimizer = optim.SGD(net.parameters(), lr=1.0)
        sharded = cell(net, optimizer, stage, offload(kind, folder, parameters))
        window(sharded, [lambda: loss(net, first / 4, rarely=rank == 1), lambda: loss(net, second / 4)])
        once = full_gradients(net, sharded)
        window(sharded, [lambda: loss(net, 1.0)])
        twice = full_gradients(net, sharded)
        optimizer.step()
        stepped = full_values(net, sharded)
        optimizer.zero_grad(set_to_none=False)
        zeroed = full_gradients(net, sharded)
        optimizer.zero_grad()
        window(sharded, [lambda: loss(net, 1.0)])
        last = full_gradients(net, sharded)
        sharded.close()
        return once, twice, stepped, zeroed, last

    return {place: observe(*place) for place in CELLS}


def many_small(rank: int, world_size: int) -> Tensor | None:
    """Sums 512 gradients of 2**-8, each of which stage 3 adds to its shards by itself."""
    net = Two(torch.bfloat16)
    sharded = cell(net, optim.SGD(net.parameters(), lr=1.0), 3, {})
    window(sharded, [partial(loss, net, 2.0**-8 if rank == 0 else 0.0)] * 512)
    return full_gradients(net, sharded)["often"]


def test_512_small_gradients_of_half_precision_at_stage_3(ranks: Ranks) -> None:
    for summed in ranks(2, many_small):
        assert summed.tolist() == [2.0] * 3


def full_values(net: Two, sharded: ZeroSharder) -> dict[str, Tensor]:
    if not isinstance(sharded, UnitSharder):
        return values(net)
    found: dict[int, Tensor] = {}
    sharded.full_values(lambda p, full: found.update({id(p): full.clone()}))
    return {name: found[id(p)] for name, p in net.named_parameters()}


def test_cells_of_accumulation(ranks: Ranks, tmp_path: Path) -> None:
    ones = torch.ones(5)
    for cells in ranks(2, accumulate, str(tmp_path)):
        assert list(cells) == CELLS
        for place, (once, twice, stepped, zeroed, last) in cells.items():
            assert once["often"].tolist() == [2.5] * 3, place
            assert once["rarely"].tolist() == [1.0] * 5, place
            assert twice["often"].tolist() == [4.5] * 3, place
            torch.testing.assert_close(stepped, {"often": torch.full((3,), -4.5), "rarely": 0 * ones}, atol=0, rtol=0)
            torch.testing.assert_close(zeroed, {"often": torch.zeros(3), "rarely": 0 * ones}, atol=0, rtol=0)
            assert (last["often"].tolist(), last["rarely"]) == ([2.0] * 3, None), place


# ------------------------------------------------------------------------------------------------ half precision
def half_precision(rank: int, world_size: int, kind: str, folder: str) -> Any:
    net = Two(torch.bfloat16)
    optimizer = optim.SGD(net.parameters(), lr=2.0**-12, momentum=0.0)
    sharded = sharder(net, [optimizer], **offload(kind, folder))
    small, saved, written = small_steps(net, optimizer, sharded, rank)
    assert sharded.storage is not None
    assert sharded.storage.buffers.nbytes < 64, "what was loaded is where it stays"
    sharded.close()
    with whole_state(sharded.optimizers[0], dist.group.WORLD, keep=True):
        loaded = plain_state(optimizer)
    return small, saved, written, loaded["state"]


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
def test_bfloat16_steps_on_float32_copies(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """As without offload; also after the run, when checkpoints of it may still be asked for."""
    after = 1 - 16 * 3 * 2.0**-12
    for small, saved, written, loaded in ranks(2, half_precision, kind, str(tmp_path)):
        assert small.tolist() == torch.full((5,), after).bfloat16().tolist()
        assert saved[1]["master_weight"].tolist() == [after] * 5
        assert written.tolist() == [small[0].item(), 7.0, 7.0, small[0].item(), small[0].item()]
        assert loaded[1]["master_weight"].tolist() == [after] * 5


# ------------------------------------------------------------------------------------------------ where it lies
WIDTH, DEPTH = 128, 12


class Watched:
    """What a sharder holds at the moments at which it holds most: when a bucket is stepped."""

    def __init__(self, sharded: ZeroSharder, optimizer: optim.Optimizer) -> None:
        self.sharded, self.optimizer = sharded, optimizer
        self.states = self.masters = 0
        assert sharded.storage is not None
        self._arrive = sharded.storage.arrive
        sharded.storage.arrive = self._look  # type: ignore[method-assign]

    def _look(self, bucket: Any, optimizer: Any) -> None:
        self._arrive(bucket, optimizer)
        self.look()

    def look(self) -> None:
        state = [v for entry in self.optimizer.state.values() for k, v in entry.items() if k != "step"]
        self.states = max(self.states, storages(state))
        self.masters = max(self.masters, storages([b.master for b in self.sharded.buckets if b.has_master]))


def memory(rank: int, world_size: int, kind: str, stage: int, dtype: torch.dtype, folder: str) -> Any:
    net = Chain(WIDTH, DEPTH, dtype)
    count = sum(p.numel() for p in net.parameters())
    optimizer = optim.AdamW(net.parameters(), lr=0.01)
    sharded = sharder(net, [optimizer], stage=stage, bucket_bytes=WIDTH * WIDTH * 4, **offload(kind, folder))
    watched = Watched(sharded, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        sharded_backward(sharded, [net.layers(torch.ones(2, WIDTH, dtype=dtype)).sum()])
        shards: list[Any] = [s for b in sharded.buckets for s in b.shards if s is not None]
        gradients: list[Any] = [s.grad for s in shards]
        device: list[Any] = [*net.parameters(), *[b._buffer for b in sharded.buckets]]
        optimizer.step()
    during = (watched.states, watched.masters)
    watched.states = watched.masters = 0
    watched.look()
    assert sharded.storage is not None
    return {
        "device": storages(device) / count,
        "gradients": storages(gradients) / count,
        "apart": not {_storage(t) for t in device} & {_storage(t) for t in [*gradients, *shards]},
        "between": (watched.states + watched.masters) / count,
        "during": sum(during) / count,
        "buffers": sharded.storage.buffers.nbytes / count,
        "disk": sum(f.stat().st_size for f in Path(folder).glob(f"*rank-{rank}/state.bin")) / count,
    }


def _storage(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().data_ptr() or id(tensor)


@pytest.mark.parametrize(
    ("kind", "stage", "dtype"),
    [("cpu", 1, torch.float32), ("cpu", 2, torch.bfloat16), ("nvme", 2, torch.float32), ("nvme", 2, torch.bfloat16)],
)
def test_bytes_on_device_host_and_disk(ranks: Ranks, kind: str, stage: int, dtype: torch.dtype, tmp_path: Path) -> None:
    world_size = 2
    expected = offloaded_bytes(kind, stage, world_size, dtype.itemsize)
    bucket = 1 / DEPTH / world_size  # share of a rank's bucket of the model
    for found in ranks(world_size, memory, kind, stage, dtype, str(tmp_path)):
        assert found["apart"], "shards and their gradients have storage of their own"
        assert found["device"] == pytest.approx(expected.device, rel=0.02)
        assert found["gradients"] == pytest.approx(4 / world_size, rel=0.02)
        assert found["gradients"] + found["between"] == pytest.approx(expected.host, rel=0.02)
        assert found["disk"] == pytest.approx(expected.disk, rel=0.02)
        staged = 3 * bucket * (dtype.itemsize + (expected.disk * world_size if kind == "nvme" else 0))
        assert found["buffers"] <= staged * 1.02, "three buckets at most are on their way"
        if kind == "nvme":
            assert found["between"] < 0.01, "nothing but step counts stays"
            assert found["during"] <= staged * 1.02


def parameters_elsewhere(rank: int, world_size: int, kind: str, dtype: torch.dtype, folder: str) -> Any:
    """Bytes per parameter between two steps of stage 3, and of the buffers that the steps needed."""
    net = Chain(WIDTH, DEPTH, dtype)
    count = sum(p.numel() for p in net.parameters())
    optimizer = optim.AdamW(net.parameters(), lr=0.01)
    sharder = sharded(net, [optimizer], **offload(kind, folder, parameters=True))
    for _ in range(3):
        optimizer.zero_grad()
        with sharder.step("train"):
            loss = net.layers(torch.ones(2, WIDTH, dtype=dtype)).sum()
        backward(sharder, loss)
        gradients: list[Any] = [s.grad for b in sharder.buckets for s in b.shards if s is not None]
        optimizer.step()
    state = [v for entry in optimizer.state.values() for key, v in entry.items() if key != "step"]
    masters = [bucket.master for bucket in sharder.buckets if bucket.has_master]
    storage = sharder.storage
    return {
        "device": storages([*net.parameters(), *[bucket.values for bucket in sharder.buckets]]) / count,
        "host": storages([*gradients, *state, *masters, *[bucket.own for bucket in sharder.buckets]]) / count,
        "disk": sum(f.stat().st_size for f in Path(folder).glob(f"*rank-{rank}/state.bin")) / count,
        "lent": storage.shelf.loans.nbytes / count if isinstance(storage, DiskStorage) else 0.0,
        "stepped": storage.buffers.nbytes / count if storage is not None else None,
    }


@pytest.mark.parametrize(("kind", "dtype"), [("cpu", torch.float32), ("nvme", torch.bfloat16)])
def test_parameters_leave_the_device_between_steps(ranks: Ranks, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    expected = offloaded_bytes(kind, 3, 2, dtype.itemsize, parameters=True)
    share = dtype.itemsize / DEPTH / 2
    for found in ranks(2, parameters_elsewhere, kind, dtype, str(tmp_path)):
        assert found["device"] < 0.01
        assert found["host"] == pytest.approx(expected.host, rel=0.02)
        assert found["disk"] == pytest.approx(expected.disk, rel=0.02)
        if kind == "cpu":
            assert found["stepped"] == 0, "values are stepped where they are"
        else:
            assert found["lent"] <= 4 * share, "shares of the units that are here, and of the next one"
            assert found["stepped"] <= 3 * 7 * share * 1.02, "three buckets: values, float32 copies, two moments"
