"""Glue: shapes of models that only torch or transformers can describe."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from typing import Any

import torch
from torch import nn

from lightning_parallel.planner.config_shapes import FAMILIES, shape_from_config
from lightning_parallel.planner.model_shape import ModelShape

__all__ = ["config_by_name", "parameter_count", "shape_of_module", "shape_of_module_path"]


def config_by_name(name: str) -> dict[str, Any]:
    """The configuration that transformers finds under a model's name (in its cache or on the hub).

    Raises:
        ValueError: transformers is missing, or finds nothing under that name.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            f"--config {name} is no file, and a model's name needs transformers; install it or name a file"
        )
    from transformers import AutoConfig

    try:
        found: dict[str, Any] = AutoConfig.from_pretrained(name).to_dict()
    except (OSError, ValueError) as error:
        raise ValueError(f"transformers finds no configuration named {name!r}: {error}") from error
    return found


def parameter_count(module: nn.Module) -> int:
    """Parameters of a module, each object once: tensors on the meta device share no address, but all have identity.

    >>> with torch.device("meta"):
    ...     parameter_count(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)))
    220
    """
    return sum(parameter.numel() for parameter in module.parameters())


def shape_of_module_path(path: str, *, heads: int = 0, seq: int = 0) -> ModelShape:
    """The shape of ``package.module:Class``, built without arguments on the meta device.

    Raises:
        ValueError: it cannot be imported or built, or has no repeated blocks.
    """
    package, _, name = path.partition(":")
    if not name:
        raise ValueError(f"--module {path} names no class; write package.module:Class")
    try:
        make = getattr(importlib.import_module(package), name)
        with torch.device("meta"):
            module = make()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"--module {path} cannot be built without arguments: {error}") from error
    return shape_of_module(module, heads=heads, seq=seq)


def shape_of_module(module: nn.Module, *, heads: int = 0, seq: int = 0) -> ModelShape:
    """The shape of a module: from its transformers configuration, else read off its repeated blocks.

    The parameter count is always that of the module. Sizes that no tensor shows: ``heads`` is taken from the modules'
    attributes (64 wide when there are none), ``seq`` from learned positions or 2048.

    Raises:
        ValueError: the module has no embedding or no blocks to read the sizes from.
    """
    config: Any = getattr(module, "config", None)
    fields = config.to_dict() if hasattr(config, "to_dict") else {}
    if fields.get("model_type") in FAMILIES:
        return shape_from_config(fields, seq=seq).with_parameters(parameter_count(module))
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and _repeats(m)]
    if not embeddings or not lists:
        raise ValueError("the module has no embedding or no list of equal blocks; give its sizes instead")
    blocks = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
    tokens = max(embeddings, key=lambda m: m.num_embeddings * m.embedding_dim)
    hidden = tokens.embedding_dim
    first = blocks[0]
    # The MLP's width is the side that only some matrices of a block have; a fused qkv is three hidden widths.
    sides = Counter(side for m in first.modules() if isinstance(m, nn.Linear) for side in m.weight.shape)
    widths = [side for side in sides if side not in (hidden, 3 * hidden)]
    positions = [m.num_embeddings for m in embeddings if m is not tokens]
    found = heads or _attribute(first, ("n_head", "num_heads", "num_attention_heads", "nhead")) or max(1, hidden // 64)
    length = seq or max(positions, default=2048)
    shape = ModelShape.gpt(len(blocks), hidden, found, vocab=tokens.num_embeddings, seq=length)
    sized = ModelShape(**{**vars(shape), "ffn": max(widths, default=4 * hidden)})
    return sized.with_parameters(parameter_count(module))


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
