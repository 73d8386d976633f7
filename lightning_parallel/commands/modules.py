"""Glue: shapes of models that only torch or transformers can describe."""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.planner.config_shapes import FAMILIES, ONLY_DENSE, shape_from_config
from lightning_parallel.planner.model_shape import ModelShape

__all__ = ["ASSUMED_SEQ", "parameter_count", "shape_of_module", "shape_of_module_path", "tells_seq"]

ASSUMED_SEQ = 2048
"""Tokens of a sequence where neither the user nor the model tells."""

# Parts of the names of classes that send each token to some of their parts.
_EXPERTS = ("expert", "moe")


def parameter_count(module: nn.Module) -> int:
    """Parameters of a module, each object once: tensors on the meta device share no address, but all have identity.

    >>> with torch.device("meta"):
    ...     parameter_count(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)))
    220
    """
    return sum(parameter.numel() for parameter in module.parameters())


def shape_of_module_path(path: str, *, heads: int = 0, seq: int = 0) -> ModelShape:
    """The shape of ``package.module:Class``, built without arguments on the meta device.

    What its code prints goes to standard error: the answer may be JSON.

    Raises:
        ValueError: it cannot be imported or built, or has no repeated blocks.
    """
    package, _, name = path.partition(":")
    if not name or not package.strip("."):
        raise ValueError(f"--module {path} names no class of a module; write package.module:Class")
    try:
        with redirect_stdout(sys.stderr):
            found = _import_here(package)
    except (Exception, SystemExit) as error:
        raise ValueError(f"--module {path} cannot be imported: {error}") from error
    if not hasattr(found, name):
        raise ValueError(f"--module {path}: {package} has no {name}")
    try:
        with redirect_stdout(sys.stderr), torch.device("meta"):
            module = getattr(found, name)()
    except (Exception, SystemExit) as error:
        raise ValueError(f"--module {path} cannot be built without arguments: {error}") from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"--module {path} makes a {type(module).__name__}, which is no module of torch")
    return shape_of_module(module, heads=heads, seq=seq)


def _import_here(package: str) -> ModuleType:
    """A module on the path or in the current folder, which a console script does not look into."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(package)
    finally:
        sys.path.remove(here)


def shape_of_module(module: nn.Module, *, heads: int = 0, seq: int = 0, heads_known: bool = False) -> ModelShape:
    """The shape of a module: from the transformers configuration in it, else read off its repeated blocks.

    The parameter count is always that of the module. Sizes that no tensor shows: ``heads`` is taken from the modules'
    attributes (64 wide when there are none, unless they must be ``heads_known``), ``seq`` from learned positions or
    `ASSUMED_SEQ`.

    Raises:
        ValueError: the module has no embedding or no blocks to read the sizes from, or experts, or no known heads.
    """
    for fields in _configurations(module):
        if fields.get("model_type") in FAMILIES:
            shape = shape_from_config(fields, seq=seq, counted=False)
            return shape.with_parameters(parameter_count(module))
    _refuse_experts(module)
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and _repeats(m)]
    if not embeddings or not lists:
        raise ValueError("the module has no embedding or no list of equal blocks; give its sizes instead")
    blocks = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
    tokens = max(embeddings, key=lambda m: m.num_embeddings * m.embedding_dim)
    positions = _positions(embeddings, tokens)
    found = heads or _attribute(blocks[0], ("n_head", "num_heads", "num_attention_heads", "nhead", "heads"))
    if heads_known and not found:
        raise ValueError("no attribute of the blocks, such as num_heads, tells their number of heads; give it instead")
    shape = ModelShape(
        layers=len(blocks),
        hidden=tokens.embedding_dim,
        heads=found or max(1, tokens.embedding_dim // 64),
        vocab=tokens.num_embeddings,
        seq=seq or max(positions, default=ASSUMED_SEQ),
        learned_positions=sum(positions),
        **_block_sizes(blocks[0], tokens.embedding_dim),
        **_ends(module, blocks, tokens),
    )
    return shape.with_parameters(parameter_count(module))


def tells_seq(module: nn.Module) -> bool:
    """Whether `shape_of_module` finds the length of sequences in a module, and need not assume one."""
    if any(fields.get("model_type") in FAMILIES for fields in _configurations(module)):
        return True
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    tokens = max(embeddings, key=lambda m: m.num_embeddings * m.embedding_dim, default=None)
    return bool(_positions(embeddings, tokens))


def _positions(embeddings: list[nn.Embedding], tokens: nn.Embedding | None) -> list[int]:
    return [m.num_embeddings for m in embeddings if m is not tokens]


def _configurations(module: nn.Module) -> Iterator[dict[str, Any]]:
    for child in module.modules():
        config: Any = getattr(child, "config", None)
        if callable(getattr(config, "to_dict", None)):
            yield config.to_dict()


def _refuse_experts(module: nn.Module) -> None:
    """Raises ValueError for a mixture of experts: a token passes a part of it only, which no plan here knows."""
    found = [name for name, m in module.named_modules() if any(w in type(m).__name__.lower() for w in _EXPERTS)]
    if found:
        raise ValueError(f"{found[0]} is a mixture of experts, which is not planned: {ONLY_DENSE}")


def _block_sizes(block: nn.Module, hidden: int) -> dict[str, Any]:
    """Width and kind of the MLP, and biases, of one block."""
    layers: list[Any] = [m for m in block.modules() if isinstance(getattr(m, "weight", None), Tensor)]
    layers = [layer for layer in layers if layer.weight.dim() == 2]
    # The MLP's width is the side that only some matrices of a block have; a fused qkv is three hidden widths.
    sides = Counter(side for m in layers for side in set(m.weight.shape) - {hidden, 3 * hidden})
    ffn = max(sides, default=4 * hidden)
    biased = any(getattr(m, "bias", None) is not None for m in layers)
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), biased)
    return {"ffn": ffn, "gated": sides[ffn] >= 3, **biases}


def _ends(module: nn.Module, blocks: nn.Module, tokens: nn.Embedding) -> dict[str, Any]:
    """What stands in front of and behind the blocks: so that these get exactly the rest of the parameters."""
    inside = {id(p) for p in blocks.parameters()}
    shapes = Counter(tuple(p.shape) for p in module.parameters() if id(p) not in inside)
    return {
        "tied": shapes[tuple(tokens.weight.shape)] < 2,
        "head_bias": shapes[(tokens.num_embeddings,)] > 0,
        "norm": "rms" if shapes[(tokens.embedding_dim,)] == 1 else "layer",
    }


def _repeats(container: nn.Module) -> bool:
    children = list(container.children())
    kinds = {type(child) for child in children}
    return len(children) > 1 and len(kinds) == 1 and any(p.dim() > 1 for p in children[0].parameters())


def _attribute(module: nn.Module, names: tuple[str, ...]) -> int:
    for child in module.modules():
        for name in names:
            value = getattr(child, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return 0
