"""The package's source as syntax trees: floors, imports and functions, read without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_parallel"
FLOORS = ("Pure", "Mechanism", "Glue")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported name: ``from a.b import c`` is ``target="a.b", name="c"``; ``import a.b`` has no name."""

    target: str
    name: str | None
    line: int
    typing_only: bool

    @property
    def full(self) -> str:
        return self.target if self.name is None else f"{self.target}.{self.name}"

    def within(self, package: str) -> bool:
        """Whether the import reaches `package` or something inside it."""
        return any(path == package or path.startswith(f"{package}.") for path in (self.target, self.full))


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    path: Path

    @property
    def relative(self) -> str:
        """Path below the package, such as ``pipeline/schedules.py``."""
        return self.path.relative_to(ROOT / PACKAGE).as_posix()

    @property
    def name(self) -> str:
        """Dotted name; a package's own file carries the package's name."""
        parts = [PACKAGE, *self.path.relative_to(ROOT / PACKAGE).with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The subpackage the file stands in; every file at the top is a room of its own."""
        parts = self.path.relative_to(ROOT / PACKAGE).parts
        return parts[0] if len(parts) > 1 else self.relative

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse("\n".join(self.lines), filename=str(self.path))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def floor(self) -> str:
        """The first word of the docstring, without its colon; empty when there is none."""
        words = (ast.get_docstring(self.tree) or "").split()
        return words[0].removesuffix(":") if words and words[0].endswith(":") else ""

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import of the file, also inside functions."""
        return tuple(_imports(self, self.tree, typing_only=False))

    @cached_property
    def functions(self) -> tuple[tuple[str, Function], ...]:
        """Qualified name and node of every function, methods and nested ones included."""
        return tuple(_functions(self.tree, ""))


def places(module: Module, nodes: Iterable[ast.AST]) -> list[str]:
    """Files and lines of `nodes`, for the failure's text."""
    return [f"{module.relative}:{getattr(node, 'lineno', 0)}" for node in nodes]


def package_modules() -> tuple[Module, ...]:
    """Every module of the package, in a fixed order."""
    return tuple(Module(path) for path in sorted((ROOT / PACKAGE).rglob("*.py")))


def own_targets(module: Module, modules: dict[str, Module], *, with_typing: bool) -> set[str]:
    """Names of the package's own modules that `module` imports."""
    found = set()
    for entry in module.imports:
        if not entry.within(PACKAGE) or (entry.typing_only and not with_typing):
            continue
        found.add(entry.full if entry.full in modules else entry.target)
    return found - {module.name}


def _imports(module: Module, node: ast.AST, *, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, None, child.lineno, typing_only) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            target = _absolute(module, child)
            yield from (Import(target, alias.name, child.lineno, typing_only) for alias in child.names)
        elif isinstance(child, ast.If) and _asks_for_type_checking(child.test):
            for statement in child.body:
                yield from _imports(module, ast.Module([statement], []), typing_only=True)
            for statement in child.orelse:
                yield from _imports(module, ast.Module([statement], []), typing_only=typing_only)
        else:
            yield from _imports(module, child, typing_only=typing_only)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    is_package = module.path.name == "__init__.py"
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *filter(None, [node.module])])


def _asks_for_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
            yield from _functions(child, f"{name}.")
        else:
            yield from _functions(child, prefix)
