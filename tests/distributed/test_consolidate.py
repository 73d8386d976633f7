"""Whole tensors from shards and stages, and shards from whole tensors: equal to the plain model, bit for bit."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.checkpoint.consolidate import ModelShards
from lightning_parallel.checkpoint.optimizer_states import (
    full_optimizer_state,
    local_optimizer_state,
    outline_optimizer_state,
    split_optimizer_state,
)
from lightning_parallel.layout import ParallelLayout
from lightning_parallel.mesh import build_mesh
from lightning_parallel.parameters import ParameterTag
from lightning_parallel.pipeline.cut import StageCut
from lightning_parallel.pipeline.trace import CutPlan
from lightning_parallel.tensor_parallel import sharding
from lightning_parallel.tensor_parallel.parallelize import shard_parameters
from lightning_parallel.tensor_parallel.shards import all_gather_full, shard_tensor
from tests.distributed.formulas import wave
from tests.harness import Ranks

Sizes = tuple[int, int, int]
"""(tensor, pipeline, data)"""

LAYOUTS: list[Sizes] = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 3, 1), (2, 1, 2), (1, 2, 2)]
layouts = pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
WIDTH, WORDS, PIECES = 8, 10, 4


class Piece(nn.Module):
    """One of every kind of shard, running statistics, and a state that is not a tensor."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 16)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 16, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.number = number

    def get_extra_state(self) -> Any:
        return {"number": self.number, "tensor": torch.tensor([self.number])}

    def set_extra_state(self, state: Any) -> None:
        self.number = state["number"]


class Tower(nn.Module):
    """Tied embedding, pieces, and parameters and buffers that lie on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(WORDS, WIDTH)
        self.pieces = nn.ModuleList(Piece(i) for i in range(PIECES))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.tok.weight
        self.scale = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def filled(phase: float = 0.0) -> Tower:
    tower = Tower()
    for place, tensor in enumerate([*tower.parameters(), *tower.buffers()]):
        tensor.data = wave(*tensor.shape, phase=place + phase, scale=9).to(tensor.dtype)
    return tower


def shard_of(name: str, ranks: int) -> sharding.ShardSpec | None:
    if ranks == 1:
        return None
    if name in ("tok.weight", "head.bias"):
        return sharding.split_vocab(WORDS, ranks, 12)
    if ".qkv." in name:
        return sharding.split_qkv(0, 4, 2, 2, ranks)
    if ".gate." in name:
        return sharding.split_packed(0, 16, 2, ranks)
    return sharding.split_even(1, WIDTH, ranks) if name.endswith("out.weight") else None


class Part:
    """The part of a tower on this rank."""

    def __init__(self, sizes: Sizes, phase: float = 0.0, kind: type[ModelShards] = ModelShards) -> None:
        tensor, pipeline, data = sizes
        self.mesh = build_mesh(ParallelLayout(pipeline, data, tensor), torch.device("cpu"))
        self.tower = filled(phase)
        names = {id(p): n for n, p in self.tower.named_parameters()}
        keys = {key: names[id(p)] for key, p in self.tower.named_parameters(remove_duplicate=False)}
        plan = _plan(self.tower, pipeline) if pipeline > 1 else None
        tags = {
            n: ParameterTag(n, tuple(p.shape), shard_of(n, tensor), stages=plan.owners[n] if plan else (0,))
            for n, p in self.tower.named_parameters()
        }
        self.shards = kind(self.tower, tags, keys, self.mesh, plan, all_gather_full, shard_tensor)
        self.names, self.plan = names, plan

    def split(self, *optimizers: torch.optim.Optimizer) -> Part:
        stage, plan = self.mesh.stage, self.plan
        owned = {n for n, p in self.tower.named_parameters() if self.shards.holds(n)}
        shard_parameters(
            self.tower,
            self.shards.tags,
            self.mesh.tensor_rank,
            keep=lambda module: any(n.rpartition(".")[0] == module for n in owned) or module == "head",
        )
        if plan is not None:
            cut = StageCut(self.tower, plan, stage, self.mesh.device)
            cut.apply()
            cut.free_foreign()
            self.names |= {id(stand_in): self.names[original] for original, stand_in in cut.stand_ins.items()}
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["params"] = [cut.stand_ins.get(id(p), p) for p in group["params"]]
            for index, piece in enumerate(self.tower.pieces):  # what runs elsewhere is stale here
                if plan.stage_of_block(index) != stage:
                    piece.get_buffer("norm.running_mean").fill_(-1.0)
                    piece.set_extra_state({"number": -1})
        for optimizer in optimizers:
            split_optimizer_state(self.shards, optimizer, self.names)
        return self


def _plan(tower: Tower, stages: int) -> CutPlan:
    step = -(-PIECES // stages)
    bounds = tuple((min(s * step, PIECES), min((s + 1) * step, PIECES)) for s in range(stages))
    last = stages - 1
    owners: dict[str, tuple[int, ...]] = {}
    for name, _ in tower.named_parameters():
        if name.startswith("pieces."):
            owners[name] = (int(name.split(".")[1]) // step,)
        else:
            owners[name] = (0, last) if name == "tok.weight" else (last,)
    return CutPlan(tuple(f"pieces.{i}" for i in range(PIECES)), bounds, owners)


def assert_plain(found: Any, plain: Any, whole: bool) -> None:
    """Same keys in the same order, same types, shapes and, where `whole`, values."""
    if isinstance(plain, dict):
        assert type(found) is type(plain)
        assert list(found) == list(plain)
        for key in plain:
            assert_plain(found[key], plain[key], whole or not isinstance(plain[key], torch.Tensor) or "_extra" in key)
    elif isinstance(plain, torch.Tensor):
        assert (found.shape, found.dtype, found.requires_grad) == (plain.shape, plain.dtype, False)
        assert found.is_meta != whole
        assert not whole or torch.equal(found, plain)
    elif isinstance(plain, (list, tuple)):
        for one, other in zip(found, plain, strict=True):
            assert_plain(one, other, whole)
    else:
        assert found == plain


# ------------------------------------------------------------------------------------------------ models
def state_of_a_part(rank: int, world_size: int, sizes: Sizes) -> None:
    part, plain = Part(sizes).split(), filled().state_dict()
    held = {n: p for n, p in part.tower.named_parameters() if part.shards.holds(n)}
    before = {name: (p, p.data_ptr()) for name, p in held.items()}
    if part.mesh.data_rank == 0:
        state = part.shards.full_state_dict(keep=rank == 0)
        parameters, buffers = part.shards.full_parameters(), part.shards.full_buffers()
        assert all(torch.equal(parameters[name], plain[name]) for name in part.shards.tags)
        assert all(torch.equal(value, plain[name]) for name, value in buffers.items() if name != "scratch")
        assert torch.equal(buffers["scratch"], filled().get_buffer("scratch"))
    else:
        state = part.shards.outline()
    if part.mesh.data_rank != 0:  # what modules return by themselves is as this rank has it
        plain.update({key: state[key] for key in plain if key.endswith("_extra_state")})
    assert_plain(state, plain, whole=rank == 0)
    assert state._metadata == plain._metadata  # type: ignore[attr-defined]
    if rank == 0:
        assert state["head.weight"].data_ptr() == state["tok.weight"].data_ptr()
        assert sum(value.untyped_storage().nbytes() for value in _distinct(state)) == sum(
            value.untyped_storage().nbytes() for value in _distinct(plain)
        )
    for name, now in part.tower.named_parameters():
        assert name not in held or (now, now.data_ptr()) == before[name]
    assert part.tower.head.weight is part.tower.tok.weight
    assert all("get_extra_state" not in vars(module) for module in part.tower.modules())


def _distinct(state: dict[str, Any]) -> list[torch.Tensor]:
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return list({value.data_ptr(): value for value in tensors}.values())


@layouts
def test_the_state_is_that_of_the_plain_model(ranks: Ranks, sizes: Sizes) -> None:
    ranks(math.prod(sizes), state_of_a_part, sizes)


class Watched(ModelShards):
    """Notes how many of the whole tensors that were gathered so far are alive."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def gather(self, name: str, local: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        full = super().gather(name, local, dtype)
        self.alive.append(sum(one() is not None for one in self.seen))
        if local is None or full.data_ptr() != local.data_ptr():
            self.seen.append(weakref.ref(full))
        return full


def memory_while_saving(rank: int, world_size: int, sizes: Sizes) -> int:
    part = Part(sizes, kind=Watched).split()
    optimizer = torch.optim.SGD(part.tower.parameters(), lr=0.1, momentum=0.9)
    for parameter in part.tower.parameters():
        if part.shards.holds(part.names[id(parameter)]):
            optimizer.state[parameter]["momentum_buffer"] = parameter.data.clone()
    assert isinstance(part.shards, Watched)
    kept: list[Any] = [part.shards.full_state_dict(keep=rank == 0)]
    kept.append(full_optimizer_state(part.shards, optimizer, part.names, keep=rank == 0))
    return max(part.shards.alive)


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1)], ids=str)
def test_only_the_first_rank_holds_more_than_one_whole_tensor(ranks: Ranks, sizes: Sizes) -> None:
    alive, alive_elsewhere = ranks(2, memory_while_saving, sizes)
    assert alive > 10
    assert alive_elsewhere <= 1


def load_into_a_part(rank: int, world_size: int, sizes: Sizes) -> None:
    part, other = Part(sizes).split(), filled(phase=0.5)
    part.shards.load_full_state_dict(other.state_dict(), strict=True)
    for name, parameter in part.tower.named_parameters():
        if part.shards.holds(name):
            assert torch.equal(parameter.data, part.shards.slice(name, other.get_parameter(name).data))
    name = "pieces.0.norm.running_mean"
    assert torch.equal(part.tower.get_buffer(name), other.get_buffer(name))

    renamed = dict(other.state_dict())
    renamed["pieces.9.out.bias"] = renamed.pop("pieces.1.out.bias")
    with pytest.raises(RuntimeError, match=r"1 missing \(pieces.1.out.bias\), 1 unexpected \(pieces.9.out.bias\)"):
        part.shards.load_full_state_dict(renamed, strict=True)
    part.shards.load_full_state_dict(renamed, strict=False)
    renamed["tok.weight"] = torch.zeros(WORDS + 1, WIDTH)
    with pytest.raises(RuntimeError, match=r"tok.weight: the checkpoint has shape \(11, 8\), the model \(10, 8\)"):
        part.shards.load_full_state_dict(renamed, strict=False)


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 2, 1)], ids=str)
def test_a_plain_state_goes_into_the_parts(ranks: Ranks, sizes: Sizes) -> None:
    ranks(math.prod(sizes), load_into_a_part, sizes)


def copies_of_a_part(rank: int, world_size: int, sizes: Sizes) -> None:
    part, plain = Part(sizes).split(), filled().state_dict()
    undo = part.shards.show_whole()
    holder = nn.Module()
    holder.inner = part.tower
    holder.own = nn.Parameter(torch.ones(2))
    state = holder.state_dict()
    assert torch.equal(state["own"], torch.ones(2))
    for key, value in plain.items():
        if isinstance(value, torch.Tensor):
            assert_plain(state[f"inner.{key}"], value, whole=rank == 0)
    undo()
    for name, parameter in part.tower.named_parameters():
        assert part.tower.state_dict()[name].shape == parameter.shape


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 2)], ids=str)
def test_a_copy_that_a_callback_keeps_shows_whole_tensors(ranks: Ranks, sizes: Sizes) -> None:
    ranks(math.prod(sizes), copies_of_a_part, sizes)


# ------------------------------------------------------------------------------------------------ optimizers
Build = Callable[[Any], torch.optim.Optimizer]


def groups(tower: Tower, extra: nn.Parameter) -> list[dict[str, Any]]:
    trained = [p for p in tower.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1] + [tower.frozen], "lr": 0.5},
        {"params": [extra]},
    ]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def step(optimizer: torch.optim.Optimizer, gradient: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = gradient(parameter)
    optimizer.step()


def states_of_a_part(rank: int, world_size: int, sizes: Sizes, build: Build) -> None:
    whole, extra = filled(), nn.Parameter(torch.ones(3))
    plain = build(groups(whole, extra))
    part, own_extra = Part(sizes), nn.Parameter(torch.ones(3))
    optimizer = build(groups(part.tower, own_extra))
    part.split(optimizer)
    names = {id(p): n for n, p in whole.named_parameters()}

    def full(name: str | None) -> torch.Tensor | None:
        if name == "pieces.2.out.bias" or name == "frozen":
            return None  # never used: no state
        return torch.full((3,), 0.5) if name is None else wave(*whole.get_parameter(name).shape, phase=3.0).float()

    def local(parameter: torch.Tensor) -> torch.Tensor | None:
        name = part.names.get(id(parameter))
        gradient = full(name)
        if gradient is None or name is None:
            return gradient
        return part.shards.slice(name, gradient).clone() if part.shards.holds(name) else None

    for _ in range(2):
        step(plain, lambda p: full(names.get(id(p))))
        step(optimizer, local)
    if part.mesh.data_rank == 0:
        state = full_optimizer_state(part.shards, optimizer, part.names, keep=rank == 0)
    else:
        state = outline_optimizer_state(optimizer)
    expected = plain.state_dict()
    assert_plain(state, expected if rank == 0 else {**expected, "state": {}}, whole=rank == 0)

    fresh = Part(sizes)
    again = build(groups(fresh.tower, own_extra))
    fresh.split(again)
    again.load_state_dict(local_optimizer_state(fresh.shards, again, fresh.names, expected))
    assert again.state_dict()["param_groups"] == expected["param_groups"]
    for loaded, trained in zip(again.param_groups, optimizer.param_groups, strict=True):
        for one, other in zip(loaded["params"], trained["params"], strict=True):
            assert_plain(dict(again.state.get(one, {})), dict(optimizer.state.get(other, {})), whole=True)


@pytest.mark.parametrize("build", [adamw, adagrad, momentum])
@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 2, 1), (1, 3, 1), (1, 2, 2)], ids=str)
def test_optimizer_states_are_those_of_the_plain_run(ranks: Ranks, sizes: Sizes, build: Build) -> None:
    ranks(math.prod(sizes), states_of_a_part, sizes, build)


def factored_states(rank: int, world_size: int) -> None:
    part = Part((2, 1, 1)).split()
    optimizer = torch.optim.Adafactor(part.tower.pieces.parameters(), lr=0.1)
    step(optimizer, torch.ones_like)
    with pytest.raises(ValueError, match=r"Adafactor keeps a state 'row_var' of shape .* for pieces.0.qkv.weight"):
        full_optimizer_state(part.shards, optimizer, part.names)
    plain = torch.optim.Adafactor(filled().pieces.parameters(), lr=0.1)
    step(plain, torch.ones_like)
    with pytest.raises(ValueError, match=r"'row_var' of shape .* of pieces.0.qkv.weight, .* cannot be split"):
        local_optimizer_state(part.shards, optimizer, part.names, plain.state_dict())


def test_states_that_do_not_split_like_their_parameter_are_refused(ranks: Ranks) -> None:
    ranks(2, factored_states)
