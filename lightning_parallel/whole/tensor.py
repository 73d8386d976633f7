"""Mechanism: tensors that look whole on every rank while each rank holds a part: gathered to read, written through.

A `WholeTensor` holds no data. Every operator on it gathers the whole value, computes on that, and drops it again; what
an operator writes in place goes back into this rank's part. Views keep the way from the whole value to themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = ["Gradient", "Value", "WholeParameter", "WholeTensor"]

Step = Callable[[Tensor], Tensor]


class Value(Protocol):
    """What a whole tensor stands for."""

    def read(self) -> Tensor:
        """The whole value, as a copy."""

    def write(self, whole: Tensor) -> None:
        """Takes this rank's part of a whole value."""

    def copy(self) -> Value:
        """A value of its own, which starts equal."""


class Parameter(Value, Protocol):
    """A value that gradients may be asked for."""

    requires_grad: bool

    def copy(self) -> Parameter:
        """A value of its own, which starts equal."""


class Gradient(Protocol):
    """The gradient that belongs to a whole parameter."""

    def get(self) -> Tensor | None:
        """The whole gradient, or None if no rank has one."""

    def set(self, gradient: Tensor | None) -> None:
        """Replaces it."""

    def copy(self, value: Parameter) -> Gradient:
        """Of a copied parameter: it starts as None."""


class WholeTensor(torch.Tensor):
    """A whole tensor or a view of one. Shape, strides and dtype are those of the plain model's tensor."""

    _value: Value
    _meta: Tensor
    _steps: tuple[Step, ...]

    @staticmethod
    def __new__(
        cls: type[WholeTensor],
        value: Value,
        meta: Tensor,
        device: torch.device,
        requires_grad: bool = False,
        steps: tuple[Step, ...] = (),
    ) -> WholeTensor:
        """`meta` gives shape, strides and dtype; `steps` lead from the whole value to this view of it."""
        with torch.inference_mode(False):
            self = torch.Tensor._make_wrapper_subclass(
                cls, meta.size(), strides=meta.stride(), dtype=meta.dtype, device=device, requires_grad=requires_grad
            )
        self._value, self._meta, self._steps = value, meta, steps
        # Kernels that take an address (Triton, DLPack) would read from address 0.
        torch._C._set_throw_on_mutable_data_ptr(self)
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(args[0], WholeTensor) and _makes_view(func):
            return args[0]._view(partial(func, **kwargs), args[1:])
        wholes: dict[int, Tensor] = {}
        replaced: dict[int, WholeTensor] = {}

        def gathered(stand_in: WholeTensor) -> Tensor:
            key = id(stand_in._value)
            if key not in wholes:
                wholes[key] = stand_in._value.read()
            real = wholes[key]
            for step in stand_in._steps:
                real = step(real)
            replaced[id(real)] = stand_in
            return real

        args, kwargs = tree_map_only(WholeTensor, gathered, real_arguments := (args, kwargs))
        out = func(*args, **kwargs)
        for value in {id(t._value): t._value for t in _written_by(func, *real_arguments)}.values():
            value.write(wholes[id(value)])
        return tree_map_only(torch.Tensor, lambda t: replaced.get(id(t), t), out)

    def _view(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        metas, spec = tree_flatten(func(self._meta, *args))
        views = [
            WholeTensor(self._value, meta, self.device, steps=(*self._steps, partial(_step, func, args, place)))
            for place, meta in enumerate(metas)
        ]
        return spec.unflatten(views)

    def _whole(self) -> Tensor:
        """The data of this view, as a tensor of its own."""
        real = self._value.read()
        for step in self._steps:
            real = step(real)
        return real

    # -------------------------------------------------------------- what does not come through an operator
    @property
    def data(self) -> Tensor:
        """The same values outside of the graph; assigning replaces them."""
        return WholeTensor(self._value, self._meta, self.device, steps=self._steps)

    @data.setter
    def data(self, new: Tensor) -> None:
        if new.shape != self.shape or self._steps:
            raise ValueError(
                f"data of shape {tuple(self.shape)} cannot be replaced by a tensor of shape {tuple(new.shape)} while "
                "ranks hold parts of it; use p.data.copy_() with a tensor of the same shape"
            )
        self._value.write(_plain(new))

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """None: only parameters have gradients here."""
        return None

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Refused: steps compute with the part, which a hook on the whole would never see.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "hooks on gradients can be registered before ranks hold parts only, in __init__, configure_model or setup; "
            "in later hooks read p.grad, for example in on_before_optimizer_step"
        )

    register_post_accumulate_grad_hook = register_hook

    def numpy(self, *, force: bool = False) -> Any:
        """A copy as a NumPy array."""
        return self._whole().cpu().numpy()

    def tolist(self) -> Any:
        """A copy as nested lists."""
        return self._whole().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copy = self._whole().clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._whole().clone().__reduce_ex__(protocol)


class WholeParameter(WholeTensor):
    """A whole tensor that counts as an `nn.Parameter` and has a gradient."""

    _value: Parameter
    _gradient: Gradient

    @classmethod
    def of(cls, value: Parameter, gradient: Gradient, meta: Tensor, device: torch.device) -> WholeParameter:
        """A parameter with the shape of `meta`."""
        self = cls(value, meta, device, value.requires_grad)
        self._gradient = gradient
        self._is_param = True
        return self

    @property
    def grad(self) -> Tensor | None:
        """The whole gradient; None if no rank has one. Assigning replaces this rank's part."""
        return self._gradient.get()

    @grad.setter
    def grad(self, new: Tensor | None) -> None:
        if new is not None and new.shape != self.shape:
            raise RuntimeError(
                f"assigned grad has data of a different size: {tuple(new.shape)} for a parameter of shape "
                f"{tuple(self.shape)}"
            )
        self._gradient.set(new)

    @property
    def requires_grad(self) -> bool:
        """Whether the part that steps compute with is trained."""
        return self._value.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> WholeParameter:
        """Freezes or thaws the part that steps compute with."""
        self._value.requires_grad = requires_grad
        return super().requires_grad_(requires_grad)  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Alone it becomes a whole parameter with data; inside of a module its copy is divided over the ranks too."""
        if not memo:
            return nn.Parameter(self._whole().clone(), self.requires_grad)
        value = self._value.copy()
        copy = WholeParameter.of(value, self._gradient.copy(value), self._meta, self.device)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self._whole().clone(), self.requires_grad).__reduce_ex__(protocol)


def _plain(tensor: Tensor) -> Tensor:
    return tensor._whole() if isinstance(tensor, WholeTensor) else tensor


def _step(func: Callable[..., Any], args: tuple[Any, ...], place: int, whole: Tensor) -> Tensor:
    result: Tensor = tree_flatten(func(whole, *args))[0][place]
    return result


def _makes_view(func: Any) -> bool:
    returned = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    return bool(returned) and not any(info.is_write for info in returned)


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[WholeTensor]:
    written: list[WholeTensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, WholeTensor)]
    return written
