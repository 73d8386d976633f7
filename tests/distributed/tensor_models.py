"""Models as users write them, with weights by formula, and a parallel run compared with the plain one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.parameters import ParameterTag
from lightning_parallel.tensor_parallel.guard import SplitParameterGuard
from lightning_parallel.tensor_parallel.parallelize import Undo, parallelize_module, shard_parameters
from lightning_parallel.tensor_parallel.plan import TensorPlan, resolve_plan
from lightning_parallel.tensor_parallel.shards import write_shard
from tests.distributed.formulas import wave

VOCAB = 37


class ViewAttention(nn.Module):
    """The commonest attention there is: the head size comes from the input's last dimension."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head = heads
        self.n_embd = width
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class SplitAttention(nn.Module):
    """One fused projection split by the width of the input, and head_dim written down."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, self.head_dim).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * self.head_dim**-0.5
        hidden = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class ChunkAttention(nn.Module):
    """Views with -1 that adapt by themselves, and q, k norms that see one head at a time."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.head_dim = width // heads
        self.q_norm = nn.LayerNorm(self.head_dim)
        self.k_norm = nn.LayerNorm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class GroupedAttention(nn.Module):
    """Grouped-query attention with separate projections and rotary-like arguments given by the caller."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.n_heads = heads
        self.n_kv_heads = kv_heads
        self.n_rep = heads // kv_heads
        self.head_dim = width // heads
        self.wq = nn.Linear(width, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_heads, self.head_dim) * turns[None, :, None, :]
        k = self.wk(x).view(B, T, self.n_kv_heads, self.head_dim) * turns[None, :, None, :]
        v = self.wv(x).view(B, T, self.n_kv_heads, self.head_dim)
        k, v = (t.repeat_interleave(self.n_rep, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(B, T, -1))


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, width: int, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = attention
        self.ln2 = nn.LayerNorm(width)
        self.mlp = mlp or nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x), *extra)
        return x + self.mlp(self.ln2(x))


class FlatBlock(nn.Module):
    """Attention, residual and MLP in one module."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.l1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.o = nn.Linear(width, width)
        self.l2 = nn.LayerNorm(width)
        self.m = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.h = heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.h, -1).transpose(1, 2) for t in self.qkv(self.l1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, D))
        return x + self.m(self.l2(x))


class GPT(nn.Module):
    """Token and position embedding, blocks, norm, head; ``rotary`` gives every block a second argument."""

    def __init__(self, block: Callable[[], nn.Module], width: int, tied: bool = False, rotary: int = 0) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, width)
        self.pos = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.rotary = rotary
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        T = ids.shape[1]
        x = self.tok(ids) + self.pos(torch.arange(T, device=ids.device))
        extra = (torch.arange(T * self.rotary, dtype=x.dtype).view(T, self.rotary).cos(),) if self.rotary else ()
        for block in self.blocks:
            x = block(x, *extra)
        return self.head(self.norm(x))


class Holder(nn.Module):
    """A model inside a user's module, so that its names have a prefix."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def build(kind: str) -> nn.Module:
    """A model by name: 8 heads of 4 unless it says otherwise."""
    width, heads = 32, 8
    blocks: dict[str, Callable[[], nn.Module]] = {
        "view": lambda: Block(ViewAttention(width, heads), width),
        "split": lambda: Block(SplitAttention(width, heads), width),
        "chunk": lambda: Block(ChunkAttention(width, heads), width),
        "flat": lambda: FlatBlock(width, heads),
    }
    for kv_heads in (1, 2, 4, 8):
        blocks[f"grouped{kv_heads}"] = partial(_grouped_block, width, heads, kv_heads)
    name, _, option = kind.partition("_")
    model = GPT(blocks[name], width, tied=option == "tied", rotary=4 if name.startswith("grouped") else 0)
    return fill(model)


def _grouped_block(width: int, heads: int, kv_heads: int) -> nn.Module:
    return Block(GroupedAttention(width, heads, kv_heads), width, GatedMLP(width, 48))


def fill(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Weights by formula: none equal to another, of the size that keeps activations ordinary."""
    model = model.to(dtype)
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            values = wave(*parameter.shape, phase=float(place), dtype=dtype)
            if parameter.dim() == 1:
                parameter.copy_(values * 0.1 + (1.0 if place % 2 else 0.0))
            else:
                parameter.copy_(values / parameter.shape[-1] ** 0.5)
    return model


def tokens(batch: int = 2, length: int = 8) -> Tensor:
    """Token numbers by formula."""
    return (torch.arange(batch * length) * 17 % VOCAB).view(batch, length)


def language_loss(model: nn.Module) -> Tensor:
    """Next-token cross entropy of :func:`tokens`."""
    ids = tokens()
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def split_model(
    model: nn.Module, plan: str | Mapping[str, str], *, sequence_parallel: bool = False, blocks: tuple[str, ...] = ()
) -> tuple[TensorPlan, dict[str, ParameterTag], Undo]:
    """Resolve, convert and shard over the default group."""
    group = dist.group.WORLD
    size, rank = dist.get_world_size(), dist.get_rank()
    resolved = resolve_plan(model, plan, size, sequence_parallel=sequence_parallel, blocks=blocks)
    tags = resolved.tags(model)
    undo = parallelize_module(model, resolved, group)
    shard_parameters(model, tags, rank)
    return resolved, tags, undo


def full_gradients(model: nn.Module, tags: Mapping[str, ParameterTag]) -> dict[str, Tensor | None]:
    """Every parameter's gradient in the plain model, from what the ranks hold, by the tags alone."""
    rank = dist.get_rank()
    found: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        tag, gradient = tags[name], parameter.grad
        if gradient is None:
            found[name] = None
        elif tag.shard is not None:
            full = gradient.new_zeros(tag.shape)
            write_shard(full, gradient, tag.shard, rank)
            dist.all_reduce(full)  # a repeated segment is the sum over its holders
            found[name] = full
        elif tag.partial_gradient:
            full = gradient.clone()
            dist.all_reduce(full)
            found[name] = full
        else:
            found[name] = gradient
    return found


def compare_with_plain(
    plain: nn.Module,
    split: nn.Module,
    tags: Mapping[str, ParameterTag],
    loss: Callable[[nn.Module], Tensor],
    tolerance: float = 1e-10,
    plan: TensorPlan | None = None,
) -> None:
    """Loss and every gradient of the split model equal the plain one's; given a plan, under its guard."""
    expected = loss(plain)
    expected.backward()
    names = {id(p): n for n, p in split.named_parameters() if tags[n].shard is not None or tags[n].partial_gradient}
    size = dist.get_world_size()
    with nullcontext() if plan is None else SplitParameterGuard(split, plan, names, size).watching("the step"):
        found = loss(split)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    gradients = full_gradients(split, tags)
    for name, parameter in plain.named_parameters():
        actual = gradients[name]
        if parameter.grad is None:
            assert actual is None or not actual.any(), f"{name} has a gradient only when split"
            continue
        assert actual is not None, f"{name} has no gradient when split"
        scale = max(1.0, float(parameter.grad.abs().max()))
        error = float((actual - parameter.grad).abs().max())
        assert error <= tolerance * scale, f"gradient of {name} is off by {error:.2e}"
