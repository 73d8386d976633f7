"""Mechanism: tensors that stand for values of another pipeline stage: shape, dtype and provenance, but no data."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_parallel.pipeline.meta import TensorOutline, outline_of_result
from lightning_parallel.pipeline.operators import (
    FACTORIES,
    VIEWS_IN_PLACE,
    data_read_by,
    operator_name,
    takes_shapes_only,
    writes,
    written_by,
)

__all__ = [
    "PipelineCutError",
    "Placeholder",
    "WriteLedger",
    "placeholder_like",
    "placeholder_parameter",
    "placeholders_in",
]


class PipelineCutError(RuntimeError):
    """A model cannot be cut into stages, or used a value of another stage. The message names it."""


class Placeholder(torch.Tensor):
    """A tensor without data. Metadata may be read and operators propagate it; reading data is an error."""

    _origin: frozenset[str]
    _ledger: WriteLedger | None

    @staticmethod
    def __new__(
        cls: type[Placeholder],
        outline: TensorOutline,
        origin: Iterable[str],
        device: torch.device,
        requires_grad: bool = False,
        ledger: WriteLedger | None = None,
    ) -> Placeholder:
        """`outline` gives shape, strides and dtype; `origin` names the parameters or blocks it stands for.

        `ledger` notes the local tensors that the value is written into; without one such a write is an error.
        """
        # Never an inference tensor: a view of a parameter is none either, and must have the same kind of version.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            self = torch.Tensor._make_wrapper_subclass(
                cls,
                outline.shape,
                strides=outline.stride,
                dtype=outline.dtype,
                device=device,
                requires_grad=requires_grad,
            )
        self._origin = frozenset(origin)
        self._ledger = ledger
        # Kernels that take an address (Triton, DLPack) would read from address 0.
        torch._C._set_throw_on_mutable_data_ptr(self)
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype}, of={_names(self._origin)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        copy = Placeholder(TensorOutline.of(self), self._origin, self.device, self.requires_grad, self._ledger)
        if getattr(self, "_is_param", False):
            copy._is_param = True
        memo[id(self)] = copy
        return copy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        stand_ins = placeholders_in((args, kwargs))
        origin = stand_ins[0]._origin.union(*(t._origin for t in stand_ins[1:]))
        ledger = next((t._ledger for t in stand_ins if t._ledger is not None), None)
        device = kwargs.get("device") or stand_ins[0].device
        name = operator_name(func)
        if name == "equal" and isinstance(args[0], Placeholder) != isinstance(args[1], Placeholder):
            return False  # callbacks look for a parameter in a list this way
        if name == "equal":
            return args[0] is args[1]
        if not takes_shapes_only(func):
            read = placeholders_in(data_read_by(func, args, kwargs))
            if read:
                sources = _names(frozenset().union(*(t._origin for t in read)))
                raise PipelineCutError(f"{name} reads the data of a value that lives on another stage: {sources}")
            if name.startswith("_foreach_"):
                return _split_foreach(func, args, kwargs)
            written = written_by(func, args, kwargs)
            _note_writes(name, written, origin, ledger)
            if any(not isinstance(t, Placeholder) for t in written):
                return written[0] if len(written) == 1 else tuple(written)
            if name in FACTORIES:
                shape_of = args[0]
                real = torch.empty_strided(shape_of.size(), shape_of.stride(), dtype=shape_of.dtype, device=device)
                return func(real, *args[1:], **{**kwargs, "device": device})
        if name in VIEWS_IN_PLACE:
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        if name in ("index", "masked_select"):
            outlines: Any = TensorOutline.of(_select(name, args))
        elif writes(func):
            outlines = _outlines_of_write(func, args, kwargs)
        else:
            outlines = outline_of_result(func, args, kwargs)
        if name.endswith("_") and isinstance(args[0], Placeholder):
            return args[0]
        place = torch.device(device)
        if isinstance(outlines, TensorOutline):  # nearly always; walking a tree takes longer
            return Placeholder(outlines, origin, place, ledger=ledger)
        return tree_map_only(TensorOutline, lambda o: Placeholder(o, origin, place, ledger=ledger), outlines)


class WriteLedger(TorchDispatchMode):
    """Follows local tensors that a value of another stage was written into (`x[:, 1:] = embedding`).

    While it is open, such a tensor counts as a placeholder in every operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False
        self._origins: dict[int, frozenset[str]] = {}
        self._alive: list[torch.UntypedStorage] = []  # storage addresses must not be reused

    def __enter__(self) -> WriteLedger:
        self.is_open = True
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.is_open = False
        self._origins.clear()
        self._alive.clear()
        super().__exit__(*exception)

    def note(self, tensor: torch.Tensor, origin: frozenset[str]) -> None:
        """The tensor's storage now holds a value of another stage."""
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._origins[storage._cdata] = self._origins.get(storage._cdata, frozenset()) | origin

    @property
    def is_empty(self) -> bool:
        """Whether no local tensor was written into."""
        return not self._origins

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A placeholder if the tensor was written into, else the tensor."""
        if not self._origins or isinstance(tensor, Placeholder) or tensor.layout is not torch.strided:
            return tensor
        origin = self._origins.get(tensor.untyped_storage()._cdata)
        return tensor if origin is None else placeholder_like(tensor, origin, self)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator_name(func) not in VIEWS_IN_PLACE:  # which would turn a stand-in instead of the tensor
            args, kwargs = tree_map_only(torch.Tensor, self.stand_in, (args, kwargs or {}))
        kwargs = kwargs or {}
        return func(*args, **kwargs)


def _names(origin: frozenset[str]) -> str:
    shown = sorted(origin)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _to_meta(t: torch.Tensor) -> torch.Tensor:
    return TensorOutline.of(t).to_meta()


def _note_writes(name: str, written: list[torch.Tensor], origin: frozenset[str], ledger: WriteLedger | None) -> None:
    """What was written into is from now on a value of other stages too; without an open ledger local tensors refuse."""
    for tensor in written:
        if isinstance(tensor, Placeholder):
            tensor._origin |= origin
        elif ledger is not None and ledger.is_open:
            ledger.note(tensor, origin)
        else:
            raise PipelineCutError(
                f"{name} writes a value of another stage into a local tensor in place: {_names(origin)}"
            )


def _outlines_of_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Outlines of what an operator returns that writes into placeholders only, whose own outlines are fixed."""
    targets = {id(t): (t, _to_meta(t)) for t in placeholders_in(written_by(func, args, kwargs))}

    def to_meta(t: torch.Tensor) -> torch.Tensor:
        return targets[id(t)][1] if id(t) in targets else _to_meta(t)

    out = func(*tree_map_only(torch.Tensor, to_meta, args), **tree_map_only(torch.Tensor, to_meta, kwargs))
    for target, meta in targets.values():
        if TensorOutline.of(meta) != TensorOutline.of(target):
            raise PipelineCutError(
                f"{operator_name(func)} changes the shape of a value of another stage in place, from "
                f"{tuple(target.shape)} to {tuple(meta.shape)}: {_names(target._origin)}. Use the operator that "
                "returns a new tensor"
            )
    return tree_map_only(torch.Tensor, TensorOutline.of, out)


def _select(name: str, args: tuple[Any, ...]) -> torch.Tensor:
    """What selecting from a placeholder gives, on the meta device; masks have data, so that they tell its size."""
    if name == "masked_select":
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return _to_meta(args[0]).new_empty(int(args[1].expand(shape).sum()))
    places: list[torch.Tensor | None] = []
    for index in args[1]:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        places += index.nonzero().unbind(1) if is_mask else [index]
    return _to_meta(args[0])[tuple(slice(None) if i is None else _to_meta(i) for i in places)]


def _split_foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a _foreach_ operator on the entries that have data; entries without data pass through unchanged.

    Optimizers and weight averaging hand whole parameter lists over; the local part must still be computed.
    """
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and _holds_tensors(a)]
    length = len(lists[0])
    rows = list(zip(*(entries for entries in lists if len(entries) == length), strict=True))
    if writes(func) and any(placeholders_in(row) and not isinstance(row[0], Placeholder) for row in rows):
        raise PipelineCutError(f"{operator_name(func)} writes values of another stage into local tensors")
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
    if isinstance(tree, torch.Tensor):
        return [tree] if isinstance(tree, Placeholder) else []
    # Arguments are mostly flat: flattening them by torch's registry takes several times as long.
    if type(tree) in (tuple, list):
        return [leaf for child in tree for leaf in placeholders_in(child)]
    if type(tree) is dict:
        return [leaf for child in tree.values() for leaf in placeholders_in(child)]
    if tree is None or type(tree) in (int, float, bool, str):
        return []
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Placeholder)]


def placeholder_like(tensor: torch.Tensor, origin: Iterable[str], ledger: WriteLedger | None = None) -> Placeholder:
    """A placeholder with shape, dtype and device of a tensor."""
    return Placeholder(TensorOutline.of(tensor), origin, tensor.device, ledger=ledger)


def placeholder_parameter(
    parameter: torch.Tensor, name: str, device: torch.device, ledger: WriteLedger | None = None
) -> torch.nn.Parameter:
    """A placeholder that modules and optimizers treat as a parameter whose gradient is always None."""
    outline = TensorOutline.of(parameter)
    stand_in = Placeholder(outline, (f"parameter {name}",), device, parameter.requires_grad, ledger)
    stand_in._is_param = True
    return stand_in  # type: ignore[return-value]
