"""Pure: runs a function once another package has been imported, whenever that happens, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["when_imported"]


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Calls ``action`` as soon as the module ``name`` is ready: now, or at the end of its first import.

    Until then a finder waits at the head of ``sys.meta_path``. It finds what the finders behind it find, so the module
    is the same as ever, with its own loader; nothing of it is changed.

    Args:
        name: the full name of a module; it need not exist.
        action: what it raises comes out of the import statement.
    """
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watch(name, action))


class _Watch(MetaPathFinder):
    """Looks like no finder for every module but one."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find; asking for it only is not importing it."""
        if fullname != self.name:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Then(spec.loader, self.finish)
                return spec
        return None

    def finish(self) -> None:
        """The module is ready: steps aside and acts."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._action()


class _Then(Loader):
    """A loader that calls a function after another one has executed the module, to which it is left alone."""

    def __init__(self, loader: Loader, action: Callable[[], None]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the true loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Executes it with its true loader in place, and acts."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action()
