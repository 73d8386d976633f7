"""Mechanism: what must be known of torch's operators to follow values: which read, which write, which make anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

__all__ = ["FACTORIES", "data_read_by", "operator_name", "writes", "written_by"]

# Factories take shape and dtype of their argument only: the result is real.
FACTORIES = frozenset(
    [
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty_strided",
    ]
)
_READING_TAGS = frozenset([torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape])


def operator_name(func: Any) -> str:
    """Name of an operator without namespace and overload."""
    return func._schema.name.split("::")[1]


def writes(func: Any) -> bool:
    """Whether an operator writes into one of its arguments."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def data_read_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors whose values an operator hands to Python, as a number or as the shape of its result."""
    name = operator_name(func)
    if name == "index":
        read: Any = [m for m in args[1] if m is not None and m.dtype in (torch.bool, torch.uint8)]
    elif name == "masked_select":
        read = args[1]
    elif name == "is_nonzero" or not _READING_TAGS.isdisjoint(func.tags):
        read = (args, kwargs)
    else:
        return []
    return [leaf for leaf in tree_flatten(read)[0] if isinstance(leaf, torch.Tensor)]


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes into: in place, through out=, or a whole list."""
    written: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
    return written
