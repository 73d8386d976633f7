"""Split models against the same model in one process: loss and every gradient, fp64, 1e-10."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.tensor_parallel.parallelize import parallelize_module, shard_parameters
from lightning_parallel.tensor_parallel.plan import resolve_plan
from tests.distributed.formulas import wave
from tests.distributed.tensor_models import Block, Holder, build, compare_with_plain, fill, language_loss, split_model
from tests.harness import Ranks

worlds = pytest.mark.parametrize("world_size", [2, 4])


def check_automatic(rank: int, world_size: int, kind: str) -> tuple[str, ...]:
    plain, split = build(kind), build(kind)
    plan, tags, undo = split_model(split, "auto")
    compare_with_plain(plain, split, tags, language_loss, plan=plan)
    undo.restore()
    assert [type(m) for m in split.modules()] == [type(m) for m in plain.modules()]
    return plan.replicated


@worlds
@pytest.mark.parametrize(
    "kind",
    ["view", "view_tied", "split", "chunk", "flat", "flat_tied", "grouped1", "grouped2", "grouped4", "grouped8_tied"],
)
def test_automatic_plan(ranks: Ranks, world_size: int, kind: str) -> None:
    for replicated in ranks(world_size, check_automatic, kind):
        assert replicated == ("pos",)


EXPLICIT: dict[str, dict[str, str]] = {
    "view": {"attn.c_attn": "colwise_qkv", "attn.c_proj": "rowwise"},
    "split": {"model.blocks.*.attn.qkv": "colwise_qkv", "model.blocks.*.attn.proj": "rowwise"},
    "chunk": {
        "blocks.*.attn.qkv": "colwise_qkv",
        "blocks.*.attn.proj": "rowwise",
        "blocks.*.attn.q_norm": "grad_sum",
        "blocks.*.attn.k_norm": "replicated_with_grad_allreduce",
        "mlp.0": "colwise",
        "mlp.2": "rowwise",
    },
    "view_tied": {"mlp.0": "colwise_rep", "mlp.2": "rowwise_rep", "tok": "embedding_rowwise", "head": "colwise_rep"},
    "grouped2": {
        "mlp.w1": "colwise",
        "mlp.w3": "colwise",
        "mlp.w2": "rowwise",
        "blocks.0.mlp.w1": "replicate",
        "blocks.0.mlp.w3": "replicate",
        "blocks.0.mlp.w2": "replicate",
    },
}


def check_explicit(rank: int, world_size: int, kind: str) -> tuple[str, ...]:
    plain, split = Holder(build(kind)), Holder(build(kind))
    plan, tags, _ = split_model(split, EXPLICIT[kind])
    compare_with_plain(plain, split, tags, lambda model: language_loss(model.get_submodule("model")), plan=plan)
    return plan.replicated


@worlds
@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        ("view", ("tok", "pos", "blocks.0.mlp.0", "blocks.0.mlp.2", "blocks.1.mlp.0", "blocks.1.mlp.2", "head")),
        ("split", ("tok", "pos", "blocks.0.mlp.0", "blocks.0.mlp.2", "blocks.1.mlp.0", "blocks.1.mlp.2", "head")),
        ("chunk", ("tok", "pos", "head")),
    ],
)
def test_explicit_plan(ranks: Ranks, world_size: int, kind: str, whole: tuple[str, ...]) -> None:
    """What no pattern covers stays whole and is listed."""
    for replicated in ranks(world_size, check_explicit, kind):
        assert replicated == tuple(f"model.{name}" for name in whole)


@worlds
@pytest.mark.parametrize("kind", ["view_tied", "grouped2"])
def test_explicit_plan_of_gathers_and_exceptions(ranks: Ranks, world_size: int, kind: str) -> None:
    ranks(world_size, check_explicit, kind)


class Pair(nn.Module):
    """Two Linears with whatever names."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 8)
        self.narrow = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.tanh(self.wide(x)))


def check_pair(rank: int, world_size: int) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    plain, split = fill(Pair()), fill(Pair())
    plan, tags, undo = split_model(split, {"wide": "colwise", "narrow": "rowwise"})
    assert plan.replicated == ()
    x = wave(5, 6).requires_grad_()
    inputs: list[Tensor] = []

    def loss(model: nn.Module) -> Tensor:
        y = model(x)
        total = (y * wave(5, 3, phase=0.3)).sum()
        inputs.append(torch.autograd.grad(total, x, retain_graph=True)[0])
        return total

    compare_with_plain(plain, split, tags, loss)
    torch.testing.assert_close(inputs[1], inputs[0], rtol=1e-12, atol=1e-12)
    shapes = [tuple(p.shape) for p in split.parameters()]
    undo.restore()
    undo.restore()
    assert repr(split) == repr(plain)
    return shapes, [p.detach().clone() for p in split.parameters()]


def test_any_pair_of_linears(ranks: Ranks) -> None:
    (shapes, first), (_, second) = ranks(2, check_pair)
    assert shapes == [(4, 6), (4,), (3, 4), (3,)]
    assert not torch.equal(first[0], second[0]), "two shards of one matrix are never equal copies"
    assert torch.equal(first[3], second[3])


def check_accumulation(rank: int, world_size: int) -> None:
    """Two micro-batches before the gradients are read: nothing may be reduced twice."""
    plain, split = build("grouped1"), build("grouped1")
    _, tags, _ = split_model(split, "auto")
    language_loss(split).backward()
    language_loss(plain).backward()
    compare_with_plain(plain, split, tags, language_loss)


def test_gradients_accumulate(ranks: Ranks) -> None:
    ranks(4, check_accumulation)


def check_kept(rank: int, world_size: int) -> list[str]:
    model = build("view")
    group = dist.group.WORLD
    plan = resolve_plan(model, "auto", world_size)
    tags = plan.tags(model)
    first = model.get_submodule("blocks.0")

    def keep(name: str) -> bool:
        return name.startswith("blocks.0")

    undo = parallelize_module(model, plan, group, keep=keep)
    shard_parameters(model, tags, rank, keep=keep)
    changed = [name for name, p in model.named_parameters() if tuple(p.shape) != tags[name].shape]
    x = wave(2, 5, 32).requires_grad_()
    expected = build("view").get_submodule("blocks.0")(x)
    torch.testing.assert_close(first(x), expected, rtol=1e-12, atol=1e-12)
    assert model.get_submodule("blocks.1.attn").n_head == 8
    undo.restore()
    assert first.get_submodule("attn").n_head == 8
    return changed


def test_only_kept_modules_change(ranks: Ranks) -> None:
    for changed in ranks(2, check_kept):
        assert changed == [
            "blocks.0.attn.c_attn.weight",
            "blocks.0.attn.c_attn.bias",
            "blocks.0.attn.c_proj.weight",
            "blocks.0.mlp.0.weight",
            "blocks.0.mlp.0.bias",
            "blocks.0.mlp.2.weight",
        ]


def check_wrong_size(rank: int, world_size: int) -> None:
    model = build("view")
    plan = resolve_plan(model, "auto", 4)
    with pytest.raises(ValueError, match="plan is for tensor_parallel_size=4, but the group has 2 ranks"):
        parallelize_module(model, plan, dist.group.WORLD)
    assert repr(model) == repr(build("view"))


def test_plan_for_another_size_is_refused(ranks: Ranks) -> None:
    ranks(2, check_wrong_size)


class Experts(nn.Module):
    """Stacked experts with bare parameters, every token weighted over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(3, 16, 6))
        self.down = nn.Parameter(torch.empty(3, 6, 8))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,efh->etf", x, self.gate_up).chunk(2, -1)
        return torch.einsum("etf,ehf,te->th", torch.sigmoid(gate) * up, self.down, weights)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.router = nn.Linear(6, 3)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.experts(x, self.router(x).softmax(-1))


def check_experts(rank: int, world_size: int) -> None:
    plain, split = fill(Mixture()), fill(Mixture())
    plan, tags, undo = split_model(
        split,
        {"experts.gate_up": "packed_colwise", "experts.down": "rowwise", "experts": "moe_tp_experts"},
    )
    assert plan.replicated == ("embed", "router")
    compare_with_plain(plain, split, tags, lambda model: (model(wave(5, 4)) * wave(5, 6, phase=0.3)).sum(), plan=plan)
    undo.restore()
    assert type(split.get_submodule("experts")) is Experts


@worlds
def test_stacked_experts(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_experts)


class Features(nn.Module):
    """Bare parameters whose products only need to be summed: nothing before them is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.empty(8, 6))
        self.narrow = nn.Parameter(torch.empty(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.wide.t()) @ self.narrow.t()


def check_all_reduce(rank: int, world_size: int) -> None:
    plain, split = Holder(fill(Features())), Holder(fill(Features()))
    plan, tags, _ = split_model(split, {"model.wide": "colwise", "model.narrow": "rowwise", "model": "all_reduce"})
    compare_with_plain(plain, split, tags, lambda model: (model(wave(5, 6)) * wave(5, 3, phase=0.3)).sum(), plan=plan)


@worlds
def test_output_of_split_parameters_is_summed(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_all_reduce)


def check_dropout(rank: int, world_size: int) -> tuple[float, Tensor, Tensor]:
    """Dropout between the layers of an MLP falls on split activations, behind it on whole ones."""
    model = build("split")
    mlp = model.get_submodule("blocks.0.mlp")
    layers = dict(mlp.named_children())
    model.get_submodule("blocks.0").mlp = nn.Sequential(
        layers["0"], layers["1"], nn.Dropout(0.5), layers["2"], nn.Dropout(0.5)
    )
    _, _, undo = split_model(model, "auto")
    torch.manual_seed(11)
    masks: list[Tensor] = []
    for name in ("2", "4"):
        dropout = model.get_submodule(f"blocks.0.mlp.{name}")
        dropout.register_forward_hook(lambda module, args, output: masks.append(output == 0))
    language_loss(model).backward()
    after = float(torch.rand(()))
    undo.restore()
    return after, masks[0], masks[1]


def test_dropout_masks(ranks: Ranks) -> None:
    (after, inside, behind), (after_other, inside_other, behind_other) = ranks(2, check_dropout)
    assert after == after_other
    assert torch.equal(behind, behind_other)
    assert not torch.equal(inside, inside_other)


class CheckpointedBlock(Block):
    """Recomputes itself in backward, from inside its own forward."""

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor:
        return checkpoint(super().forward, x, *extra, use_reentrant=False)


def check_recomputed(rank: int, world_size: int, kind: str) -> None:
    plain, split = build(kind), build(kind)
    if kind == "flat":  # the caller recomputes: a flat block's own forward is where views become local
        _, tags, _ = split_model(split, "auto")
        for model in (plain, split):
            for block in model.get_submodule("blocks").children():
                vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
    else:
        for model in (plain, split):
            for block in model.get_submodule("blocks").children():
                block.__class__ = CheckpointedBlock
        _, tags, _ = split_model(split, "auto")
    compare_with_plain(plain, split, tags, language_loss)


@pytest.mark.parametrize("kind", ["view", "chunk", "flat"])
def test_activation_checkpointing(ranks: Ranks, kind: str) -> None:
    ranks(2, check_recomputed, kind)


def check_copy(rank: int, world_size: int) -> None:
    plain, split = build("view"), build("view")
    _, tags, _ = split_model(split, "auto")
    compare_with_plain(plain, copy.deepcopy(split), tags, language_loss)


def test_copies_of_a_split_model_run(ranks: Ranks) -> None:
    ranks(2, check_copy)
