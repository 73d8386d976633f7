"""Mechanism: forward hooks of the user's on modules that compute with parts, and what they are handed there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_parallel.calls import tensors_in
from lightning_parallel.tensor_parallel.rules import TensorPlan
from lightning_parallel.tensor_parallel.styles import COLUMN_STYLES

__all__ = ["HookCall", "UserHooks"]

HookCall = Callable[[str, dict[str, list[Tensor]], Callable[[], Any]], Any]
"""Called as (name of the module, layer -> parts of its output that the hook is handed, runs the hook)."""


@dataclass(frozen=True)
class _Hooked:
    """A module, and whether what enters and leaves it is a part that nobody follows to it."""

    name: str
    module: nn.Module
    inputs_of: str = ""  # the layer that inputs are parts of
    outputs_of: str = ""

    def parts(self, is_after: bool, args: tuple[Any, ...]) -> dict[str, list[Tensor]]:
        """What a hook is handed: (module, inputs, [keywords,] [output])."""
        inputs, outputs = (args[1:-1], args[-1:]) if is_after else (args[1:], ())
        found = ((self.inputs_of, inputs), (self.outputs_of, outputs))
        return {layer: list(tensors_in(v)) for layer, v in found if layer}


class UserHooks:
    """Of one split model.

    Args:
        module: in its parallel form.
        plan: what was split.
    """

    def __init__(self, module: nn.Module, plan: TensorPlan) -> None:
        self._hooked = list(_hooked(module, plan))

    def count(self) -> int:
        """Hooks that there are now."""
        return sum(len(h.module._forward_hooks) + len(h.module._forward_pre_hooks) for h in self._hooked)

    @contextmanager
    def called_by(self, call: HookCall) -> Iterator[None]:
        """Inside, `call` runs every hook but our own."""
        undo: list[tuple[Any, int, Any]] = []
        for hooked in self._hooked:
            for is_after, hooks in ((False, hooked.module._forward_pre_hooks), (True, hooked.module._forward_hooks)):
                for key, hook in list(hooks.items()):
                    if not _is_ours(hook):
                        undo.append((hooks, key, hook))
                        hooks[key] = partial(_run, call, hooked, is_after, hook)
        try:
            yield
        finally:
            for hooks, key, hook in undo:
                if key in hooks:  # it may have removed itself
                    hooks[key] = hook


def _run(call: HookCall, hooked: _Hooked, is_after: bool, hook: Callable[..., Any], *args: Any) -> Any:
    return call(hooked.name, hooked.parts(is_after, args), partial(hook, *args))


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _hooked(module: nn.Module, plan: TensorPlan) -> Iterator[_Hooked]:
    """Split layers, everything in the modules that hold them, and with split sequences everything in blocks."""
    found = dict(module.named_modules(remove_duplicate=False))
    styles = {rule.name: rule.style for rule in plan.rules}
    tops = {region.name for region in plan.regions if region.name} | set(plan.blocks if plan.sequence_parallel else ())
    at_root = {region.row: region.columns[0] for region in plan.regions if not region.name and region.columns}
    columns = {name for region in plan.regions if not region.name for name in region.columns}
    seen: set[int] = set()
    for name, child in found.items():
        inside = any(name == top or name.startswith(f"{top}.") for top in tops)
        if id(child) in seen or not (inside or name in styles):
            continue
        seen.add(id(child))
        if plan.sequence_parallel and inside:
            yield _Hooked(name, child, name, name)
        else:
            is_column = name in columns and styles.get(name) in COLUMN_STYLES
            yield _Hooked(name, child, at_root.get(name, ""), name if is_column else "")
