"""Dropout: the same mask on replicated activations, another per rank on split ones, both replayed by a recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.tensor_parallel import mappings
from lightning_parallel.tensor_parallel.layers import convert_to_column_parallel, convert_to_row_parallel
from lightning_parallel.tensor_parallel.random import RegionState, advance_philox_, is_region_seed
from lightning_parallel.tensor_parallel.sharding import split_uneven
from tests.distributed.formulas import wave
from tests.distributed.layer_tools import close, fill, put_shards
from tests.harness import Ranks

CPU = torch.device("cpu")


def draw_in_region(state: RegionState, tensor_rank: int) -> list[float]:
    """Numbers outside, inside, inside after entering again, and outside of a region."""
    numbers = [torch.rand(()).item()]
    state.enter_sharded_region(tensor_rank, CPU)
    numbers.append(torch.rand(()).item())
    state.enter_sharded_region(tensor_rank, CPU)
    numbers.append(torch.rand(()).item())
    state.leave_sharded_region(CPU)
    state.leave_sharded_region(CPU)
    return [*numbers, torch.rand(()).item()]


def test_a_region_has_its_own_numbers() -> None:
    """Ranks are played one after the other from the same seed."""
    torch.manual_seed(3)
    first = draw_in_region(RegionState(), 0) + draw_in_region(RegionState(), 0)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    state = RegionState()
    second = draw_in_region(state, 1) + draw_in_region(state, 1)
    assert torch.equal(torch.get_rng_state(), after)
    inside = (1, 2, 5, 6)
    assert all((a == b) == (i not in inside) for i, (a, b) in enumerate(zip(first, second, strict=True)))
    assert len({*first, *second}) == 4 + 4 + 4


def test_reset_leaves_an_open_region() -> None:
    torch.manual_seed(3)
    state = RegionState()
    state.enter_sharded_region(1, CPU)
    inside = torch.rand(3)
    state.reset()
    outside = torch.rand(3)
    torch.manual_seed(3)
    RegionState().enter_sharded_region(0, CPU)  # the same draw from the outside state
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.rand(3), outside)
    assert not torch.equal(inside, outside)
    # Set back by something else in between: there is nothing to leave.
    state.enter_sharded_region(1, CPU)
    torch.manual_seed(5)
    state.reset()
    assert torch.initial_seed() == 5


def test_a_segment_that_starts_inside_cannot_leave() -> None:
    """Its recompute would go on with numbers that differ between the ranks."""
    torch.manual_seed(3)
    state = RegionState()
    state.enter_sharded_region(0, CPU)
    inside = torch.get_rng_state()
    state.leave_sharded_region(CPU)
    torch.set_rng_state(inside)
    with pytest.raises(RuntimeError, match="starts between a column-parallel and a row-parallel layer"):
        state.leave_sharded_region(CPU)
    torch.manual_seed(3)


def test_counter_based_generators() -> None:
    """Their host-side state: seed and offset. The offset moves by one step, and each step gives another number."""
    state = torch.tensor([-5, 8], dtype=torch.int64).view(torch.uint8)
    numbers = [advance_philox_(state) for _ in range(3)]
    assert state.view(torch.int64).tolist() == [-5, 20]
    assert len(set(numbers)) == 3
    with pytest.raises(RuntimeError, match="expected a generator state of 16 bytes, got 8"):
        advance_philox_(torch.zeros(8, dtype=torch.uint8))


def test_user_seeds_are_no_region_seeds() -> None:
    assert not any(is_region_seed(seed) for seed in (0, 42, 2**32 - 1, 2**63 - 1))


# ---- in layers


class Block(nn.Module):
    """Dropout on split activations between two linears, and on replicated ones before and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.masks: list[Tensor] = []

    def drop(self, x: Tensor) -> Tensor:
        y = F.dropout(torch.ones_like(x), 0.5, self.training)
        self.masks.append(y.detach())
        return x * y

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.drop(self.up(self.drop(x)))))


def make_blocks(region: RegionState | None, count: int = 2) -> Any:
    blocks: Any = nn.ModuleList(Block() for _ in range(count)).double()
    fill(blocks)
    for block in blocks:
        for layer, dim in ((block.up, 0), (block.down, 1)):
            spec = split_uneven(dim, 32, dist.get_world_size())
            convert: Any = convert_to_row_parallel if dim else convert_to_column_parallel
            convert(layer, spec, dist.group.WORLD, region=region)
            put_shards(layer, spec)
    return blocks


def run(blocks: Any, **how: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Masks of the forward, and of the recompute behind them; gradients."""
    torch.manual_seed(11)
    for block in blocks:
        block.masks.clear()
        block.zero_grad()
    x = wave(4, 8).requires_grad_()
    y = x
    for block in blocks:
        y = checkpoint(block, y, **how) if how else block(y)
    y.square().sum().backward()
    assert x.grad is not None
    grads = [x.grad, *(p.grad for p in blocks.parameters() if p.grad is not None)]
    return [mask for block in blocks for mask in block.masks], grads


def check_masks(rank: int, world_size: int) -> list[list[Tensor]]:
    region = RegionState()
    blocks = make_blocks(region)
    masks, grads = run(blocks)
    after = torch.rand(())
    for reentrant in (False, True):
        again, same = run(blocks, use_reentrant=reentrant)
        # Each block ran twice, and the second time as the first.
        assert len(again) == 2 * len(masks)
        assert all(torch.equal(again[i], again[i + 3]) for i in (0, 1, 2, 6, 7, 8))
        assert all(torch.equal(a, b) for a, b in zip(masks, again[0:3] + again[6:9], strict=True))
        for actual, expected in zip(same, grads, strict=True):
            close(actual, expected, 1e-12)
        assert torch.equal(torch.rand(()), after)
    blocks.eval()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    run_masks, _ = run(blocks)
    torch.manual_seed(11)
    assert all(bool((mask == 1).all()) for mask in run_masks)
    assert not torch.equal(torch.get_rng_state(), before)
    return [masks, [after]]


@pytest.mark.parametrize("world_size", [2, 4])
def test_masks(ranks: Ranks, world_size: int) -> None:
    results = ranks(world_size, check_masks)
    for masks, after in results[1:]:
        first, first_after = results[0]
        assert torch.equal(after[0], first_after[0])
        for place, (mask, other) in enumerate(zip(masks, first, strict=True)):
            assert torch.equal(mask, other) == (place % 3 != 1)
    # Blocks differ from one another too, and half of the elements are dropped.
    masks = results[0][0]
    assert not torch.equal(masks[1], masks[4])
    assert 0.3 < torch.cat([m.flatten() for m in masks]).eq(0).double().mean() < 0.7


class Halves(nn.Module):
    """The first half of a block is one checkpointed segment and the second half another."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda t: self.block.drop(self.block.up(t)), x, use_reentrant=False)
        return self.block.down(y)


def check_early_stop(rank: int, world_size: int) -> None:
    """A recompute that ends inside a region leaves no trace in the next step."""
    region = RegionState()
    (block,) = make_blocks(region, count=1)
    halves = Halves(block)
    results = []
    for _ in range(2):
        torch.manual_seed(11)
        block.masks.clear()
        x = wave(4, 8).requires_grad_()
        region.reset()
        halves(x).sum().backward()
        assert len(block.masks) == 2
        assert torch.equal(*block.masks)
        assert not is_region_seed(torch.initial_seed())
        results.append((x.grad, torch.rand(3)))
    close(results[0][0], results[1][0], 0)
    assert torch.equal(results[0][1], results[1][1])


def test_a_recompute_that_stops_inside(ranks: Ranks) -> None:
    ranks(2, check_early_stop)


# ---- replicated parameters in a sequence-parallel region


class SplitNorm(nn.Module):
    """Position embeddings, norm and a gate on this rank's tokens; then a row-parallel linear and its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(wave(4, 6))
        self.norm = nn.LayerNorm(6)
        self.router = nn.Linear(6, 6, bias=False)
        self.down = nn.Linear(6, 6)
        self.double()
        fill(self)

    def plain(self, x: Tensor) -> Tensor:
        h = self.norm(x + self.position)
        return self.down(h * self.router(h).sigmoid())

    def split(self, x: Tensor, group: Any) -> Tensor:
        weight, bias = mappings.copy_to_group(self.norm.weight, group), mappings.copy_to_group(self.norm.bias, group)
        h = F.layer_norm(mappings.scatter_sequence(x + self.position, group, 0), (6,), weight, bias)
        h = h * F.linear(h, mappings.copy_to_group(self.router.weight, group)).sigmoid()
        features = mappings.gather_sequence(h, group, 0)
        return self.down(features.split(3, -1)[dist.get_rank()])


def check_sequence_parallel_norm(rank: int, world_size: int) -> list[Tensor]:
    """4 tokens split 2/2: gradients are sums over all tokens, weights stay bit-equal over 10 Adam steps."""
    group = dist.group.WORLD
    plain, model = SplitNorm(), SplitNorm()
    spec = split_uneven(1, 6, 2)
    convert_to_row_parallel(model.down, spec, group, scatter_dim=0)
    put_shards(model.down, spec)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (plain, model)]
    for step in range(10):
        x, weight = wave(4, 6, phase=step), wave(4, 6, phase=-step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (plain.plain(x) * weight).sum().backward()
        (model.split(x, group) * weight.chunk(2)[rank]).sum().backward()
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            assert expected is not None
            close(parameter.grad, expected.chunk(2, 1)[rank] if name == "down.weight" else expected, 1e-9)
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach() for name, p in model.named_parameters() if name != "down.weight"]


def test_sequence_parallel_norm(ranks: Ranks) -> None:
    first, second = ranks(2, check_sequence_parallel_norm)
    assert len(first) == 5
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
