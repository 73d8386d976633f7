"""Mechanism: arguments with which a module of a user's model can be called, from its signature or from its callers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_parallel.fakes import fake_like, quiet_fakes
from lightning_parallel.tensor_parallel.rehearsal import Call, Mismatch, clone_module, tensors_in

__all__ = ["Material", "captured_calls", "direct_calls", "forward_names", "random_module"]

# Small and without common factors, so that a view over the wrong dimensions does not fit by accident.
_BATCH, _SEQUENCE = 3, 5
_SEED = 20240229
_SAME_INPUT = ("q", "k", "v", "query", "key", "value", "queries", "keys", "values")
_SECOND_INPUT = ("context", "memory", "encoder_hidden_states", "cond", "kv", "y", "z")


@dataclass(frozen=True)
class Material:
    """What a rehearsal's tensors are made of.

    ``thin`` matrices repeat one random vector, without memory for the copies: along a split dimension every row (or
    column) still differs from the others, so that a slice in a wrong place shows.
    """

    dtype: torch.dtype
    thin: bool = False

    def random(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, dtype=self.dtype, generator=generator)

    def matrix(self, shape: torch.Size, split: int, generator: torch.Generator) -> Tensor:
        """A matrix that keeps activations ordinary; ``split`` is the dimension along which it may be cut."""
        varied = [size if not self.thin or dim == split else 1 for dim, size in enumerate(shape)]
        return (self.random(tuple(varied), generator) / shape[-1] ** 0.5).expand(shape)

    def like(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        """Values for a tensor of which only shape and dtype are known: no mask may hide everything."""
        if tensor.is_floating_point():
            return self.random(tensor.shape, generator)
        if tensor.is_complex():
            return torch.complex(self.random(tensor.shape, generator), self.random(tensor.shape, generator))
        if tensor.dtype == torch.bool:
            return torch.ones(tensor.shape, dtype=torch.bool).tril()
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


def random_module(module: nn.Module, material: Material, split_dims: Mapping[str, int]) -> nn.Module:
    """A copy of ``module`` with random parameters of ordinary size; buffers keep their values where they have some.

    ``split_dims`` tells along which dimension a parameter is cut.
    """
    generator = torch.Generator().manual_seed(_SEED)

    def convert(name: str, old: Tensor) -> Tensor:
        if isinstance(old, nn.Parameter):
            if not old.is_floating_point():
                raise Mismatch(f"its parameter {name!r} is of type {old.dtype}")
            if old.dim() < 2:
                noise = material.random(old.shape, generator)
                return nn.Parameter(noise * 0.1 + (0.0 if name.endswith("bias") else 1.0))
            return nn.Parameter(material.matrix(old.shape, split_dims.get(name, 0), generator))
        kept = torch.ones(old.shape, dtype=old.dtype) if old.is_meta else old.detach().cpu().clone()
        return kept.to(material.dtype) if kept.is_floating_point() else kept

    return clone_module(module, convert)


def forward_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the positional parameters of the module's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds)


def direct_calls(module: nn.Module, width: int, second_width: int, material: Material) -> Iterator[Call]:
    """Calls that the signature alone suggests: activations (3, 5, width), then (3, width), and None for masks."""
    generator = torch.Generator().manual_seed(_SEED)
    x = material.random((_BATCH, _SEQUENCE, width), generator)
    second = material.random((_BATCH, _SEQUENCE, second_width), generator)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    args: list[Any] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        wanted = parameter.default is inspect.Parameter.empty or parameter.name in _SAME_INPUT
        if parameter.kind not in kinds or (not wanted and args):
            continue
        if not args or parameter.name in _SAME_INPUT:
            args.append(x if not args or second_width == width else second)
        elif parameter.name in _SECOND_INPUT:
            args.append(second)
        elif "mask" in parameter.name:
            args.append(None)
        else:
            return
    if args:
        yield Call(tuple(args))
        yield Call(tuple(value[:, 0] if isinstance(value, Tensor) else value for value in args))


def captured_calls(model: nn.Module, name: str, width: int, material: Material) -> Iterator[Call]:
    """Calls that the modules around ``name`` make, found by running them on fake tensors.

    The model's ``example_input_array`` is tried first; then, from the outside in, every module around it with token
    numbers, and with activations.
    """
    parents = [name]
    while parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    example = getattr(model, "example_input_array", None)
    attempts: list[tuple[str, Callable[[], tuple[Any, ...]]]] = []
    if example is not None:
        attempts.append(("", lambda: example if isinstance(example, tuple) else (example,)))
    for parent in reversed(parents[1:]):
        attempts.append((parent, lambda: (torch.zeros(_BATCH, _SEQUENCE, dtype=torch.long),)))
        attempts.append((parent, lambda: (torch.empty(_BATCH, _SEQUENCE, width),)))
    for parent, make_args in attempts:
        found = _capture(model.get_submodule(parent), name[len(parent) :].lstrip("."), make_args)
        if found is not None:
            yield _materialised(found, model.get_submodule(name), material)


class _Reached(Exception):
    """Ends a capturing run as soon as the module is called."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


def _capture(parent: nn.Module, inner: str, make_args: Callable[[], tuple[Any, ...]]) -> Call | None:
    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(Call(args, kwargs))

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with quiet_fakes(), torch.random.fork_rng(devices=[]):
        try:
            clone = clone_module(parent, lambda _, old: fake_like(mode, old, torch.device("cpu"))).eval()
            clone.get_submodule(inner).register_forward_pre_hook(stop, with_kwargs=True)
            with mode:
                clone(*make_args())
        except _Reached as reached:
            return reached.call
        except Exception:  # the boundary to code that is not ours: this way of calling it does not work
            return None
    return None


def _materialised(call: Call, module: nn.Module, material: Material) -> Call:
    """The call with real tensors. Objects that may hold state (a cache) give way to the parameter's default."""
    generator = torch.Generator().manual_seed(_SEED)
    made = {id(t): material.like(t, generator) for t in tensors_in((call.args, call.kwargs))}
    parameters = inspect.signature(module.forward).parameters
    order = list(parameters)

    def real(value: Any) -> Any:
        if isinstance(value, Tensor):
            return made[id(value)]
        if type(value) in (tuple, list):
            return type(value)(real(item) for item in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(real(item) for item in value))
        if type(value) is dict:
            return {key: real(item) for key, item in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: real(getattr(value, f.name)) for f in fields(value) if f.init})
        return value

    def given(name: str, value: Any) -> Any:
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        plain = isinstance(value, (Tensor, tuple, list, dict, str, bool, int, float, torch.dtype, torch.device))
        return value if value is None or plain or default is inspect.Parameter.empty else default

    args = tuple(real(given(order[i] if i < len(order) else "", value)) for i, value in enumerate(call.args))
    return Call(args, {name: real(given(name, value)) for name, value in call.kwargs.items()})
