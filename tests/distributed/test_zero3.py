"""ZeRO 3: parameters in shards. Weights and states are those of one process that sees every replica's loss."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_parallel import comm
from lightning_parallel.zero.gathering import UnitGatherer
from lightning_parallel.zero.memory import state_bytes
from lightning_parallel.zero.offload import Offload
from lightning_parallel.zero.sharder import ShardOptions
from lightning_parallel.zero.states import load_full_state, whole_state
from lightning_parallel.zero.unit_bucket import Presence
from lightning_parallel.zero.unit_scopes import plan_model
from lightning_parallel.zero.unit_sharder import UnitSharder
from tests.distributed.test_zero import PRECISIONS, Chain, storages
from tests.distributed.zero_tools import Spectral, plain_state
from tests.harness import Ranks

WIDTH, WORDS = 6, 7


class Block(nn.Module):
    """A frozen and a trained linear side by side; leaves a penalty behind where nobody returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.side.weight.requires_grad_(False)
        self.penalty: Tensor = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.up.weight.square().sum() * 0.01 + self.side(x).mean()
        return x + torch.tanh(self.up(x)) * self.side(x)


class Ugly(nn.Module):
    """Root parameters, one of whole numbers, one tied; blocks run twice, recomputed, compiled, in any order, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.words = nn.Embedding(WORDS, WIDTH)
        blocks = [Block() for _ in range(8)]
        self.blocks = nn.ModuleList([*blocks[:4], torch.compile(blocks[4], backend="eager"), *blocks[5:]])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        with torch.no_grad():
            for place, p in enumerate(self.parameters()):
                p.copy_(torch.sin(torch.arange(p.numel()) * 1.7 + place).view(p.shape) * 0.5)
        self.double()
        self.numbers = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, words: Tensor, rank: int, step: int) -> Tensor:
        """Rank and step decide which of the last blocks run, and in which order."""
        x = self.words(words) * self.scale * (self.numbers.sum() - 9)
        x = self.blocks[1](self.blocks[0](self.blocks[1](x)))
        x = checkpoint(self.blocks[2], x, use_reentrant=True)
        x = checkpoint(lambda y: self.blocks[4](self.blocks[3](y)), x, use_reentrant=False)
        order = [[5, 6], [6, 5], [6], [6, 5, 6]][(rank + step) % 4]
        for place in order:
            x = self.blocks[place](x)
        penalties = torch.stack([self.blocks[place].penalty for place in (0, 1, *order)]).sum()
        return F.cross_entropy(self.head(x), words) + penalties + F.linear(x, self.words.weight).mean()


def words_of(rank: int, step: int, part: int) -> Tensor:
    return (torch.arange(5) * (rank + 2) + step + 3 * part) % WORDS


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: optim.AdamW(parameters, lr=0.02),
    "spectral": lambda parameters: Spectral(parameters, lr=0.05),
}


def thaw(net: Ugly, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Before the third step a frozen weight gets a group of its own; before the fourth another parameter freezes."""
    if step == 2:
        net.blocks[0].side.weight.requires_grad_(True)
        optimizer.add_param_group({"params": [net.blocks[0].side.weight], "lr": 0.01})
    if step == 3:
        net.scale.requires_grad_(False)


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def plain(name: str, world_size: int) -> tuple[dict[str, Tensor], dict[str, Any], float]:
    net = Ugly()
    optimizer = OPTIMIZERS[name](trained(net))
    for step in range(5):
        thaw(net, optimizer, step)
        optimizer.zero_grad()
        for part in range(2):
            losses = [net(words_of(rank, step, part), rank, step) for rank in range(world_size)]
            torch.stack(losses).sum().backward()
        optimizer.step()
    with torch.no_grad():
        value = float(net(words_of(0, 0, 0), 0, 0))
    return net.state_dict(), plain_state(optimizer), value


def sharded(net: nn.Module, optimizers: list[Any], prefetch: int = 1, **options: Any) -> UnitSharder:
    plan = plan_model(net)
    units = plan.unit_of()
    scopes = {number: net.get_submodule(name) for number, name in enumerate(plan.scopes)}
    gatherer = UnitGatherer(scopes, dist.new_group(), dist.new_group(backend="gloo"), prefetch)
    numbered = {p: units[name] for name, p in net.named_parameters()}
    return UnitSharder(numbered, optimizers, dist.group.WORLD, ShardOptions(stage=3, **options), gatherer)


def backward(sharder: UnitSharder, loss: Tensor) -> None:
    sharder.prepare()
    sharder.arm()
    loss.backward()
    sharder.finish()
    assert not sharder.gatherer._rounds.is_open, "a message that nobody answers would keep its group from ending"
    sharder.deliver()


def begin_late(sharder: UnitSharder) -> None:
    """This rank lets the others wait for its first sums."""
    launch = sharder._launch

    def late(bucket: Any) -> None:
        if not sharder._in_flight:
            time.sleep(0.02)
        launch(bucket)

    sharder._launch = late  # type: ignore[method-assign]


def ugly(rank: int, world_size: int, name: str, prefetch: int, offload: Offload | None) -> Any:
    net = Ugly()
    optimizer = OPTIMIZERS[name](trained(net))
    sharder = sharded(net, [optimizer], prefetch, offload=offload)
    if rank == 1:
        begin_late(sharder)
    for step in range(5):
        thaw(net, optimizer, step)
        optimizer.zero_grad()
        for part in range(2):
            with sharder.step("train"):
                loss = net(words_of(rank, step, part), rank, step)
            backward(sharder, loss)
        optimizer.step()
        if step == 3:
            with whole_state(sharder.optimizers[0], dist.group.WORLD, keep=True):
                saved = plain_state(optimizer)
            load_full_state(sharder.optimizers[0], saved)
    # Ranks validate as often as they like; gathers go on until the last one has finished.
    seen = []
    for count in range(1 + 2 * rank):
        with torch.inference_mode(), sharder.step("validate", lockstep=False):
            seen.append(float(net(words_of(0, 0, 0), 0, count)))
    sharder.gatherer.settle()
    here = sum(not unit.is_away for unit in sharder.gatherer.units)
    hidden = [bool(p.isnan().all()) for p in net.parameters() if p.is_floating_point()]
    with sharder.gatherer.full():
        weights = {key: value.clone() for key, value in net.state_dict().items()}
    with whole_state(sharder.optimizers[0], dist.group.WORLD, keep=True):
        state = plain_state(optimizer)
    sharder.close()
    return weights, state, seen[0], all(hidden), here


@pytest.mark.parametrize(
    ("world_size", "name", "prefetch", "kind"),
    [(2, "adamw", 1, None), (3, "spectral", 2, "cpu"), (4, "adamw", 0, None), (2, "adamw", 1, "nvme")],
)
def test_whatever_runs_in_whatever_order(
    ranks: Ranks, world_size: int, name: str, prefetch: int, kind: str | None, tmp_path: Path
) -> None:
    """With all of it on the device, or shares of parameters elsewhere too."""
    expected = plain(name, world_size)
    offload = None if kind is None else Offload(kind, str(tmp_path) if kind == "nvme" else None, parameters=True)
    for weights, state, value, is_hidden, here in ranks(world_size, ugly, name, prefetch, offload):
        torch.testing.assert_close((weights, state, value), expected, atol=1e-10, rtol=1e-10)
        assert is_hidden, "between steps parameters have their shape and no values"
        assert here <= world_size, "who waits for the others does not collect what they ask for"


class Row(nn.Sequential):
    """Blocks that all run, so that gradients are summed while the backward pass goes on."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)))
        with torch.no_grad():
            for place, p in enumerate(self.parameters()):
                p.copy_(torch.sin(torch.arange(p.numel()) * 1.7 + place).view(p.shape))
        self.double()

    def loss(self, rank: int, part: int) -> Tensor:
        x = torch.cos(torch.arange(4 * WIDTH, dtype=torch.float64) * (2 * rank + part + 1)).view(4, WIDTH)
        return self(x).square().sum()


def parts(rank: int, world_size: int) -> dict[str, Tensor]:
    """As many backward passes before the sums as this rank likes."""
    net = Row()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    sharder = sharded(net, [optimizer])
    sharder.sums_hold_host = False  # as on GPUs, where the device that waits for a sum gathers nothing meanwhile
    for _ in range(2):
        optimizer.zero_grad()
        for part in range(1 + rank):
            with sharder.step("train", lockstep=False):
                loss = net.loss(rank, part)
            sharder.prepare()
            if part == rank:
                sharder.arm()
            loss.backward()
        sharder.finish()
        sharder.deliver()
        optimizer.step()
    with sharder.gatherer.full():
        weights = {key: value.clone() for key, value in net.state_dict().items()}
    sharder.close()
    return weights


def test_ranks_add_up_different_numbers_of_parts(ranks: Ranks) -> None:
    net = Row()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for rank, part in ((0, 0), (1, 0), (1, 1)):
            net.loss(rank, part).backward()
        optimizer.step()
    for weights in ranks(2, parts, timeout=30):
        torch.testing.assert_close(weights, dict(net.state_dict()), atol=1e-10, rtol=1e-10)


# ------------------------------------------------------------------------------------------------ overlap and memory
def chain(rank: int, world_size: int, dtype: torch.dtype, sums_wide: bool) -> Any:
    """Bytes between steps; how many units and full gradients there are at every moment of the third step."""
    net = Chain(dtype=dtype)
    count = sum(p.numel() for p in net.parameters())
    optimizer = optim.AdamW(net.parameters(), lr=0.01)
    sharder = sharded(net, [optimizer], sums_wide=sums_wide)
    units, buckets = sharder.gatherer.units, sharder.buckets
    during: list[tuple[str, int, int, int]] = []
    late: list[int] = []

    def look(kind: str) -> None:
        present = [bucket.presence for bucket in sharder.unit_buckets]
        grads = sum(bucket._buffer is not None for bucket in buckets)
        during.append((kind, present.count(Presence.HERE), present.count(Presence.COMING), grads))

    handles = [layer.register_forward_hook(lambda *_: look("forward")) for layer in net.layers]
    handles += [p.register_hook(lambda *_: look("backward")) for p in net.parameters()]
    gather = sharder.gatherer._go_round
    sharder.gatherer._go_round = lambda wish: (late.append(wish), gather(wish))[1]  # type: ignore[method-assign]
    calls, reduce = [], comm.reduce_scatter_into

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[1].numel())
        return reduce(*args, **kwargs)

    comm.reduce_scatter_into = counted
    try:
        for _ in range(3):
            during.clear(), late.clear(), calls.clear()
            optimizer.zero_grad()
            with sharder.step("train"):
                loss = net.layers(torch.ones(2, 64, dtype=dtype)).sum()
            backward(sharder, loss)
            gradients = storages([shard.grad for bucket in buckets for shard in bucket.shards if shard is not None])
            optimizer.step()
    finally:
        comm.reduce_scatter_into = reduce
    for handle in handles:
        handle.remove()
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    masters = [bucket.master for bucket in buckets if bucket.has_master]
    own = storages([*net.parameters(), *[bucket.own for bucket in buckets], *[bucket.values for bucket in buckets]])
    bytes_held = [own / count, gradients / count, storages([*moments, *masters]) / count]
    return bytes_held, during, [wish for wish in late if wish >= 0 and wish != len(units) - 1], calls


@pytest.mark.parametrize(("dtype", "sums_wide"), PRECISIONS)
def test_bytes_per_rank_and_units_during_a_step(ranks: Ranks, dtype: torch.dtype, sums_wide: bool) -> None:
    for world_size in (2, 4):
        expected = state_bytes(3, world_size, dtype.itemsize, gradient_bytes=4 if sums_wide else dtype.itemsize)
        for bytes_held, during, late, calls in ranks(world_size, chain, dtype, sums_wide):
            kinds = [expected.parameters, expected.gradients, expected.optimizer]
            assert bytes_held == [pytest.approx(kind, rel=0.02) for kind in kinds]
            assert len(during) == 16
            for kind, here, coming, gradients in during:
                # What has been asked for comes early when a rank waits: for a reduction, or at the end of a pass.
                assert here + coming <= (2 if kind == "forward" else 3), "the unit in use, and the next one"
                assert gradients <= 2, "one is filled while another one is summed"
            assert sum(coming for kind, _, coming, _ in during) >= 8, "the next unit travels while one computes"
            assert late == [0, 1], "after the first two, units are asked for in time"
            assert calls == [64 * 64] * 8, "one reduction per unit"


# ------------------------------------------------------------------------------------------------ writes and refusals
def writes(rank: int, world_size: int) -> Any:
    """What is written into parameters stays: in `full`, and in a step; an old graph is refused after a step."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.5)
    sharder = sharded(net, [optim.SGD(net.parameters(), lr=1.0)])
    with sharder.gatherer.full(), torch.no_grad():
        net[0].weight[1] = 2.0
    with sharder.step("train"):
        out = net(torch.ones(1, 3, requires_grad=True))
        with torch.no_grad():
            net[1].bias.data.clamp_(max=0.25)
    backward(sharder, out.sum())
    sharder.optimizers[0].optimizer.step()
    with sharder.step("train"):
        old = net(torch.ones(1, 3, requires_grad=True))
    sharder.optimizers[0].optimizer.step()
    sharder.prepare()
    with pytest.raises(RuntimeError) as error:
        old.sum().backward()
    sharder.gatherer.end_backward()
    with sharder.gatherer.full():
        values = [p.detach().clone() for p in net.parameters()]
    return values, str(error.value)


def test_writes_stay_and_old_graphs_are_refused(ranks: Ranks) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.5)
        net[0].weight[1] = 2.0
    out = 2 * net(torch.ones(1, 3)).sum()
    out.backward()
    with torch.no_grad():
        net[1].bias.fill_(0.25)
    optim.SGD(net.parameters(), lr=1.0).step()
    optim.SGD(net.parameters(), lr=1.0).step()
    for values, message in ranks(2, writes):
        torch.testing.assert_close(values, [p.detach() for p in net.parameters()])
        assert "has been modified by an inplace operation" in message
