"""Mechanism: plans for models that are known, and the guesses for those that are not.

Known are the models of transformers that ship a plan, some that do not, and torch's own attention and transformer
layers. In everything else pairs are looked for by name (see :mod:`lightning_parallel.tensor_parallel.naming`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightning_parallel.tensor_parallel.assignment import Assignment
from lightning_parallel.tensor_parallel.heads import ratio_patches
from lightning_parallel.tensor_parallel.naming import find_pairs, find_vocabulary
from lightning_parallel.tensor_parallel.styles import canonical_style

__all__ = ["assign_automatically"]

# Styles of transformers for running experts on different ranks; a dense plan for the same layers is not given then.
_OTHER_PARALLELISM = frozenset({"grouped_gemm", "ep_router", "ep_dispatch_experts", "moe_identity_expert"})


def assign_automatically(model: nn.Module, ranks: int) -> Assignment:
    """Styles for every module that is known or looks like a pair."""
    assignment = Assignment()
    for prefix, root in _transformers_roots(model):
        _assign_shipped(model, prefix, root, ranks, assignment)
    _assign_torch_layers(model, assignment)
    roots = tuple(prefix for prefix, root in _transformers_roots(model) if _shipped_plan(root))
    taken = {name for name, _ in model.named_modules() if name.startswith(tuple(f"{p}." for p in roots if p))}
    if "" in roots:
        return assignment
    for pair in find_pairs(model, taken | set(assignment.styles)):
        assignment.styles.update(pair.columns)
        assignment.styles[pair.row] = "rowwise"
        assignment.guessed.update(pair.layers)
        if pair.alternatives:
            assignment.alternatives[pair.row] = pair.alternatives
        if not pair.named:
            assignment.optional.update(pair.layers)
    _assign_vocabulary(model, taken, assignment)
    return assignment


def _transformers_roots(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Outermost modules that are models of transformers, by what they offer: a config with a model type."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in found)
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if (
            not inside
            and isinstance(kind, str)
            and hasattr(module, "tp_plan")
            and hasattr(module, "get_input_embeddings")
        ):
            found.append(name)
            yield name, module


def _shipped_plan(root: Any) -> Mapping[str, str]:
    plan = root.tp_plan
    return plan if isinstance(plan, Mapping) else {}


def _assign_shipped(model: nn.Module, prefix: str, root: Any, ranks: int, assignment: Assignment) -> None:
    """The plan that a transformers model ships, and its token embedding."""
    plan = _shipped_plan(root)
    if not plan:
        return
    modules = dict(root.named_modules())
    parameters = dict(root.named_parameters(remove_duplicate=False))
    for pattern, shipped in plan.items():
        if shipped in _OTHER_PARALLELISM:
            continue
        style = canonical_style(shipped, pattern)
        text = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name in modules:
            if name and text.fullmatch(name):
                assignment.styles[_join(prefix, name)] = style
        for name in parameters:
            if name not in modules and text.fullmatch(name):
                assignment.parameters[_join(prefix, name)] = style
    embedding = root.get_input_embeddings()
    head = root.get_output_embeddings()
    names = {id(module): name for name, module in modules.items()}
    if isinstance(embedding, nn.Embedding):
        assignment.styles.setdefault(_join(prefix, names[id(embedding)]), "vocab")
        if isinstance(head, nn.Linear) and head.weight is embedding.weight:
            assignment.styles.setdefault(_join(prefix, names[id(head)]), "colwise_gather")
    assignment.known.update(_join(prefix, name) for name in modules)
    for name, module in modules.items():
        keys = assignment.styles.get(_join(prefix, name, "k_proj"))
        if keys == "colwise":
            assignment.patches.extend(ratio_patches(_join(prefix, name), module, ranks))


def _assign_torch_layers(model: nn.Module, assignment: Assignment) -> None:
    """nn.MultiheadAttention, nn.TransformerEncoderLayer and nn.TransformerDecoderLayer, wherever they are."""
    for name, module in model.named_modules():
        if type(module) is nn.MultiheadAttention:
            if module.bias_k is not None or module.add_zero_attn:
                assignment.notes.append(f"{name}: add_bias_kv and add_zero_attn cannot be split by head")
            else:
                assignment.styles[name] = "attention"
        elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            assignment.styles[f"{name}.linear1"] = "colwise"
            assignment.styles[f"{name}.linear2"] = "rowwise"
            if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
                assignment.known.update((f"{name}.linear1", f"{name}.linear2"))
            else:  # a subclass may compute anything with them
                assignment.guessed.update((f"{name}.linear1", f"{name}.linear2"))


def _assign_vocabulary(model: nn.Module, taken: set[str], assignment: Assignment) -> None:
    layers = [*assignment.styles, *taken]
    inside = tuple(
        name
        for name, m in model.named_modules()
        if name
        and isinstance(m, (nn.ModuleList, nn.Sequential))
        and any(layer.startswith(f"{name}.") for layer in layers)
    )
    embeddings, heads = find_vocabulary(model, inside)
    styles = dict.fromkeys(embeddings, "vocab") | dict.fromkeys(heads, "colwise_gather")
    styles = {name: style for name, style in styles.items() if name not in taken}
    for name in _aliases(model, tuple(styles)):  # more layers over the same weight, as in encoder and decoder
        owner = name.rpartition(".")[0]
        if isinstance(model.get_submodule(owner), (nn.Embedding, nn.Linear)):
            styles[owner] = "vocab" if isinstance(model.get_submodule(owner), nn.Embedding) else "colwise_gather"
    aliases = _aliases(model, tuple(styles))
    known = tuple(f"{prefix}." if prefix else "" for prefix, _ in _transformers_roots(model))
    if aliases and not all(name.startswith(known) for name in aliases):
        assignment.notes.append(f"{', '.join(styles)}: share parameters with {', '.join(aliases)}")
        return
    # In transformers, heads of masked language models keep their bias under a second name that nothing reads.
    assignment.parameters.update(dict.fromkeys(aliases, "vocab"))
    assignment.styles.update(styles)


def _aliases(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Second names of the own parameters of the modules ``names`` in other modules."""
    own = {id(p) for name in names for p in model.get_submodule(name).parameters(recurse=False)}
    return tuple(
        name
        for name, p in model.named_parameters(remove_duplicate=False)
        if id(p) in own and name.rpartition(".")[0] not in names
    )


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
