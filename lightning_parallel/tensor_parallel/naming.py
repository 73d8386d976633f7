"""Mechanism: find attention and MLP pairs in user-written models by the names that are in common use.

Names only suggest: whether a split computes the same is decided by rehearsal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_parallel.tensor_parallel.rules import is_conv1d

__all__ = ["Pair", "find_pairs", "find_vocabulary"]

_SPLIT_QKV = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
    ("w_q", "w_k", "w_v"),
    ("W_q", "W_k", "W_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("queries", "keys", "values"),
)
_SPLIT_Q_KV = (("to_q", "to_kv"), ("q", "kv"), ("q_proj", "kv_proj"))
_FUSED_QKV = ("qkv", "c_attn", "in_proj", "qkv_proj", "to_qkv", "query_key_value", "Wqkv", "attn_qkv", "attn")
_OUT = (
    "out_proj",
    "o_proj",
    "proj",
    "wo",
    "dense",
    "to_out",
    "o",
    "c_proj",
    "out",
    "fc_out",
    "out_lin",
    "W_o",
    "w_o",
    "Wo",
)
_MLP = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate", "up"), "down"),
    (("wi_0", "wi_1"), "wo"),
    (("w1", "w3"), "w2"),
    (("w1", "w2"), "w3"),
    (("w1",), "w2"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("c_fc",), "c_proj"),
    (("fc",), "proj"),
    (("fc",), "c_proj"),
    (("linear1",), "linear2"),
    (("lin1",), "lin2"),
    (("dense1",), "dense2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("up_proj",), "down_proj"),
    (("up",), "down"),
    (("wi",), "wo"),
    (("fc_1",), "fc_2"),
    (("layer1",), "layer2"),
    (("ffn",), "ffn_output"),
)
_FUSED_MLP = (("gate_up_proj", "down_proj"), ("w12", "w3"), ("gate_up", "down"), ("Wi", "Wo"))
_TOKEN_NAMES = ("tok", "wte", "word", "vocab", "embed_in")


@dataclass(frozen=True)
class Pair:
    """Layers that look like columns with their row.

    ``alternatives`` are further styles for the columns, tried in turn when the first does not compute the same.
    ``named`` is False for a pair found by its place in a Sequential alone.
    """

    columns: tuple[tuple[str, str], ...]
    row: str
    alternatives: tuple[str, ...] = ()
    named: bool = True

    @property
    def layers(self) -> tuple[str, ...]:
        """All names."""
        return (*(name for name, _ in self.columns), self.row)


@dataclass
class _Finder:
    model: nn.Module
    taken: set[str]
    pairs: list[Pair] = field(default_factory=list)

    def add(self, pair: Pair) -> bool:
        if self.taken.intersection(pair.layers):
            return False
        self.taken.update(pair.layers)
        self.pairs.append(pair)
        return True


def find_pairs(model: nn.Module, taken: set[str]) -> tuple[Pair, ...]:
    """Attention pairs, MLP pairs by name, and Sequentials of two Linears; names in ``taken`` are left out."""
    finder = _Finder(model, set(taken))
    modules = dict(model.named_modules())
    of_torch = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    parents = {name: m for name, m in modules.items() if m._modules and not isinstance(m, of_torch)}
    for find in (_attention, _mlp, _sequential):
        for name, module in parents.items():
            for pair in find(modules, name, module):
                if finder.add(pair):
                    break
    order = {name: place for place, name in enumerate(modules)}
    return tuple(sorted(finder.pairs, key=lambda pair: order[pair.layers[0]]))


def find_vocabulary(model: nn.Module, outside: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the token embedding and of the heads over the same vocabulary; empty when there is no such pair.

    Both lie outside of the modules ``outside``. Without a head the embedding is not named either: its weight may be
    used as one by hand.
    """
    embeddings: dict[str, nn.Embedding] = {}
    linears: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if name.startswith(tuple(f"{prefix}." for prefix in outside)):
            continue
        if isinstance(module, nn.Embedding):
            embeddings[name] = module
        elif isinstance(module, nn.Linear):
            linears[name] = module

    def heads(embedding: nn.Embedding) -> tuple[str, ...]:
        size = embedding.num_embeddings
        return tuple(name for name, m in linears.items() if m.out_features == size and m.weight.shape[0] == size)

    def rank(name: str) -> tuple[bool, bool, bool, int]:
        embedding, found = embeddings[name], heads(embeddings[name])
        tied = any(linears[head].weight is embedding.weight for head in found)
        leaf = name.lower()
        return tied, any(word in leaf for word in _TOKEN_NAMES), "pos" not in leaf, embedding.num_embeddings

    fitting = [name for name in embeddings if heads(embeddings[name])]
    if not fitting:
        return (), ()
    best = max(fitting, key=rank)
    return (best,), heads(embeddings[best])


def _attention(modules: Mapping[str, nn.Module], name: str, module: nn.Module) -> Iterator[Pair]:
    for leaves in _SPLIT_QKV:
        columns = _children(modules, name, leaves)
        if columns:
            for row in _out_layers(modules, name):
                yield Pair(tuple((column, "colwise") for column in columns), row)
    for query, key_value in _SPLIT_Q_KV:
        columns = _children(modules, name, (query, key_value))
        if columns:
            for row in _out_layers(modules, name):
                yield Pair(((columns[0], "colwise"), (columns[1], "colwise_gate_up")), row)
    for leaf in _FUSED_QKV:
        columns = _children(modules, name, (leaf,))
        if columns:
            for row in _out_layers(modules, name):
                if _sizes(modules[columns[0]])[1] > _sizes(modules[row])[0]:
                    yield Pair(((columns[0], "colwise_qkv"),), row, alternatives=("colwise",))


def _out_layers(modules: Mapping[str, nn.Module], name: str) -> Iterator[str]:
    """Output projections of the attention ``name``: beside the inputs, else beside their module."""
    for leaf in _OUT:
        if (child := _linear_at(modules, _join(name, leaf))) is not None:
            yield child
    parent = name.rpartition(".")[0]
    if name:
        for path in ("output.dense", "output", "out", "proj"):
            if (child := _linear_at(modules, _join(parent, path))) is not None:
                yield child


def _mlp(modules: Mapping[str, nn.Module], name: str, module: nn.Module) -> Iterator[Pair]:
    for leaves, row in _MLP:
        columns = _children(modules, name, leaves)
        last = _linear_at(modules, _join(name, row))
        if columns and last is not None and _fits(modules, columns, last):
            yield Pair(tuple((column, "colwise") for column in columns), last)
    for leaf, row in _FUSED_MLP:
        columns = _children(modules, name, (leaf,))
        last = _linear_at(modules, _join(name, row))
        if columns and last is not None and _sizes(modules[columns[0]])[1] == 2 * _sizes(modules[last])[0]:
            yield Pair(((columns[0], "colwise_gate_up"),), last)
    first = _linear_at(modules, _join(name, "intermediate.dense"))
    last = _linear_at(modules, _join(name, "output.dense"))
    if first is not None and last is not None and _fits(modules, (first,), last):
        yield Pair(((first, "colwise"),), last)


def _sequential(modules: Mapping[str, nn.Module], name: str, module: nn.Module) -> Iterator[Pair]:
    """A Sequential with two Linears, whose other layers have no parameters."""
    if not isinstance(module, nn.Sequential):
        return
    linears = [leaf for leaf, child in module.named_children() if _is_linear(child)]
    others = [child for child in module.children() if not _is_linear(child)]
    if len(linears) == 2 and all(next(child.parameters(), None) is None for child in others):
        first, last = (_join(name, leaf) for leaf in linears)
        if _fits(modules, (first,), last):
            yield Pair(((first, "colwise"),), last, named=bool(re.search(r"(^|\.)\d+\.", name)))


def _children(modules: Mapping[str, nn.Module], name: str, leaves: tuple[str, ...]) -> tuple[str, ...]:
    """Full names of the linears ``leaves`` of a module; empty unless all are there."""
    names = tuple(_join(name, leaf) for leaf in leaves)
    return names if all(_is_linear(modules.get(child)) for child in names) else ()


def _linear_at(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """``name`` when it is a linear, or the first layer of the Sequential ``name`` when that is one."""
    module = modules.get(name)
    if _is_linear(module):
        return name
    if isinstance(module, nn.Sequential) and len(module) and _is_linear(modules.get(f"{name}.0")):
        return f"{name}.0"
    return None


def _fits(modules: Mapping[str, nn.Module], columns: tuple[str, ...], row: str) -> bool:
    inputs, _ = _sizes(modules[row])
    return all(_sizes(modules[column])[1] == inputs for column in columns)


def _is_linear(module: nn.Module | None) -> bool:
    if module is None or not (isinstance(module, nn.Linear) or is_conv1d(module)):
        return False
    return isinstance(
        module._parameters.get("weight"), nn.Parameter
    )  # a parametrized weight is computed: it stays whole


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Input and output size of a linear."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter), "a linear has a weight"
    sizes = (int(weight.shape[1]), int(weight.shape[0]))
    return sizes[::-1] if is_conv1d(module) else sizes


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
