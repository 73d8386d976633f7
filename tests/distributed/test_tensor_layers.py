"""Split linears and embeddings against ``nn.Linear`` and ``nn.Embedding`` in one process.

Weights come from formulas; fp64 where only sums are reordered (1e-12), fp32 at 2e-6.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    attach_group,
    convert_to_column_parallel,
    convert_to_row_parallel,
    convert_to_vocab_parallel,
    restore_module,
)
from lightning_parallel.tensor_parallel.sharding import ShardSpec, split_kv_heads, split_packed, split_uneven
from lightning_parallel.tensor_parallel.shards import all_gather_full, shard_tensor
from tests.distributed.formulas import wave
from tests.distributed.layer_tools import Counter, close, fill, put_shards
from tests.harness import Ranks

worlds = pytest.mark.parametrize("world_size", [2, 3, 4])
PRECISIONS = ((torch.float64, 1e-12), (torch.float32, 2e-6))


class ScaledLinear(nn.Linear):
    """A subclass whose forward does more than its ancestor's."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class ScaledEmbedding(nn.Embedding):
    """As in Gemma: the lookup times the root of the width."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embedding_dim**0.5


class LowRankLinear(nn.Linear):
    """As in LoRA: parameters that no split of the weight covers."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Linear(inputs, 2), nn.Linear(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


class SilentLinear(nn.Linear):
    """A subclass that computes what its ancestor does, as ``NonDynamicallyQuantizableLinear`` in attention."""


# ---- column


def check_column(rank: int, world_size: int) -> None:
    for dtype, atol in PRECISIONS:
        for kind in (nn.Linear, SilentLinear, ScaledLinear):
            for bias, gather in ((True, True), (False, False), (True, False)):
                compare_column(rank, world_size, fill(kind(5, 7, bias=bias, dtype=dtype)), gather, atol)


def compare_column(rank: int, world_size: int, plain: nn.Linear, gather: bool, atol: float) -> None:
    """7 outputs: uneven on 2, 3 and 4 ranks. Three backward passes accumulate."""
    group, dtype = dist.group.WORLD, plain.weight.dtype
    spec = split_uneven(0, 7, world_size)
    layer = copy.deepcopy(plain)
    convert_to_column_parallel(layer, spec, group, gather_output=gather)
    put_shards(layer, spec)
    assert isinstance(layer, type(plain))
    assert layer.out_features == spec.local_size(rank)
    x = wave(2, 3, 5, dtype=dtype).requires_grad_()
    expected_x = x.detach().clone().requires_grad_()
    for step in range(3):
        weight = wave(2, 3, 7, phase=step, dtype=dtype)
        with Counter() as forward:
            y = layer(x)
        expected = plain(expected_x)
        close(y, expected if gather else expected.split(comm.chunk_sizes(7, world_size), -1)[rank], atol)
        with Counter() as backward:
            (y * (weight if gather else weight.split(comm.chunk_sizes(7, world_size), -1)[rank])).sum().backward()
        (expected * weight).sum().backward()
        assert (forward.all_reduces, backward.all_reduces) == (0, 1)
    close(x.grad, expected_x.grad, 10 * atol)
    close_shards(layer, plain, spec, 10 * atol)


def close_shards(layer: nn.Module, plain: nn.Module, spec: ShardSpec, atol: float) -> None:
    """Gradients of the local parameters against slices of the plain module's."""
    whole = dict(plain.named_parameters())
    for name, parameter in layer.named_parameters():
        grad = whole[name].grad
        assert grad is not None
        sliced = grad.dim() > spec.dim and grad.shape[spec.dim] == spec.size
        close(parameter.grad, shard_tensor(grad, spec, dist.get_rank()) if sliced else grad, atol)


@worlds
def test_column(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_column)


# ---- row


def check_row(rank: int, world_size: int) -> None:
    for dtype, atol in PRECISIONS:
        compare_row(rank, world_size, fill(nn.Linear(7, 5, dtype=dtype)), {}, atol)
        compare_row(rank, world_size, fill(SilentLinear(7, 5, dtype=dtype)), {"split_input": True}, atol)
        compare_row(rank, world_size, fill(ScaledLinear(7, 5, bias=False, dtype=dtype)), {}, atol)
        compare_row(rank, world_size, fill(nn.Linear(7, 5, dtype=dtype)), {"scatter_dim": 1}, atol)
        compare_row(rank, world_size, fill(ScaledLinear(7, 5, bias=False, dtype=dtype)), {"scatter_dim": 0}, atol)


def compare_row(rank: int, world_size: int, plain: nn.Linear, options: dict[str, Any], atol: float) -> None:
    group, dtype = dist.group.WORLD, plain.weight.dtype
    spec, sizes = split_uneven(1, 7, world_size), comm.chunk_sizes(7, world_size)
    layer = copy.deepcopy(plain)
    convert_to_row_parallel(layer, spec, group, **options)
    put_shards(layer, spec)
    assert layer.in_features == spec.local_size(rank)
    full = wave(4, 6, 7, dtype=dtype)
    whole_input = "split_input" in options
    x = (full if whole_input else full.split(sizes, -1)[rank].contiguous()).clone().requires_grad_()
    expected_x = full.clone().requires_grad_()
    dim = options.get("scatter_dim")

    def mine(t: Tensor) -> Tensor:
        return t if dim is None else t.split(comm.chunk_sizes(t.shape[dim], world_size), dim)[rank]

    for step in range(3):
        weight = wave(4, 6, 5, phase=step, dtype=dtype)
        with Counter() as forward:
            y = layer(x)
        expected = plain(expected_x)
        close(y, mine(expected), atol)
        with Counter() as backward:
            (y * mine(weight)).sum().backward()
        (expected * weight).sum().backward()
        assert (forward.all_reduces, backward.all_reduces) == (1 if dim is None else 0, 0)
    assert expected_x.grad is not None
    close(x.grad, expected_x.grad if whole_input else expected_x.grad.split(sizes, -1)[rank], 10 * atol)
    close_shards(layer, plain, spec, 20 * atol)


@worlds
def test_row(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_row)


def check_row_bias(rank: int, world_size: int, scatter_dim: int | None) -> tuple[list[float], float, Tensor]:
    """y = x.w + b over 5 SGD steps: outputs and bias gradient of the first, bias after the last."""
    layer = RowParallelLinear(4, 1, dist.group.WORLD, scatter_dim=scatter_dim, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.fill_(10)
    x = torch.tensor([[1.0, 2, 3, 4]] * 3, dtype=torch.float64).chunk(2, -1)[rank]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    first: tuple[list[float], float] | None = None
    for _ in range(5):
        optimizer.zero_grad()
        y = layer(x)
        y.sum().backward()
        assert layer.bias.grad is not None
        first = first or (y.flatten().tolist(), layer.bias.grad.item())
        optimizer.step()
    assert first is not None
    return *first, layer.bias.detach()


@pytest.mark.parametrize("scatter_dim", [None, 0])
def test_row_bias_is_added_once(ranks: Ranks, scatter_dim: int | None) -> None:
    """10 + 1 + 2 + 3 + 4 = 20, gradient 3; adding it on both ranks gives 30, dividing by the ranks 1.5."""
    plain = nn.Linear(4, 1, dtype=torch.float64)
    nn.init.ones_(plain.weight)
    nn.init.constant_(plain.bias, 10.0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        plain(torch.tensor([[1.0, 2, 3, 4]] * 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
    (y0, db0, b0), (y1, db1, b1) = ranks(2, check_row_bias, scatter_dim)
    assert (y0, y1) == (([20.0] * 3, [20.0] * 3) if scatter_dim is None else ([20.0] * 2, [20.0]))
    assert db0 == db1 == 3
    assert torch.equal(b0, b1)
    close(b0, plain.bias.detach(), 1e-12)


# ---- column and row together, and what they must leave alone


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12, dtype=torch.float64), nn.Linear(12, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def split_mlp(mlp: Mlp, group: Any, **row: Any) -> Mlp:
    world_size = comm.group_size(group)
    up, down = split_uneven(0, 12, world_size), split_uneven(1, 12, world_size)
    convert_to_column_parallel(mlp.up, up, group)
    convert_to_row_parallel(mlp.down, down, group, **row)
    put_shards(mlp.up, up)
    put_shards(mlp.down, down)
    return mlp


def train(mlp: Mlp, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (mlp(wave(4, 6, phase=step)) - wave(4, 6, phase=-step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_training(rank: int, world_size: int) -> None:
    plain = fill(Mlp())
    mlp = split_mlp(copy.deepcopy(plain), dist.group.WORLD)
    assert train(mlp, 10) == pytest.approx(train(plain, 10), abs=1e-11)
    for layer, dim in ((mlp.up, 0), (mlp.down, 1)):
        full = all_gather_full(
            layer.weight, split_uneven(dim, 12, world_size), (12, 6)[:: 1 - 2 * dim], dist.group.WORLD
        )
        close(full, (plain.down if dim else plain.up).weight.detach(), 1e-10)


@worlds
def test_training(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_training)


def check_gradient_flags(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    # Frozen weights: their gradients are neither computed nor kept.
    plain, mlp = fill(Mlp()), split_mlp(fill(Mlp()), group)
    for module in (plain, mlp):
        module.up.weight.requires_grad_(False)
        module.down.requires_grad_(False)
    x, expected_x = wave(4, 6).requires_grad_(), wave(4, 6).requires_grad_()
    mlp(x).square().sum().backward()
    plain(expected_x).square().sum().backward()
    close(x.grad, expected_x.grad, 1e-11)
    assert mlp.up.weight.grad is None
    assert mlp.down.weight.grad is None
    assert mlp.down.bias.grad is None
    assert plain.up.bias.grad is not None
    close(mlp.up.bias.grad, shard_tensor(plain.up.bias.grad, split_uneven(0, 12, world_size), rank), 1e-11)
    # An input without a gradient, no-grad and inference mode: nothing to reduce.
    with Counter() as counter:
        mlp(wave(4, 6)).sum().backward()
        with torch.no_grad():
            mlp(x)
        with torch.inference_mode():
            close(mlp(wave(4, 6)), plain(wave(4, 6)).detach(), 1e-12)
    assert counter.all_reduces == 3  # the forward of the row layer each time


def test_gradient_flags(ranks: Ranks) -> None:
    ranks(2, check_gradient_flags)


def check_input_shapes(rank: int, world_size: int) -> None:
    plain, mlp = fill(Mlp()), split_mlp(fill(Mlp()), dist.group.WORLD)
    inputs: list[Callable[[], Tensor]] = [
        lambda: wave(6),
        lambda: wave(2, 1, 3, 6),
        lambda: wave(0, 6),
        lambda: wave(6, 5).t(),
        lambda: wave(1, 6).expand(4, 6),
        lambda: wave(3, 4, 6).transpose(0, 1),
    ]
    for make in inputs:
        x, expected_x = make().requires_grad_(), make().requires_grad_()
        before = x.detach().clone()
        y, expected = mlp(x), plain(expected_x)
        close(y, expected, 1e-12)
        assert torch.equal(x.detach(), before)
        # Gradients as sum() and a transpose send them: expanded, and not contiguous.
        for loss in ((lambda t: t.sum()), (lambda t: (t.movedim(-1, 0) * wave(*t.movedim(-1, 0).shape)).sum())):
            x.grad = expected_x.grad = None
            loss(mlp(x)).backward()
            loss(plain(expected_x)).backward()
            close(x.grad, expected_x.grad, 1e-11)


def test_input_shapes(ranks: Ranks) -> None:
    ranks(2, check_input_shapes)


def check_changes_in_place(rank: int, world_size: int) -> None:
    """What a layer returns may be changed in place, as by ReLU(inplace=True)."""
    group = dist.group.WORLD
    for shape in ((6,), (4, 6), (2, 4, 6)):
        for bias in (True, False):
            plain = fill(nn.Linear(6, 6, bias=bias, dtype=torch.float64))
            x, local = wave(*shape), wave(*shape).chunk(world_size, -1)[rank]
            for layer, value in (
                (ColumnParallelLinear.from_linear(plain, group), x),
                (ColumnParallelLinear.from_linear(plain, group, gather_output=True), x),
                (RowParallelLinear.from_linear(plain, group), local),
                (RowParallelLinear.from_linear(plain, group, split_input=True), x),
            ):
                value = value.clone().requires_grad_()
                layer(value).mul_(2).sum().backward()
                expected = x.clone().requires_grad_()
                (plain(expected) * 2).sum().backward()
                assert expected.grad is not None
                close(value.grad, expected.grad if value.shape == x.shape else expected.grad.chunk(2, -1)[rank], 1e-12)
    embedding = fill(VocabParallelEmbedding(6, 4, group))
    embedding(torch.tensor([0, 5])).mul_(2).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.sum() == 8


def test_changes_in_place(ranks: Ranks) -> None:
    ranks(2, check_changes_in_place)


def check_keywords(rank: int, world_size: int) -> None:
    """The input may be passed by the name that the plain module gives it."""
    group, x, ids = dist.group.WORLD, wave(2, 6), torch.tensor([0, 5])
    for kind in (nn.Linear, ScaledLinear):
        layer = fill(kind(6, 4, bias=False, dtype=torch.float64))
        name = "input" if kind is nn.Linear else "x"
        for convert, dim, value in (
            (convert_to_column_parallel, 0, x),
            (convert_to_row_parallel, 1, x.chunk(2, -1)[rank]),
        ):
            split = copy.deepcopy(layer)
            spec = split_uneven(dim, (4, 6)[dim], world_size)
            convert(split, spec, group)
            put_shards(split, spec)
            close(split(**{name: value}), layer(x) if dim else layer(x).chunk(2, -1)[rank], 1e-12)
    for embedding, name in ((nn.Embedding(6, 4), "input"), (ScaledEmbedding(6, 4), "ids")):
        fill(embedding)
        expected = embedding(ids)
        convert_to_vocab_parallel(embedding, split_uneven(0, 6, world_size), group)
        put_shards(embedding, split_uneven(0, 6, world_size))
        close(embedding(**{name: ids}), expected, 0)


def test_keywords(ranks: Ranks) -> None:
    ranks(2, check_keywords)


def check_second_derivatives(rank: int, world_size: int) -> None:
    """A penalty on the input gradient, as for critics."""
    plain, mlp = fill(Mlp()), split_mlp(fill(Mlp()), dist.group.WORLD)
    results = []
    for module in (mlp, plain):
        x = wave(4, 6).requires_grad_()
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        results.append(x.grad)
    close(results[0], results[1], 1e-9)
    for layer, whole, dim in ((mlp.up, plain.up, 0), (mlp.down, plain.down, 1)):
        close_shards(layer, whole, split_uneven(dim, 12, world_size), 1e-9)


@worlds
def test_second_derivatives(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_second_derivatives)


def check_autocast(rank: int, world_size: int) -> None:
    """Under bf16 autocast: dtypes of nn.Linear everywhere, values within bf16 rounding of partial sums."""
    plain = fill(Mlp()).float()
    mlp = split_mlp(fill(Mlp()).float(), dist.group.WORLD)
    grads = []
    for module in (mlp, plain):
        x = wave(4, 6, dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
            # Another use of the same weight under the same autocast must still reach it.
            extra = F.linear(x, module.up.weight)
        assert (y.dtype, extra.dtype) == (torch.bfloat16, torch.bfloat16)
        (y.float().sum() + extra.float().sum()).backward()
        assert x.grad is not None
        assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.float32}
        assert module.up.weight.grad is not None
        grads.append(module.up.weight.grad)
    torch.testing.assert_close(grads[0], grads[1].chunk(world_size)[rank], rtol=0.05, atol=0.05)


def test_autocast(ranks: Ranks) -> None:
    ranks(2, check_autocast)


# ---- splits that are no plain chunks, and other weight layouts


def check_gathered_splits(rank: int, world_size: int) -> None:
    """Gate and up interleaved by rank, and key/value heads held by two ranks each, gathered to the full output."""
    group = dist.group.WORLD
    for spec in (split_packed(0, 8, 2, world_size), split_kv_heads(0, 2, 4, world_size)):
        plain = fill(nn.Linear(3, 8, dtype=torch.float64))
        layer = copy.deepcopy(plain)
        convert_to_column_parallel(layer, spec, group, gather_output=True)
        put_shards(layer, spec)
        x, expected_x = wave(2, 3).requires_grad_(), wave(2, 3).requires_grad_()
        y, expected = layer(x), plain(expected_x)
        close(y, expected, 1e-12)
        (y * wave(2, 8, phase=1)).sum().backward()
        (expected * wave(2, 8, phase=1)).sum().backward()
        close(x.grad, expected_x.grad, 1e-12)
        # Summed over its holders, a repeated head's gradient counts once.
        gathered = torch.zeros(8, 3, dtype=torch.float64)
        assert layer.weight.grad is not None
        for segment, where in spec.local_slices(rank):
            gathered[segment.start : segment.stop] += layer.weight.grad[where]
        comm.all_reduce_(gathered, group)
        close(gathered, plain.weight.grad, 1e-12)


def test_gathered_splits(ranks: Ranks) -> None:
    ranks(4, check_gathered_splits)


def check_conv1d(rank: int, world_size: int) -> None:
    """GPT-2's Conv1D keeps its weight as (inputs, outputs)."""
    from transformers.pytorch_utils import Conv1D

    group = dist.group.WORLD
    plain: Any = nn.Sequential(Conv1D(8, 6), nn.GELU(), Conv1D(6, 8)).double()
    fill(plain)
    model = copy.deepcopy(plain)
    up, down = split_packed(1, 8, 2, world_size), split_packed(0, 8, 2, world_size)
    convert_to_column_parallel(model[0], up, group)
    convert_to_row_parallel(model[2], down, group)
    put_shards(model[0], up)
    put_shards(model[2], down)
    assert (model[0].nf, model[2].nx) == (8 // world_size, 8 // world_size)
    x, expected_x = wave(2, 3, 6).requires_grad_(), wave(2, 3, 6).requires_grad_()
    y, expected = model(x), plain(expected_x)
    close(y, expected, 1e-12)
    with Counter() as counter:
        y.square().sum().backward()
    assert counter.all_reduces == 1
    expected.square().sum().backward()
    close(x.grad, expected_x.grad, 1e-11)
    close(model[0].weight.grad, shard_tensor(plain[0].weight.grad, up, rank), 1e-11)
    close(model[2].weight.grad, shard_tensor(plain[2].weight.grad, down, rank), 1e-11)
    close(model[2].bias.grad, plain[2].bias.grad, 1e-11)


def test_conv1d(ranks: Ranks) -> None:
    ranks(2, check_conv1d)


# ---- vocabulary


def check_vocab(rank: int, world_size: int) -> None:
    """11 rows are uneven everywhere; 3 rows on 4 ranks leave one with none."""
    for kind in (nn.Embedding, ScaledEmbedding):
        for rows, padding_idx in ((11, None), (11, 10), (11, 0), (3, None)):
            if kind is ScaledEmbedding and rows < world_size:
                continue
            compare_vocab(rank, world_size, kind(rows, 4, padding_idx=padding_idx, dtype=torch.float64))


def compare_vocab(rank: int, world_size: int, plain: nn.Embedding) -> None:
    fill(plain)
    rows = plain.num_embeddings
    spec = split_uneven(0, rows, world_size)
    layer = copy.deepcopy(plain)
    convert_to_vocab_parallel(layer, spec, dist.group.WORLD)
    put_shards(layer, spec)
    assert isinstance(layer, type(plain))
    assert layer.num_embeddings == spec.local_size(rank)
    ids = torch.tensor([[0, rows - 1, 1], [rows // 2, 0, rows - 1]])
    for step in range(2):
        with Counter() as forward:
            y = layer(ids)
        expected = plain(ids)
        close(y, expected, 0)
        assert y.requires_grad
        with Counter() as backward:
            (y * wave(2, 3, 4, phase=step)).sum().backward()
        (expected * wave(2, 3, 4, phase=step)).sum().backward()
        assert (forward.all_reduces, backward.all_reduces) == (1, 0)
    close_shards(layer, plain, spec, 1e-12)
    restore_module(layer)
    assert (layer.num_embeddings, layer.padding_idx) == (rows, plain.padding_idx)


@worlds
def test_vocab(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_vocab)


def check_vocab_outside(rank: int, world_size: int, index: int) -> bool:
    layer = VocabParallelEmbedding(5, 2, dist.group.WORLD)
    try:
        layer(torch.tensor([index]))
    except IndexError:
        comm.all_reduce_(torch.zeros(1, 2), dist.group.WORLD)  # what the other waits for
        return True
    return False


def test_an_id_outside_the_table_fails(ranks: Ranks) -> None:
    assert ranks(2, check_vocab_outside, 5) == [False, True]
    assert ranks(2, check_vocab_outside, -1) == [True, False]


# ---- public classes


def check_public_layers(rank: int, world_size: int) -> None:
    """Start weights are slices of those that the plain layer draws under the same seed; from_... copies slices."""
    group, spec = dist.group.WORLD, split_uneven(1, 7, world_size)
    x, ids = wave(2, 7).float(), torch.tensor([[0, 6, 3]])
    cases: list[tuple[Any, Any, Tensor, int]] = [
        (ColumnParallelLinear(6, 7, group, device="meta"), ColumnParallelLinear, x[:, :6], 0),
        (RowParallelLinear(7, 6, group, device="meta"), RowParallelLinear, x, 1),
        (VocabParallelEmbedding(7, 6, group, device="meta"), VocabParallelEmbedding, ids, 0),
    ]
    for empty, kind, full_input, dim in cases:
        arguments = (7, 6) if kind is not ColumnParallelLinear else (6, 7)
        torch.manual_seed(7)
        layer = kind(*arguments, group)
        torch.manual_seed(7)
        plain: Any = (nn.Embedding if kind is VocabParallelEmbedding else nn.Linear)(*arguments)
        weight = shard_tensor(plain.weight, split_uneven(dim, 7, world_size), rank)
        assert torch.equal(layer.weight, weight)
        assert (empty.weight.shape, empty.weight.device.type) == (weight.shape, "meta")
        plain.requires_grad_(False).eval()
        again = (kind.from_embedding if kind is VocabParallelEmbedding else kind.from_linear)(plain, group)
        assert torch.equal(again.weight, weight)
        assert again.weight.data_ptr() != plain.weight.data_ptr()
        assert not again.training
        assert not any(p.requires_grad for p in again.parameters())
        expected = plain(full_input)
        y = layer(shard_tensor(full_input, spec, rank) if kind is RowParallelLinear else full_input)
        close(y, shard_tensor(expected, spec, rank) if kind is ColumnParallelLinear else expected, 1e-6)


@worlds
def test_public_layers(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_public_layers)


# ---- copies and the way back


def check_copies(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    original = nn.Sequential(ScaledLinear(4, 6), nn.Linear(6, 4), nn.Embedding(8, 4), SilentLinear(4, 6)).double()
    fill(original)
    model = copy.deepcopy(original)
    before = [dict(module.__dict__) for module in model]
    specs = [split_uneven(0, 6, 2), split_uneven(1, 6, 2), split_uneven(0, 8, 2), split_uneven(0, 6, 2)]
    parameters = dict(model.named_parameters())
    convert_to_column_parallel(model[0], specs[0], group)
    convert_to_row_parallel(model[1], specs[1], group)
    convert_to_vocab_parallel(model[2], specs[2], group)
    convert_to_column_parallel(model[3], specs[3], group)
    names = [type(module).__name__ for module in model]
    assert names == [
        "ColumnParallelScaledLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "ColumnParallelSilentLinear",
    ]
    assert type(model[1]) is RowParallelLinear
    for module, spec in zip(model, specs, strict=True):
        put_shards(module, spec)
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items())
    with pytest.raises(ValueError, match="RowParallelLinear is already split over 2 tensor ranks"):
        convert_to_row_parallel(model[1], specs[1], group)

    def outputs(m: nn.Module) -> list[Tensor]:
        first, second, third, fourth = m.children()
        x = wave(2, 4).requires_grad_()
        y = second(first(x))
        y.sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad, third(torch.arange(8)).detach(), fourth(wave(2, 4)).detach()]

    expected = outputs(model)
    for twin in (copy.deepcopy(model), attached(pickle.loads(pickle.dumps(model)), group)):
        assert [type(module) for module in twin] == [type(module) for module in model]
        for actual, value in zip(outputs(twin), expected, strict=True):
            assert torch.equal(actual, value)
        assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in model.parameters()}
    with pytest.raises(RuntimeError, match=r"loaded without its process group; call attach_group\(module, group\)"):
        pickle.loads(pickle.dumps(model))[0](wave(2, 4))

    for module, spec, old, whole in zip(model, specs, before, original, strict=True):
        restore_module(module)
        assert type(module) is type(whole)
        assert module.__dict__.keys() == old.keys()
        assert {k: v for k, v in module.__dict__.items() if isinstance(v, int)} == {
            k: v for k, v in old.items() if isinstance(v, int)
        }
        for parameter, value in zip(module.parameters(), whole.parameters(), strict=True):
            split = parameter.shape != value.shape
            full = all_gather_full(parameter, spec, tuple(value.shape), group) if split else parameter
            assert torch.equal(full, value)
    with pytest.raises(ValueError, match="Linear is not a converted module"):
        restore_module(model[1])


def attached(model: nn.Module, group: Any) -> Any:
    attach_group(model, group)
    return model


def test_copies(ranks: Ranks) -> None:
    ranks(2, check_copies)


# ---- refusals


def refuse(message: str, convert: Callable[..., None], module: nn.Module, spec: ShardSpec) -> None:
    before = type(module), dict(module.__dict__)
    with pytest.raises(ValueError, match=message):
        convert(module, spec, None)
    assert (type(module), dict(module.__dict__)) == before


def test_refusals() -> None:
    """Each leaves the module as it was."""
    one = split_uneven(0, 6, 1)
    refuse("Conv2d cannot be column-parallel; expected nn.Linear", convert_to_column_parallel, nn.Conv2d(1, 6, 1), one)
    refuse("Linear cannot be vocabulary-parallel", convert_to_vocab_parallel, nn.Linear(4, 6), one)
    refuse("out_features=8 .* size 8, but .* size 6", convert_to_column_parallel, nn.Linear(4, 8), one)
    refuse("along dimension 1 of size 6", convert_to_row_parallel, nn.Linear(6, 6), one)
    refuse(
        "split over 2 ranks needs a group of as many, not 1",
        convert_to_column_parallel,
        nn.Linear(4, 6),
        split_uneven(0, 6, 2),
    )
    refuse(
        "has a forward of its own and a bias, which would be added once per tensor rank",
        convert_to_row_parallel,
        ScaledLinear(6, 4),
        split_uneven(1, 6, 1),
    )
    refuse("down.bias, down.weight, up.bias, up.weight", convert_to_column_parallel, LowRankLinear(4, 6), one)
    refuse("has no shape yet", convert_to_column_parallel, nn.LazyLinear(6), one)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    refuse("computed from other parameters", convert_to_column_parallel, normed, one)
    patched: Any = nn.Linear(4, 6)
    patched.forward = torch.relu
    refuse("was replaced on the object", convert_to_column_parallel, patched, one)
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        refuse(f"with {next(iter(option))}=", convert_to_vocab_parallel, nn.Embedding(6, 4, **option), one)


def check_refusals_of_groups(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="cannot be held by several ranks"):
        convert_to_row_parallel(nn.Linear(4, 3), split_kv_heads(1, 1, 4, 2), group)
    with pytest.raises(ValueError, match="one contiguous run of rows per rank"):
        convert_to_vocab_parallel(nn.Embedding(8, 3), split_packed(0, 8, 2, 2), group)


def test_refusals_of_groups(ranks: Ranks) -> None:
    ranks(2, check_refusals_of_groups)
