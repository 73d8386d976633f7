"""Mechanism: notices when a step uses a split parameter outside of the layer that knows how to.

`weight.square().sum()` in a training step, or `F.linear(h, embedding.weight)`, means the whole parameter, but finds
this rank's part: the result would be wrong without an error. The first step of each kind is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_parallel.tensor_parallel.rules import TensorPlan

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


class SplitParameterError(ValueError):
    """A step used a split parameter as if it were whole."""


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
        self.ranks = ranks
        self._modules = _knowing_modules(module, plan)
        self._depth = 0
        self._watched: set[str] = set()
        compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in module.modules())
        self._can_watch = bool(self.names) and not compiled and not hasattr(module, "_orig_mod")

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Watches what runs inside if `what` (the name of a step) runs for the first time.

        Raises:
            SplitParameterError: it uses a split parameter outside of its layer.
        """
        if not self._can_watch or what in self._watched:
            yield
            return
        self._watched.add(what)
        handles = [h for module in self._modules for h in _counting(module, self._enter, self._leave)]
        depth, self._depth = self._depth, 0
        try:
            with _Watch(self, what):
                yield
        finally:
            self._depth = depth
            for handle in handles:
                handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around code inside of a step that knows about parts (an optimizer's step)."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _enter(self, *args: Any) -> None:
        self._depth += 1

    def _leave(self, *args: Any) -> None:
        self._depth -= 1

    def is_harmless(self, function: Callable[..., Any]) -> bool:
        """Whether a function may meet a split parameter at this moment."""
        return self._depth > 0 or _name_of(function) in _HARMLESS

    def refusal(self, parameter: str, function: Callable[..., Any], what: str) -> SplitParameterError:
        """The error for one use of a parameter."""
        layer = parameter.rpartition(".")[0]
        return SplitParameterError(
            f"{what} uses {parameter} outside of {layer or 'its module'} (in {_name_of(function)}), but each of "
            f"{self.ranks} tensor ranks holds only a part of it there; call the layer, keep it whole with plan="
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
        name = _name_of(func)
        if self.guard._depth == 0:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._check(leaf, func, name)
        result = func(*args, **kwargs)
        if name == "grad" and isinstance(result, Tensor) and id(args[0]) in self.guard.names:
            self.gradients[id(result)] = (f"the gradient of {self.guard.names[id(args[0])]}", result)
        return result

    def _check(self, tensor: Tensor, func: Any, name: str) -> None:
        if self.guard.is_harmless(func):
            return
        if id(tensor) in self.guard.names and name != "grad":
            raise self.guard.refusal(self.guard.names[id(tensor)], func, self.what)
        if id(tensor) in self.gradients and name != "grad":
            raise self.guard.refusal(self.gradients[id(tensor)][0], func, self.what)


def _knowing_modules(module: nn.Module, plan: TensorPlan) -> list[nn.Module]:
    """Modules whose forward is known to compute with parts; of a region that is the whole model only its layers."""
    names = {rule.name for rule in plan.rules} | {region.name for region in plan.regions if region.name}
    if plan.sequence_parallel:
        names |= set(plan.blocks)
    found = dict(module.named_modules(remove_duplicate=False))
    return list({id(found[name]): found[name] for name in names if name in found}.values())


def _counting(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> list[Any]:
    """Hooks around a module's forward; the second runs also if it raises."""
    return [
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave, always_call=True),
    ]


def _name_of(function: Any) -> str:
    """`norm` of `Tensor.norm`, `grad` of the getter or setter of `Tensor.grad`."""
    name = getattr(function, "__name__", str(function))
    owner = getattr(function, "__self__", None)
    return str(getattr(owner, "__name__", name)) if name in ("__get__", "__set__", "__delete__") else str(name)
