"""Mechanism: notices when a step uses parameters of stage 3 that are elsewhere, and read as not-a-number.

A unit is gathered when its module is called. `sum(p.abs().sum() for p in self.parameters())`, a weight of a block that
is read outside of it, or a method of a block that is not its forward, find nothing there. Some steps are watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from lightning_parallel.calls import name_of, tensors_in

__all__ = ["AbsentParameterError", "UnitWatch"]

# What tells nothing of the values.
_HARMLESS = frozenset(
    {
        *("shape", "size", "numel", "nelement", "nbytes", "itemsize", "element_size", "dim", "ndim", "ndimension"),
        *("device", "dtype", "layout", "names", "has_names", "is_floating_point", "is_complex", "is_inference"),
        *("is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_quantized", "is_sparse", "is_nested", "is_leaf"),
        *("requires_grad", "requires_grad_", "grad", "_grad", "grad_fn", "grad_dtype", "retain_grad", "register_hook"),
        *("register_post_accumulate_grad_hook", "_backward_hooks", "_version", "output_nr", "_base", "_is_view"),
        *("__hash__", "__len__", "is_contiguous"),
    }
)


class AbsentParameterError(RuntimeError):
    """A step used a parameter that was not gathered."""


class UnitWatch:
    """Watches steps of a module whose parameters are in units.

    Args:
        module: the module.
        is_absent: whether a parameter is neither whole here nor on its way to be made so by what runs.
        scopes: name of each unit's module, by names of its parameters.
    """

    def __init__(self, module: nn.Module, is_absent: Callable[[Tensor], bool], scopes: Mapping[str, str]) -> None:
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.is_absent = is_absent
        self.scopes = scopes
        self._runs: dict[str, int] = {}
        # Functions that were compiled do not tell what they call.
        compiled = (m for m in module.modules() if hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None))
        self._can_watch = next(compiled, None) is None

    def _is_due(self, what: str) -> bool:
        """Whether this run of something, which is counted, is the first, second, fourth, eighth, ..."""
        count = self._runs[what] = self._runs.get(what, 0) + 1
        return not count & (count - 1)

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Watches the first, second, fourth, eighth, ... run of a step, as it may begin to do something later on.

        Args:
            what: name of the step.

        Raises:
            AbsentParameterError: it uses a parameter outside of the module that is gathered for it.
        """
        if not self._is_due(what) or not self._can_watch:
            yield
            return
        with _Watch(self, what):
            yield

    def refuse_kept(self, loss: Tensor) -> None:
        """Looks through the graph of some losses for functions that keep parameters past autograd.

        Args:
            loss: about to be differentiated.

        Raises:
            AbsentParameterError: there is one, whose backward would find nothing.
        """
        if not self._is_due("backward"):
            return
        for node in _nodes_of(loss):
            for tensor in tensors_in(vars(node).values()) if isinstance(node, BackwardCFunction) else ():
                name = self.names.get(id(tensor))
                if name is not None and self.is_absent(tensor):
                    kind = type(node).__name__.removesuffix("Backward")
                    raise AbsentParameterError(
                        f"{kind} keeps {name} as an attribute of ctx, but stage 3 of ZeRO frees it before the backward "
                        "pass; call ctx.save_for_backward, by which it is found again, or use stage 2"
                    )

    def refusal(self, name: str, function: str, what: str) -> AbsentParameterError:
        """The error for one use of a parameter."""
        scope = self.scopes[name]
        return AbsentParameterError(
            f"{what} uses {name} (in {function}) while {scope} is not running, but stage 3 of ZeRO has it on this rank "
            f"only then; call {scope} itself, enter `with trainer.strategy.full_params():` around what needs all "
            "parameters, or use stage 2"
        )


class _Watch(TorchFunctionMode):
    """Sees every function of torch that the step calls."""

    def __init__(self, watch: UnitWatch, what: str) -> None:
        super().__init__()
        self.watch = watch
        self.what = what

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name not in _HARMLESS:
            for tensor in tensors_in((*args, *kwargs.values())):
                found = self.watch.names.get(id(tensor))
                if found is not None and self.watch.is_absent(tensor):
                    raise self.watch.refusal(found, name, self.what)
        return func(*args, **kwargs)


def _nodes_of(loss: Tensor) -> Iterator[Any]:
    """Every node of a loss's graph, once."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]
