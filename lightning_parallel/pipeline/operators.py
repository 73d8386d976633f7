"""Mechanism: what must be known of torch's operators to follow values: which read, which write, which make anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

__all__ = [
    "FACTORIES",
    "VIEWS_IN_PLACE",
    "OneHotByShape",
    "data_read_by",
    "operator_name",
    "takes_shapes_only",
    "writes",
    "written_by",
]

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
# Only turn a tensor: its values, and where they are, stay (recurrent layers do so with `batch_first`).
VIEWS_IN_PLACE = frozenset(["transpose_", "t_", "squeeze_", "unsqueeze_"])
_READING_TAGS = frozenset([torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape])
_SELECTIONS = frozenset(["index", "masked_select"])


@dataclass(frozen=True)
class _Facts:
    """What an operator's schema tells, whatever the arguments.

    Attributes:
        name: without namespace and overload.
        written: (position, name) of the arguments that it writes into.
        reads: whether values of any argument reach Python.
    """

    name: str
    written: tuple[tuple[int, str], ...]
    reads: bool


@cache
def _facts(func: Any) -> _Facts:
    name = func._schema.name.split("::")[1]
    arguments = enumerate(func._schema.arguments)
    written = tuple((p, a.name) for p, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return _Facts(name, written, name == "is_nonzero" or not _READING_TAGS.isdisjoint(func.tags))


@cache
def takes_shapes_only(func: Any) -> bool:
    """Whether all that is to be known of a call is the shape of its result: nothing is read, written or made anew."""
    facts = _facts(func)
    special = facts.name in FACTORIES | _SELECTIONS | {"equal"} or facts.name.startswith("_foreach_")
    return not (special or facts.reads or facts.written or facts.name.endswith("_"))


def operator_name(func: Any) -> str:
    """Name of an operator without namespace and overload."""
    return _facts(func).name


def writes(func: Any) -> bool:
    """Whether an operator writes into one of its arguments."""
    return bool(_facts(func).written)


def data_read_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors whose values an operator hands to Python, as a number or as the shape of its result."""
    facts = _facts(func)
    if facts.name == "index":
        read: Any = [m for m in args[1] if m is not None and m.dtype in (torch.bool, torch.uint8)]
    elif facts.name == "masked_select":
        read = args[1]
    elif facts.name == "one_hot" and _classes(args, kwargs) >= 0:
        return []
    elif facts.reads:
        read = (args, kwargs)
    else:
        return []
    return [leaf for leaf in tree_flatten(read)[0] if isinstance(leaf, torch.Tensor)]


def _classes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The number of classes that `one_hot` was given; negative if it has to look for it."""
    return int(args[1] if len(args) > 1 else kwargs.get("num_classes", -1))


class OneHotByShape(TorchFunctionMode):
    """Computes one-hot codes of a known number of classes without looking at the values.

    On the CPU torch looks at them to check their range, which to whoever follows reads is one like any other.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.one_hot and args and _classes(args, kwargs) >= 0:
            classes = torch.arange(_classes(args, kwargs), device=args[0].device)
            return (args[0].unsqueeze(-1) == classes).to(torch.int64)
        return func(*args, **kwargs)


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes into: in place, through out=, or a whole list."""
    written: list[torch.Tensor] = []
    for place, name in _facts(func).written:
        value = args[place] if place < len(args) else kwargs.get(name)
        written += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
    return written
