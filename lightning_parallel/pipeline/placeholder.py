"""Mechanism: tensors that stand for values of another pipeline stage: shape, dtype and provenance, but no data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = ["PipelineCutError", "Placeholder", "placeholder_like", "placeholder_parameter", "placeholders_in"]


class PipelineCutError(RuntimeError):
    """A model cannot be cut into stages, or used a value of another stage. The message names it."""


# Factories take shape and dtype of their argument only: the result is real.
_FACTORIES = frozenset(
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
_DATA_READS = frozenset(
    ["_local_scalar_dense", "is_nonzero", "equal", "item", "nonzero", "unique", "_unique2", "allclose"]
)


class Placeholder(torch.Tensor):
    """A tensor without data. Metadata may be read and operators propagate it; reading data is an error."""

    _meta: torch.Tensor
    _origin: frozenset[str]

    @staticmethod
    def __new__(
        cls: type[Placeholder],
        meta: torch.Tensor,
        origin: Iterable[str],
        device: torch.device,
        requires_grad: bool = False,
    ) -> Placeholder:
        """`meta` gives shape, strides and dtype; `origin` names the parameters or blocks it stands for."""
        self = torch.Tensor._make_wrapper_subclass(
            cls, meta.size(), strides=meta.stride(), dtype=meta.dtype, device=device, requires_grad=requires_grad
        )
        self._meta = meta
        self._origin = frozenset(origin)
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype}, of={_names(self._origin)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        copy = Placeholder(self._meta, self._origin, self.device, self.requires_grad)
        if getattr(self, "_is_param", False):
            copy._is_param = True
        memo[id(self)] = copy
        return copy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        stand_ins = placeholders_in((args, kwargs))
        origin = frozenset().union(*(t._origin for t in stand_ins))
        if name == "equal" and isinstance(args[0], Placeholder) != isinstance(args[1], Placeholder):
            return False  # callbacks look for a parameter in a list this way
        if name == "equal":
            return args[0] is args[1]
        if name in _DATA_READS:
            raise PipelineCutError(f"{name} reads the data of a value that lives on another stage: {_names(origin)}")
        if name.startswith("_foreach_"):
            return _split_foreach(func, args, kwargs)
        if _writes_local_tensor(func, args):
            raise PipelineCutError(
                f"{name} writes a value of another stage into a local tensor in place: {_names(origin)}"
            )
        device = kwargs.get("device") or stand_ins[0].device
        if name in _FACTORIES:
            shape_of = args[0]
            real = torch.empty_strided(shape_of.size(), shape_of.stride(), dtype=shape_of.dtype, device=device)
            return func(real, *args[1:], **{**kwargs, "device": device})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        meta_args, meta_kwargs = tree_map_only(torch.Tensor, _to_meta, (args, kwargs))
        out = func(*meta_args, **meta_kwargs)
        if name.endswith("_") and isinstance(args[0], Placeholder):
            return args[0]
        return tree_map_only(torch.Tensor, lambda t: Placeholder(t, origin, torch.device(device)), out)


def _names(origin: frozenset[str]) -> str:
    shown = sorted(origin)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _to_meta(t: torch.Tensor) -> torch.Tensor:
    if isinstance(t, Placeholder):
        return t._meta
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")


def _writes_local_tensor(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an in-place or out= operator would write into a tensor that has data."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(value, torch.Tensor) and not isinstance(value, Placeholder):
            return True
    return False


def _split_foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a _foreach_ operator on the entries that have data; entries without data pass through unchanged.

    Optimizers and weight averaging hand whole parameter lists over; the local part must still be computed.
    """
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and _holds_tensors(a)]
    length = len(lists[0])
    real = [i for i in range(length) if not any(isinstance(entries[i], Placeholder) for entries in lists)]

    def keep(a: Any) -> Any:
        return [a[i] for i in real] if isinstance(a, list | tuple) and len(a) == length else a

    out = func(*(keep(a) for a in args), **{k: keep(v) for k, v in kwargs.items()}) if real else None
    if out is None or not isinstance(out, list | tuple):
        return out
    full = list(lists[0])
    for i, value in zip(real, out, strict=True):
        full[i] = value
    return full


def _holds_tensors(values: Any) -> bool:
    return len(values) > 0 and isinstance(values[0], torch.Tensor)


def placeholders_in(tree: Any) -> list[Placeholder]:
    """Every placeholder among the leaves of a nested structure."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Placeholder)]


def placeholder_like(tensor: torch.Tensor, origin: Iterable[str]) -> Placeholder:
    """A placeholder with shape, dtype and device of a tensor."""
    return Placeholder(_to_meta(tensor), origin, tensor.device)


def placeholder_parameter(parameter: torch.Tensor, name: str, device: torch.device) -> torch.nn.Parameter:
    """A placeholder that modules and optimizers treat as a parameter whose gradient is always None."""
    stand_in = Placeholder(_to_meta(parameter), (f"parameter {name}",), device, parameter.requires_grad)
    stand_in._is_param = True
    return stand_in  # type: ignore[return-value]
