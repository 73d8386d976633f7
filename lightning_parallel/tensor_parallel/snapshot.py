"""Mechanism: a tree of modules as it was, to be put back when a conversion in place ends halfway."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["ModuleSnapshot"]

_REGISTRIES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
"""Hooks, parameters, buffers and children, which modules change in place."""


class ModuleSnapshot:
    """Class, attributes, hooks and registered tensors of every module; not the data of tensors.

    Args:
        root: of the tree.
    """

    def __init__(self, root: nn.Module) -> None:
        self._states: list[tuple[nn.Module, Any, dict[str, Any], dict[str, dict[str, Any]]]] = [
            (m, type(m), dict(vars(m)), {name: dict(vars(m)[name]) for name in _REGISTRIES if name in vars(m)})
            for m in root.modules()
        ]

    def restore(self) -> None:
        """Puts all of it back, as the same objects."""
        for module, kind, attributes, registries in self._states:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for name, entries in registries.items():
                attributes[name].clear()
                attributes[name].update(entries)
