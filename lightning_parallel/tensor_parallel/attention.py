"""Mechanism: nn.MultiheadAttention split by head, and what torch's transformer layers need around it.

The module is converted in place: its class becomes a subclass whose forward computes this rank's heads with this rank's
rows of the projections and sums the output projection over the group (Shoeybi et al. 2019, figure 3b). torch's fused
inference kernels read the weights directly and would see shards, so they are switched off while parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.tensor_parallel import mappings
from lightning_parallel.tensor_parallel.layers import derive_class
from lightning_parallel.tensor_parallel.linear import column_linears, row_linear
from lightning_parallel.tensor_parallel.random import RegionState
from lightning_parallel.weight_gradients import STORE

__all__ = ["AttentionState", "convert_attention", "disable_fused_kernels"]

_STATE = "_attention_state"


@dataclass(frozen=True, eq=False)
class AttentionState:
    """What a split attention module knows besides its parameters.

    ``sequence_dim`` is None without sequence parallelism; otherwise the query holds this rank's tokens along it.
    """

    group: ProcessGroup
    region: RegionState | None = None
    sequence_dim: int | None = None

    @property
    def rank(self) -> int:
        """Index of this process in the tensor group."""
        return comm.group_rank(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionState:
        return self

    def __reduce__(self) -> Any:
        raise ValueError("an nn.MultiheadAttention that is split over ranks cannot be pickled; restore it first")


def convert_attention(module: nn.MultiheadAttention, state: AttentionState) -> Callable[[], None]:
    """Make an nn.MultiheadAttention compute its share of the heads; returns what undoes it.

    The data of ``in_proj_weight`` and ``in_proj_bias`` (or of the separate projections) and of ``out_proj.weight`` are
    sliced by head by the caller; ``out_proj.bias`` stays whole.

    Raises:
        ValueError: the heads do not split over the group, or the module was already converted.
    """
    ranks = comm.group_size(state.group)
    if _STATE in vars(module):
        raise ValueError("this nn.MultiheadAttention is already split")
    if module.num_heads % ranks:
        raise ValueError(f"{module.num_heads} attention heads do not split over tensor_parallel_size={ranks}")
    original: Any = type(module)
    vars(module)[_STATE] = state
    module.__class__ = derive_class(original, _SplitAttention)  # type: ignore[assignment]

    def undo() -> None:
        module.__class__ = original
        del vars(module)[_STATE]

    return undo


def disable_fused_kernels(model: nn.Module, names: set[str]) -> Callable[[], None]:
    """Keep torch's encoder layers from their fused inference kernel when a layer in ``names`` lies in them."""
    changed: list[tuple[nn.Module, str, Any]] = []
    for name, module in model.named_modules():
        if not any(inner.startswith(f"{name}.") or not name for inner in names):
            continue
        for kind, attribute, off in (
            (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
            (nn.TransformerEncoder, "use_nested_tensor", False),
        ):
            if isinstance(module, kind) and hasattr(module, attribute):
                changed.append((module, attribute, getattr(module, attribute)))
                setattr(module, attribute, off)

    def undo() -> None:
        for module, attribute, value in changed:
            setattr(module, attribute, value)

    return undo


class _SplitAttention(nn.Module):
    """Forward of an attention module that holds some of the heads."""

    prefix = "Split"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As nn.MultiheadAttention: query (N, L, E) or (L, N, E) or (L, E), masks with True or -inf at hidden keys."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask: give attn_mask too")
        state: AttentionState = getattr(self, _STATE)
        own: Any = self
        query, key, value = _whole_sequences(query, key, value, state)
        batched = query.dim() == 3
        q, k, v = (_batch_first(x, own, batched) for x in _project(own, query, key, value, state))
        is_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if is_causal else _merge_masks(own, state, q, k, key_padding_mask, attn_mask)
        if self.training and state.region is not None:
            state.region.enter_sharded_region(state.rank, q.device)
        dropout = own.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            y, weights = _explicit(q, k, v, mask, dropout)
            weights = _all_heads(weights, own.num_heads, average_attn_weights, state)
            weights = weights if batched else weights.squeeze(0)
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        if state.region is not None:
            state.region.leave_sharded_region(q.device)
        y = y.transpose(1, 2).flatten(2)  # (N, L, local heads * head_dim)
        y = (y if own.batch_first else y.transpose(0, 1)) if batched else y.squeeze(0)
        out = own.out_proj
        store = self.__dict__.get(STORE)
        return row_linear(y, state.group, out.weight, out.bias, state.sequence_dim, store=store), weights


def _whole_sequences(query: Tensor, key: Tensor, value: Tensor, state: AttentionState) -> tuple[Tensor, Tensor, Tensor]:
    """Under sequence parallelism, all tokens of what is the query; other inputs are whole already."""
    if state.sequence_dim is None:
        return query, key, value
    whole = mappings.gather_sequence(query, state.group, state.sequence_dim)
    return whole, whole if key is query else key, whole if value is query else value


def _project(
    module: Any, query: Tensor, key: Tensor, value: Tensor, state: AttentionState
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's heads of query, key and value; inputs that are one tensor are projected together."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)

    def linears(x: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
        pairs = list(zip(weights, biases, strict=True))[first:last]
        if state.sequence_dim is not None:  # the gather, or whoever gave the input, sums the gradient
            return tuple(F.linear(x, weight, bias) for weight, bias in pairs)
        parameters = [parameter for pair in pairs for parameter in pair]
        return column_linears(x, state.group, *parameters, store=module.__dict__.get(STORE))

    if query is key and key is value:
        if module.in_proj_weight is not None and state.sequence_dim is None:
            store = module.__dict__.get(STORE)
            (packed,) = column_linears(query, state.group, module.in_proj_weight, module.in_proj_bias, store=store)
            q, k, v = packed.chunk(3, -1)
            return q, k, v
        q, k, v = linears(query, 0, 3)
        return q, k, v
    (q,) = linears(query, 0, 1)
    if key is value:
        k, v = linears(key, 1, 3)
        return q, k, v
    return q, linears(key, 1, 2)[0], linears(value, 2, 3)[0]


def _batch_first(x: Tensor, module: Any, batched: bool) -> Tensor:
    """(N, local heads, length, head_dim) from what a projection returns."""
    x = (x if module.batch_first else x.transpose(0, 1)) if batched else x.unsqueeze(0)
    return x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2)


def _merge_masks(
    module: Any, state: AttentionState, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """One additive mask that broadcasts to (N, local heads, L, S)."""
    batch, heads = q.shape[:2]
    merged: Tensor | None = None
    if mask is not None:
        merged = _additive(mask, q.dtype, "attn_mask")
        if merged.dim() == 3:
            if merged.shape[0] != batch * module.num_heads:
                raise ValueError(
                    f"a 3D attn_mask has one mask per sample and head: expected {batch * module.num_heads} masks for "
                    f"{batch} samples and {module.num_heads} heads, got {merged.shape[0]}"
                )
            merged = merged.unflatten(0, (batch, module.num_heads)).narrow(1, state.rank * heads, heads)
    if padding is not None:
        hidden = _additive(padding, q.dtype, "key_padding_mask").reshape(batch, 1, 1, k.shape[2])
        merged = hidden if merged is None else merged + hidden
    return merged


def _additive(mask: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    if not mask.is_floating_point():
        raise ValueError(f"{name} must be of a boolean or floating dtype, got {mask.dtype}")
    return mask


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """Attention with its weights (N, local heads, L, S)."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = F.dropout(weights, dropout) if dropout > 0.0 else weights
    return weights @ v, weights


def _all_heads(weights: Tensor, heads: int, average: bool, state: AttentionState) -> Tensor:
    """Weights of every head, or their mean, equal on every rank."""
    if average:
        return mappings.reduce_from_group(weights.sum(1) / heads, state.group)
    return mappings.gather_from_group(weights, state.group, 1)
