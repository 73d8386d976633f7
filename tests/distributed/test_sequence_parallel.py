"""Sequence parallelism against the plain model in one process: loss and every gradient, fp64, 1e-10."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.blocks import find_blocks
from lightning_parallel.tensor_parallel.parallelize import parallelize_module, shard_parameters
from lightning_parallel.tensor_parallel.plan import resolve_plan
from tests.distributed.formulas import wave
from tests.distributed.tensor_models import build, compare_with_plain, fill, language_loss, split_model, tokens
from tests.harness import Ranks

worlds = pytest.mark.parametrize("world_size", [2, 4])


def check_blocks(rank: int, world_size: int, kind: str) -> list[str]:
    plain, split = build(kind), build(kind)
    lengths: list[int] = []
    split.get_submodule("blocks.1").register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    _, tags, _ = split_model(split, "auto", sequence_parallel=True, blocks=find_blocks(split))
    compare_with_plain(plain, split, tags, language_loss)
    assert lengths == [8 // world_size], "between blocks a rank holds its own tokens only"
    return [name for name, tag in tags.items() if tag.partial_gradient]


@worlds
@pytest.mark.parametrize("kind", ["view", "view_tied", "split", "chunk", "grouped1", "grouped4"])
def test_blocks_equal_plain(ranks: Ranks, world_size: int, kind: str) -> None:
    for partial in ranks(world_size, check_blocks, kind):
        assert {"blocks.0.ln1.weight", "blocks.1.ln2.bias"} <= set(partial)
        assert not [name for name in partial if not name.startswith("blocks.")]


class Conditioned(nn.Module):
    """torch's decoder layers: every block also reads a memory, which all ranks hold whole."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 16)
        self.context = nn.Linear(5, 16)
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(16, 4, 24, 0.0, batch_first=batch_first, norm_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x, memory = self.embed(x), self.context(memory)
        for layer in self.layers:
            x = layer(x, memory)
        return x


def check_torch_layers(rank: int, world_size: int, batch_first: bool) -> None:
    plain, split = fill(Conditioned(batch_first)), fill(Conditioned(batch_first))
    blocks = find_blocks(split)
    plan = resolve_plan(
        split, "auto", world_size, sequence_parallel=True, blocks=blocks, sequence_dim=1 if batch_first else 0
    )
    tags = plan.tags(split)
    parallelize_module(split, plan, dist.group.WORLD)
    shard_parameters(split, tags, rank)

    def loss(model: nn.Module) -> Tensor:
        x, memory = wave(2, 4, 3), wave(2, 7, 5, phase=0.2)
        y = model(x, memory) if batch_first else model(x.transpose(0, 1), memory.transpose(0, 1)).transpose(0, 1)
        return (y * wave(2, 4, 16, phase=0.7)).sum()

    compare_with_plain(plain, split, tags, loss, plan=plan)


@worlds
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_layers_with_memory_equal_plain(ranks: Ranks, world_size: int, batch_first: bool) -> None:
    ranks(world_size, check_torch_layers, batch_first)


def check_odd_length(rank: int, world_size: int) -> None:
    split = build("view")
    split_model(split, "auto", sequence_parallel=True, blocks=find_blocks(split))
    with pytest.raises(ValueError, match="7 tokens over tensor_parallel_size=2; pad it to 8 or cut it to 6"):
        split(tokens(length=7))


def test_a_length_that_does_not_split_is_refused(ranks: Ranks) -> None:
    ranks(2, check_odd_length)


def check_dropout(rank: int, world_size: int) -> tuple[list[list[bool]], float]:
    """Which of its tokens each rank drops after the MLP, and a number drawn after the model."""
    model = build("view")
    for name in ("blocks.0.mlp", "blocks.1.mlp"):
        model.get_submodule(name).add_module("3", nn.Dropout(0.5))
    torch.manual_seed(7)
    dropped: list[list[bool]] = []
    model.get_submodule("blocks.0.mlp.3").register_forward_hook(
        lambda module, args, output: dropped.append((output == 0).flatten().tolist())
    )
    split_model(model, "auto", sequence_parallel=True, blocks=find_blocks(model))
    model(tokens())
    return dropped, float(torch.rand(()))


def test_dropout_falls_on_other_tokens_on_every_rank(ranks: Ranks) -> None:
    (dropped, after), (dropped_other, after_other) = ranks(2, check_dropout)
    assert dropped != dropped_other
    assert after == after_other


def test_without_blocks_it_is_refused() -> None:
    with pytest.raises(ValueError, match='needs the repeated blocks; give blocks="auto"'):
        resolve_plan(build("view"), "auto", 2, sequence_parallel=True)


def test_layers_beside_the_residual_are_refused() -> None:
    model = build("flat")
    with pytest.raises(ValueError, match="block 'blocks.0' itself.*module of their own.*sequence_parallel=False"):
        resolve_plan(model, "auto", 2, sequence_parallel=True, blocks=find_blocks(model))
