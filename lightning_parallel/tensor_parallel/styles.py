"""Mechanism: the styles a plan may name, the modules each fits, and the slices it asks for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_parallel.tensor_parallel.rules import ModuleRule, is_conv1d
from lightning_parallel.tensor_parallel.sharding import (
    ShardSpec,
    split_even,
    split_heads,
    split_kv_heads,
    split_packed,
    split_qkv,
    split_uneven,
    split_vocab,
)

__all__ = [
    "COLUMN_STYLES",
    "ROW_STYLES",
    "Heads",
    "Unit",
    "canonical_style",
    "check_type",
    "make_rule",
    "parameter_spec",
]

# Columns whose output stays split, so that a row layer must follow.
COLUMN_STYLES = frozenset({"colwise", "colwise_qkv", "colwise_gate_up"})
ROW_STYLES = frozenset({"rowwise"})

_STYLES = (
    "colwise",
    "rowwise",
    "colwise_gather",
    "rowwise_split",
    "colwise_qkv",
    "colwise_gate_up",
    "rowwise_gate_up",
    "vocab",
    "replicate",
    "grad_sum",
    "attention",
    "experts",
    "mla_kv",
    "all_reduce",
    "local",
)

# Names that transformers gives to the same things.
_ALIASES = (
    ("colwise_rep", "colwise_gather"),
    ("colwise_gather_output", "colwise_gather"),
    ("rowwise_rep", "rowwise_split"),
    ("rowwise_split_input", "rowwise_split"),
    ("packed_colwise", "colwise_gate_up"),
    ("packed_rowwise", "rowwise_gate_up"),
    ("embedding_rowwise", "vocab"),
    ("replicated_with_grad_allreduce", "grad_sum"),
    ("local_params", "replicate"),
    ("moe_tp_experts", "experts"),
    ("mla_kv_a_proj", "mla_kv"),
)

_KEY_VALUE_NAMES = frozenset({"k", "v", "k_proj", "v_proj", "key", "value", "wk", "wv", "to_k", "to_v", "kv_proj"})


@dataclass(frozen=True)
class Heads:
    """Attention heads of one attention module: query heads, key/value heads and the size of one head."""

    query: int
    key_value: int
    head_dim: int

    def local_query(self, ranks: int) -> int:
        """Query heads of one tensor rank."""
        return self.query // ranks

    def local_key_value(self, ranks: int) -> int:
        """Key/value heads of one tensor rank; with fewer heads than ranks, one that neighbours hold too."""
        return max(1, self.key_value // ranks)


@dataclass(frozen=True)
class Unit:
    """What a slice must not cut through: the heads around a layer, and the number of tensor ranks."""

    ranks: int
    heads: Heads | None = None


def canonical_style(style: str, pattern: str) -> str:
    """Our name of a style, from our own or from transformers' vocabulary.

    Raises:
        ValueError: an unknown style; the text lists those that exist.
    """
    style = dict(_ALIASES).get(style, style)
    if style not in _STYLES:
        raise ValueError(f"plan style {style!r} of {pattern!r} is not known; use one of {', '.join(_STYLES)}")
    return style


def make_rule(name: str, module: nn.Module, style: str, unit: Unit) -> ModuleRule:
    """The rule for one module, whose class fits the style.

    Raises:
        ValueError: its size or heads do not split over the ranks.
    """
    try:
        shards = _shards(name.rpartition(".")[2], module, style, unit)
    except ValueError as error:
        raise ValueError(f"{name} ({style}): {error}") from error
    return ModuleRule(name, style, shards, partial=style == "grad_sum")


def parameter_spec(name: str, parameter: nn.Parameter, style: str, ranks: int) -> ShardSpec | None:
    """How a bare parameter named by a plan is split (stacked expert weights, attention sinks).

    Raises:
        ValueError: the style splits no bare parameter, or the size does not fit.
    """
    dims = parameter.dim()
    try:
        if style == "replicate":
            return None
        if style == "vocab":
            return split_vocab(parameter.shape[0], ranks)
        if style == "colwise":
            return split_even(max(dims - 2, 0), parameter.shape[max(dims - 2, 0)], ranks)
        if style == "colwise_gate_up":
            return split_packed(max(dims - 2, 0), parameter.shape[max(dims - 2, 0)], 2, ranks)
        if style == "rowwise_gate_up":
            return split_packed(dims - 1, parameter.shape[dims - 1], 2, ranks) if dims > 1 else None
        if style == "rowwise":
            return split_even(dims - 1, parameter.shape[dims - 1], ranks) if dims > 1 else None
    except ValueError as error:
        raise ValueError(f"{name} ({style}): {error}") from error
    raise ValueError(
        f"plan style {style!r} does not fit the parameter {name!r}; use colwise, rowwise, vocab or replicate"
    )


def _is_computed(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding)) and module._parameters.get("weight") is None


def check_type(name: str, module: nn.Module, style: str) -> None:
    """Check that a style fits the class of a module.

    Raises:
        ValueError: it does not; the text names both.
    """
    kind = type(module).__name__
    if style not in {"replicate", "grad_sum"} and _is_computed(module):
        raise ValueError(
            f"the weight of {name} is computed from other parameters (a parametrization such as weight_norm), which "
            f"have no split; leave {name} out of the plan, with the layer that it is paired with, or remove the "
            "parametrization"
        )
    if style in {"colwise", "rowwise", "colwise_gather", "rowwise_split", "colwise_qkv", "colwise_gate_up"}:
        fits, wanted = isinstance(module, nn.Linear) or is_conv1d(module), "a Linear"
    elif style == "vocab":
        fits, wanted = isinstance(module, nn.Embedding), "an Embedding"
    elif style == "attention":
        fits, wanted = isinstance(module, nn.MultiheadAttention), "an nn.MultiheadAttention"
    elif style == "rowwise_gate_up":
        fits, wanted = False, "a bare parameter of stacked experts"
    elif style == "local":
        fits, wanted = False, "an integer attribute (write the module's name, a dot and the attribute's name)"
    else:
        fits, wanted = True, ""
    if not fits:
        raise ValueError(f"plan style {style!r} of {name!r} needs {wanted}, but it is a {kind}")


def _shards(leaf: str, module: nn.Module, style: str, unit: Unit) -> tuple[tuple[str, ShardSpec], ...]:
    if style == "vocab":
        assert isinstance(module, nn.Embedding), "checked before"
        return (("weight", split_vocab(module.num_embeddings, unit.ranks)),)
    if style == "attention":
        assert isinstance(module, nn.MultiheadAttention), "checked before"
        return _attention_shards(module, unit.ranks)
    if style not in {"colwise", "rowwise", "colwise_gather", "rowwise_split", "colwise_qkv", "colwise_gate_up"}:
        return ()
    weight = module.weight
    assert isinstance(weight, nn.Parameter), "a Linear has a weight"
    output_dim = 1 if is_conv1d(module) else 0
    if style in {"rowwise", "rowwise_split"}:
        size = weight.shape[1 - output_dim]
        return (("weight", _row_spec(1 - output_dim, size, unit)),)
    size = weight.shape[output_dim]
    shards = [("weight", _column_spec(leaf, output_dim, size, style, unit))]
    if getattr(module, "bias", None) is not None:
        shards.append(("bias", _column_spec(leaf, 0, size, style, unit)))
    return tuple(shards)


def _row_spec(dim: int, size: int, unit: Unit) -> ShardSpec:
    heads = unit.heads
    if heads is not None and size % heads.query == 0:
        return split_heads(dim, heads.query, size // heads.query, unit.ranks)
    return split_even(dim, size, unit.ranks, what="input size")


def _column_spec(leaf: str, dim: int, size: int, style: str, unit: Unit) -> ShardSpec:
    heads, ranks = unit.heads, unit.ranks
    if style == "colwise_gather":
        # Nothing computes on the slices, so that any cut is right; a head is usually the size of a vocabulary.
        return split_uneven(dim, size, ranks)
    if style == "colwise_gate_up":
        return split_packed(dim, size, 2, ranks)
    if style == "colwise_qkv":
        if heads is None:
            return split_packed(dim, size, 3, ranks)
        rows = heads.query + 2 * heads.key_value
        if size % rows:
            raise ValueError(
                f"output size {size} is not made of {heads.query} query, {heads.key_value} key and "
                f"{heads.key_value} value heads; use 'colwise' or give {rows * heads.head_dim} outputs"
            )
        return split_qkv(dim, heads.query, heads.key_value, size // rows, ranks)
    if heads is not None:
        if _reads_key_value(leaf, size, heads) and size % heads.key_value == 0:
            return split_kv_heads(dim, heads.key_value, size // heads.key_value, ranks)
        if size % heads.query == 0:
            return split_heads(dim, heads.query, size // heads.query, ranks)
    return split_even(dim, size, ranks, what="output size")


def _reads_key_value(leaf: str, size: int, heads: Heads) -> bool:
    return leaf in _KEY_VALUE_NAMES or (
        heads.key_value != heads.query and size == heads.key_value * heads.head_dim != heads.query * heads.head_dim
    )


def _attention_shards(module: nn.MultiheadAttention, ranks: int) -> tuple[tuple[str, ShardSpec], ...]:
    """Own parameters of an nn.MultiheadAttention and the weight of its output layer, by head."""
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("add_bias_kv and add_zero_attn add a key that belongs to no head; use False for both")
    heads, head_dim = module.num_heads, module.head_dim
    shards: list[tuple[str, ShardSpec]] = []
    if module.in_proj_weight is not None:
        shards.append(("in_proj_weight", split_qkv(0, heads, heads, head_dim, ranks)))
    else:
        one = split_heads(0, heads, head_dim, ranks)
        shards += [("q_proj_weight", one), ("k_proj_weight", one), ("v_proj_weight", one)]
    if module.in_proj_bias is not None:
        shards.append(("in_proj_bias", split_qkv(0, heads, heads, head_dim, ranks)))
    return tuple(shards)


def attention_output_rule(name: str, module: nn.MultiheadAttention, ranks: int) -> ModuleRule:
    """The rule for ``out_proj`` of an nn.MultiheadAttention: rows by head. Its parent calls it, so it has no pair."""
    spec = split_heads(1, module.num_heads, module.head_dim, ranks)
    return ModuleRule(f"{name}.out_proj", "attention_output", (("weight", spec),))
