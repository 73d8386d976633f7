"""Mechanism: notices when a step takes this rank's part of a parameter or of an activation for the whole.

`weight.square().sum()` in a training step, `F.linear(h, embedding.weight)`, or a penalty on hidden activations that a
feed-forward layer has stored, mean the whole, but find a part: the result would be wrong without an error. Some steps
of each kind are watched: what column layers return, and all that is computed from it, counts as a part until a row
layer sums it over the ranks. The user's forward hooks inside of split modules may not use parts either, and a module
that holds split layers must call them: `F.linear(x, self.fc.weight)` would leave out what they do around it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_parallel.calls import name_of, tensors_in
from lightning_parallel.tensor_parallel.rules import TensorPlan
from lightning_parallel.tensor_parallel.styles import COLUMN_STYLES
from lightning_parallel.tensor_parallel.user_hooks import UserHooks

__all__ = ["SplitParameterError", "SplitParameterGuard"]

# What tells nothing of the values, and nothing that differs between a whole parameter and a part of it.
_HARMLESS = frozenset(
    {
        *("device", "dtype", "requires_grad", "is_leaf", "grad_fn", "layout", "is_cuda", "is_meta", "is_cpu", "names"),
        *("is_mps", "is_xpu", "is_quantized", "is_sparse", "is_nested", "grad_dtype", "output_nr", "_version", "_base"),
        *("dim", "ndim", "ndimension", "is_floating_point", "is_complex", "element_size", "requires_grad_", "__hash__"),
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "zero_", "detach_", "__format__"),
        *("__repr__", "__setstate__", "__reduce_ex__", "__deepcopy__", "_backward_hooks", "is_inference", "is_shared"),
        *("itemsize", "_is_view", "is_contiguous", "has_names", "_grad"),
    }
)


_CACHES = "transformers.cache_utils"
_READS = frozenset({"item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__complex__"})


class SplitParameterError(ValueError):
    """A step used a part of a parameter or of an activation as if it were whole."""


class SplitParameterGuard:
    """Watches steps of one split module.

    Args:
        module: the module in its parallel form.
        plan: what was split.
        names: id of a parameter -> its name, for those of which a rank holds or computes only a part.
        ranks: tensor ranks that share them.
    """

    def __init__(self, module: nn.Module, plan: TensorPlan, names: Mapping[int, str], ranks: int) -> None:
        self.names = dict(names)
        self._layers = _split_layers(module, plan)
        self._of_layers = {id(p) for layer in self._layers.values() for p in layer.parameters()}
        self.ranks = ranks
        self._modules = _knowing_modules(module, plan)
        self._hooks = UserHooks(module, plan)
        self._columns = _columns(module, plan)
        self._whole = {id(module.get_submodule(r.name)) for r in plan.rules} - self._columns.keys()
        self._depth = 0  # modules running, one in another, that compute with parts
        self._layer_depth = 0  # of them split layers
        self._parts: WeakTensorKeyDictionary | None = None  # activations of which a rank has a part -> where from
        self._runs: dict[str, tuple[int, int]] = {}  # step -> how often it has run, hooks when it was last watched
        self._hook = ""  # the module whose hook is running
        compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in module.modules())
        self._can_watch = bool(self.names) and not compiled and not hasattr(module, "_orig_mod")

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Watches what runs inside if it is the turn of `what` (the name of a step).

        The first, second, fourth, eighth, ... run is watched, as a step may begin to do something later on, and the one
        after hooks were added or removed.

        Raises:
            SplitParameterError: it uses a split parameter outside of its layer, or an activation that is a part.
        """
        count, hooks = self._runs.get(what, (0, -1))
        now = self._hooks.count() if self._can_watch else hooks
        self._runs[what] = (count + 1, now)
        if not self._can_watch or (now == hooks and (count + 1) & count):
            yield
            return
        self._parts = WeakTensorKeyDictionary()
        depths, self._depth, self._layer_depth = (self._depth, self._layer_depth), 0, 0
        with self._hooks.called_by(self._call_hook):
            handles = [h for module in self._modules for h in _counting(module, self._enter, self._leave)]
            try:
                with _Watch(self, what):
                    yield
            finally:
                self._depth, self._layer_depth = depths
                self._parts, self._hook = None, ""
                for handle in handles:
                    handle.remove()

    def _call_hook(self, name: str, parts: Mapping[str, Sequence[Tensor]], run: Callable[[], Any]) -> Any:
        """Runs a hook of the user's, which is no part of the module that it hangs on."""
        following = self._parts
        if following is None:
            return run()
        new = [(t, layer) for layer, tensors in parts.items() for t in tensors if t not in following]
        for tensor, layer in new:
            following[tensor] = layer
        outer = self._depth, self._layer_depth, self._hook
        self._depth, self._layer_depth, self._hook = 0, 0, name
        try:
            return run()
        finally:
            self._depth, self._layer_depth, self._hook = outer
            for tensor, _ in new:
                following.pop(tensor, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around code inside of a step that knows about parts (an optimizer's step)."""
        self._depth += 1
        self._layer_depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._layer_depth -= 1

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        self._layer_depth += id(module) in self._layers

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        self._layer_depth -= id(module) in self._layers
        if self._parts is None:
            return
        for tensor in tensors_in((output,)):
            if id(module) in self._columns:
                self._parts[tensor] = self._columns[id(module)]
            elif id(module) in self._whole:
                self._parts.pop(tensor, None)  # the sum over the ranks, or gathered

    def origin_of(self, tensor: Tensor) -> str | None:
        """The column layer that an activation comes from, of which this rank has a part."""
        return self._parts.get(tensor) if self._parts else None

    def note_part(self, result: Any, origin: str) -> None:
        """What was computed from a part is one, too."""
        for tensor in tensors_in((result,)):
            if self._parts is not None:
                self._parts[tensor] = origin

    def is_harmless(self, name: str) -> bool:
        """Whether a function may meet a part at this moment."""
        return name in _HARMLESS or (self._depth > 0 and name not in _READS)

    def knows(self, parameter: Tensor) -> bool:
        """Whether what runs now takes a parameter for the part that it is: its layer, or what sums its gradient."""
        return (self._layer_depth if id(parameter) in self._of_layers else self._depth) > 0

    def activation_refusal(self, layer: str, name: str, what: str) -> SplitParameterError:
        """The error for one use of an activation."""
        where = "as a number" if name in _READS else f"outside of the module that holds it (in {name})"
        instead = "hook the module that holds the layer, " if self._hook else ""
        return SplitParameterError(
            f"{self._user_of(what)} uses a value computed from the output of {layer} {where}, but each of {self.ranks} "
            f"tensor ranks has only a part of it; {instead}keep the layer and its partner whole with the style "
            f"'replicate', or use tensor_parallel_size=1"
        )

    def _user_of(self, what: str) -> str:
        return f"a forward hook on {self._hook}" if self._hook else what

    def refusal(self, parameter: str, function: Callable[..., Any], what: str) -> SplitParameterError:
        """The error for one use of a parameter."""
        layer = parameter.rpartition(".")[0]
        return SplitParameterError(
            f"{self._user_of(what)} uses {parameter} outside of {layer or 'its module'} (in {name_of(function)}), but "
            f"each of {self.ranks} tensor ranks holds only a part of it there; call the layer, keep it whole with plan="
            f"{{..., {layer!r}: 'replicate'}}, or use tensor_parallel_size=1"
        )


class _Watch(TorchFunctionMode):
    """Sees every function of torch that the step calls."""

    def __init__(self, guard: SplitParameterGuard, what: str) -> None:
        super().__init__()
        self.guard = guard
        self.what = what
        self.gradients: dict[int, tuple[str, Tensor]] = {}  # kept alive, so that ids are not used again

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        origin = None
        for tensor in tensors_in((*args, *kwargs.values())):
            found = self.guard.origin_of(tensor)
            self._check(tensor, found, func, name)
            origin = origin or found
        result = func(*args, **kwargs)
        if origin is not None:
            self.guard.note_part(result, origin)
        if name == "grad" and isinstance(result, Tensor) and id(args[0]) in self.guard.names:
            self.gradients[id(result)] = (f"the gradient of {self.guard.names[id(args[0])]}", result)
        return result

    def _check(self, tensor: Tensor, origin: str | None, func: Any, name: str) -> None:
        if name in _HARMLESS:
            return
        if origin is not None and not self.guard.is_harmless(name) and not _is_asked_by_cache(name):
            raise self.guard.activation_refusal(origin, name, self.what)
        if name == "grad":
            return
        if id(tensor) in self.guard.names and not self.guard.knows(tensor):
            raise self.guard.refusal(self.guard.names[id(tensor)], func, self.what)
        if id(tensor) in self.gradients and not self.guard.is_harmless(name):
            raise self.guard.refusal(self.gradients[id(tensor)][0], func, self.what)


def _is_asked_by_cache(name: str) -> bool:
    """Whether one of transformers' caches of keys and values calls a function, which works on each head by itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "torch.overrides", "torch._tensor"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _CACHES and name not in _READS


def _knowing_modules(module: nn.Module, plan: TensorPlan) -> list[nn.Module]:
    """Modules whose forward is known to compute with parts; of a region that is the whole model only its layers."""
    names = {rule.name for rule in plan.rules} | {region.name for region in plan.regions if region.name}
    if plan.sequence_parallel:
        names |= set(plan.blocks)
    found = dict(module.named_modules(remove_duplicate=False))
    return list({id(found[name]): found[name] for name in names if name in found}.values())


def _split_layers(module: nn.Module, plan: TensorPlan) -> dict[int, nn.Module]:
    """Modules that hold split parameters of their own, by id."""
    found = dict(module.named_modules(remove_duplicate=False))
    return {id(found[r.name]): found[r.name] for r in plan.rules if r.shards and r.name in found}


def _columns(module: nn.Module, plan: TensorPlan) -> dict[int, str]:
    """Column layers whose outputs stay split, by id; those of pairs in the whole model itself are not followed."""
    if plan.sequence_parallel:
        return {}
    styles = {rule.name: rule.style for rule in plan.rules}
    inside = {column for region in plan.regions if region.name for column in region.columns}
    found = dict(module.named_modules(remove_duplicate=False))
    return {id(found[n]): n for n in inside if n in found and styles.get(n) in COLUMN_STYLES}


def _counting(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> list[Any]:
    """Hooks around a module's forward and inside of the user's; the second runs also if it raises."""
    return [
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave, always_call=True, prepend=True),
    ]
