"""Mechanism: gradients of linear layers' weights, put off until a pipeline has time for them (Qi et al. 2024).

A backward pass that is split computes the gradients of inputs, for which the stage before waits, and keeps for each
weight the two factors of its gradient: the layer's input and the gradient of its output. Their product is made later.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.products import as_rows, autocast_dtype, cast_operand, product

__all__ = ["STORE", "PutOff", "WeightGradients", "is_watched", "linear", "refuse_second_derivatives", "split_linears"]

STORE = "_weight_gradients"
"""Attribute of the modules whose weights' gradients may be put off."""

_SEEN = "lightning_parallel.seen"


@dataclass(frozen=True, eq=False)
class _Factors:
    """Of the gradient of a weight of ``(outputs, inputs)``: rows of outputs' gradients and of inputs."""

    gradient: Tensor
    input: Tensor
    versions: tuple[int, int]

    def checked(self) -> tuple[Tensor, Tensor]:
        if self.versions != (self.gradient._version, self.input._version):
            raise RuntimeError(
                f"the input of a linear layer, of shape {tuple(self.input.shape)}, or the gradient of its output was "
                "changed in place after its backward pass, while schedule='zero-bubble' still needed it; do not write "
                "into tensors that were used in a step, or use schedule='1f1b'"
            )
        return self.gradient, self.input


@dataclass(frozen=True, eq=False)
class PutOff:
    """What a layer's backward pass hands the factors of its weight's gradient to.

    ``transposed``: the weight is ``(inputs, outputs)``.
    """

    store: WeightGradients
    weight: nn.Parameter
    transposed: bool

    def keep(self, gradient: Tensor, x: Tensor) -> None:
        """Takes the gradient of the output ``(rows, outputs)`` and the input ``(rows, inputs)``."""
        pair = (x.detach(), gradient.detach())  # which keep their memory, but not the graph that they came from
        pair = pair if self.transposed else pair[::-1]
        self.store._keep(self.weight, _Factors(*pair, (pair[0]._version, pair[1]._version)))


class WeightGradients:
    """The gradients of weights that one stage of a pipeline has put off; copies of a module share them."""

    def __init__(self) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        """Makes outputs require gradients where only the weight does, so that there is a backward pass to hook on."""
        self._kept: dict[int, dict[nn.Parameter, list[_Factors]]] = {}
        self._micro_batch: int | None = None
        self._is_open = False
        self._node = _adding_node(self.anchor)
        self._plain: dict[nn.Parameter, bool] = {}
        """Of weights that were used, whether nobody held the node that adds to their gradient before the step."""

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightGradients:
        return self

    def __reduce__(self) -> Any:
        return WeightGradients, ()

    @contextmanager
    def opened(self) -> Generator[None, None, None]:
        """Inside, forwards get ready for split backwards."""
        self._plain = {weight: not is_watched(weight) for weight in self._plain if weight.requires_grad}
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            self._kept.clear()

    def put_off(self, *weights: Tensor | None, transposed: bool = False) -> tuple[PutOff, ...] | None:
        """Where the gradients of weights go that a forward pass uses now; None if not all of them can be put off."""
        if not self._is_open or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if torch._C._are_functorch_transforms_active():  # which differentiate or batch the product themselves
            return None
        found = [w for w in weights if type(w) is nn.Parameter and w.requires_grad]
        if len(found) < len(weights):
            return None
        for weight in found:
            if weight not in self._plain:
                self._plain[weight] = not is_watched(weight)
            # A hook on the nodes of several tensors waits for all of them, in one and the same backward pass.
            if not self._plain[weight]:
                return None
        return tuple(PutOff(self, weight, transposed) for weight in found)

    @contextmanager
    def backward(self, micro_batch: int) -> Generator[None, None, None]:
        """Inside, backward passes belong to a micro-batch and are split."""
        self._micro_batch = micro_batch
        try:
            yield
        finally:
            self._micro_batch = None

    def _keep(self, weight: nn.Parameter, factors: _Factors) -> None:
        if self._micro_batch is None or not self._is_for_all():
            what = "inside of the step (torch.autograd.grad or backward)"
            if self._micro_batch is not None:
                what = "in the hook backward by torch.autograd.grad, or for some inputs only"
            raise RuntimeError(
                f"a gradient was taken {what}, through a layer whose weight's gradient schedule='zero-bubble' puts "
                "off; use schedule='1f1b'"
            )
        self._kept.setdefault(self._micro_batch, {}).setdefault(weight, []).append(factors)

    def _is_for_all(self) -> bool:
        """Whether the backward pass that runs now adds to every gradient that it comes to."""
        try:
            return torch._C._will_engine_execute_node(self._node)
        except RuntimeError:  # it only returns gradients
            return False

    @torch.no_grad()
    def compute(self, micro_batch: int) -> None:
        """Adds what the backward pass of a micro-batch has put off to the weights' gradients, in one piece for each."""
        kept = self._kept.pop(micro_batch, {})
        for weight in list(kept):
            self._accumulate(weight, [factors.checked() for factors in kept.pop(weight)])

    def _accumulate(self, weight: nn.Parameter, factors: list[tuple[Tensor, Tensor]]) -> None:
        is_plain = not (weight._backward_hooks or weight._post_accumulate_grad_hooks)
        if is_plain and weight.grad is not None and weight.grad.layout is torch.strided:
            _add_products(weight.grad, factors)
            return
        total = _sum_of_products(factors, weight.dtype)
        if is_plain and weight.grad is None and weight.is_contiguous():
            weight.grad = total
            return
        # Calls every hook of the weight, and lays its gradient out as the weight is.
        torch.autograd.backward(_view_of(weight), total)


def _sum_of_products(factors: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
    (gradient, x), *others = factors
    total = gradient.t().mm(x).to(dtype)
    _add_products(total, others)
    return total


def _add_products(total: Tensor, factors: list[tuple[Tensor, Tensor]]) -> None:
    """In place; without a matrix beside the sum, and so with one pass over memory less, where the dtypes allow it."""
    for gradient, x in factors:
        if gradient.dtype == total.dtype:
            total.addmm_(gradient.t(), x)
        else:
            total.add_(gradient.t().mm(x))


def is_watched(weight: nn.Parameter) -> bool:
    """Whether anybody holds, and so may have hooked on, the node that adds to the weight's gradient.

    It lives as long as somebody does; what is written down on it is gone with it.
    """
    _adding_node(weight).metadata[_SEEN] = True
    seen = _adding_node(weight).metadata.pop(_SEEN, False)
    return bool(seen)


def _adding_node(weight: Tensor) -> Any:
    grad_fn = _view_of(weight).grad_fn
    assert grad_fn is not None, "the weight requires gradients"
    return grad_fn.next_functions[0][0]


def _view_of(weight: Tensor) -> Tensor:
    with torch.enable_grad():
        return weight.view_as(weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, put_off: PutOff) -> Tensor:
    """Output of a linear layer whose weight's gradient is put off.

    Args:
        x: ``(..., inputs)``.
        weight: ``(outputs, inputs)``, or ``(inputs, outputs)`` if `put_off` is transposed.
        bias: ``(outputs,)``.
        put_off: where the weight's gradient goes.

    Returns:
        ``(..., outputs)`` in the dtype that ``nn.Linear`` would return.
    """
    weight = weight.detach()
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = cast_operand(x, dtype), cast_operand(weight, dtype)
        bias = None if bias is None else cast_operand(bias, dtype)
    return _Linear.apply(x, weight, bias, put_off.store.anchor, put_off)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, put_off: PutOff) -> Tensor:
        ctx.put_off = put_off
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        return product(x, weight, bias, put_off.transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        x, weight = ctx.saved_tensors
        rows = as_rows(grad)
        ctx.put_off.keep(rows, as_rows(x))
        dx = None
        if weight is not None:
            dx = rows.mm(weight.t() if ctx.put_off.transposed else weight).view(x.shape)
        return dx, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None


def refuse_second_derivatives() -> None:
    """Raises RuntimeError in a backward pass that is to be differentiated itself."""
    if torch.is_grad_enabled():  # only under create_graph
        raise RuntimeError(
            "second derivatives (create_graph=True) need the gradients of weights that schedule='zero-bubble' puts "
            "off; use schedule='1f1b'"
        )


class _SplitLinear(nn.Module):
    """Mixed into the class of plain linears while backward passes are split."""

    transposed = False
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        store: WeightGradients = self.__dict__[STORE]
        put_off = store.put_off(self.weight, transposed=self.transposed)
        if put_off is None:
            return super().forward(input)
        return linear(input, self.weight, self.bias, put_off[0])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies as the layer that it was: the class of this one cannot be imported by name."""
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        make, arguments, state, *others = reduced
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != STORE}
        arguments = tuple(type(self).__bases__[1] if part is type(self) else part for part in arguments)
        # Pickles let the usual maker, copyreg's, have no other class than that of the object itself.
        make = object.__new__ if make.__name__ == "__newobj__" else make
        return make, arguments, state, *others


class _SplitConv1D(_SplitLinear):
    """The same for transformers' Conv1D."""

    transposed = True


def _mixin_for(found: Any) -> Any:
    if found.forward is nn.Linear.forward:
        return _SplitLinear
    return _SplitConv1D if found.forward.__qualname__ == "Conv1D.forward" else None


@cache
def _split_class(found: Any, mixin: Any) -> Any:
    names = {"__module__": found.__module__, "__qualname__": found.__qualname__, "__doc__": found.__doc__}
    return type(found.__name__, (mixin, found), names)


def split_linears(root: nn.Module, store: WeightGradients) -> Callable[[], None]:
    """Lets every linear layer of a model put the gradient of its weight off; returns what undoes it.

    Layers with a forward of their own find the store in the attribute `STORE`.
    """
    changed: list[tuple[nn.Module, Any]] = []
    for module in root.modules():
        if not module._parameters:
            continue
        found: Any = type(module)
        changed.append((module, found))
        module.__dict__[STORE] = store
        mixin = _mixin_for(found)
        if mixin is not None:
            module.__class__ = _split_class(found, mixin)

    def undo() -> None:
        for module, original in changed:
            if module.__dict__.pop(STORE, None) is not None:
                module.__class__ = original

    return undo
