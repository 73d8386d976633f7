"""Limits that keep the package readable, and habits that it does without."""

from __future__ import annotations

import ast
import sys

import pytest

from tests.architecture.source import ROOT, Function, Module, package_modules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_FILE = 400
MAX_FUNCTION = 60
MAX_CONSTRUCTOR = 8

MODULES = package_modules()
every_module = pytest.mark.parametrize("module", [pytest.param(m, id=m.relative) for m in MODULES])


def places(module: Module, nodes: list[ast.AST]) -> list[str]:
    """The lines of `nodes`, for the failure's text."""
    return [f"{module.relative}:{getattr(node, 'lineno', 0)}" for node in nodes]


@every_module
def test_file_length(module: Module) -> None:
    assert len(module.lines) <= MAX_FILE


@every_module
def test_function_length(module: Module) -> None:
    lengths = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in module.functions}
    assert not {name: length for name, length in lengths.items() if length > MAX_FUNCTION}


# Its argument names are the public contract; each goes straight into a config dataclass.
PUBLIC_CONSTRUCTORS = {"TensorPipelineStrategy.__init__"}


@every_module
def test_constructor_arguments(module: Module) -> None:
    """Own arguments of every ``__init__``; ``self``, ``*args`` and ``**kwargs`` do not count."""
    inits = [(name, node) for name, node in module.functions if name.endswith(".__init__")]
    counts = {name: num_arguments(node) for name, node in inits if name not in PUBLIC_CONSTRUCTORS}
    assert not {name: count for name, count in counts.items() if count > MAX_CONSTRUCTOR}


def num_arguments(function: Function) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1


@every_module
def test_no_global_statement(module: Module) -> None:
    assert not places(module, [node for node in ast.walk(module.tree) if isinstance(node, ast.Global)])


@every_module
def test_no_bare_except(module: Module) -> None:
    handlers = [node for node in ast.walk(module.tree) if isinstance(node, ast.ExceptHandler)]
    assert not places(module, [node for node in handlers if node.type is None])


@every_module
def test_no_print(module: Module) -> None:
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    assert not places(module, [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"])


@every_module
def test_no_star_import(module: Module) -> None:
    assert "*" not in {entry.name for entry in module.imports}


@every_module
def test_asserts_carry_a_text(module: Module) -> None:
    asserts = [node for node in ast.walk(module.tree) if isinstance(node, ast.Assert)]
    assert not places(module, [node for node in asserts if node.msg is None])


@every_module
def test_no_mutable_class_attributes(module: Module) -> None:
    classes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    values = [
        statement.value
        for node in classes
        for statement in node.body
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None
    ]
    assert not places(module, [value for value in values if is_mutable(value)])


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in {"list", "dict", "set", "defaultdict", "deque"}
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def test_mypys_strict_list_is_the_pure_floor() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (strict,) = [o["module"] for o in settings["tool"]["mypy"]["overrides"] if "disallow_any_generics" in o]
    assert sorted(strict) == sorted(module.name for module in MODULES if module.floor == "Pure")
