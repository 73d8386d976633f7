"""Limits that keep the package readable, and habits that it does without."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from typing import TypeVar

from tests.architecture.source import ROOT, Function, package_modules, places

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_FILE = 400
MAX_FUNCTION = 60
MAX_CONSTRUCTOR = 8

Node = TypeVar("Node", bound=ast.AST)

# One test per rule over all files: a test per file and rule is thousands of tests, and takes longer than it looks.
MODULES = package_modules()


def offending(kind: type[Node], is_wrong: Callable[[Node], bool]) -> list[str]:
    """Where the package has nodes of this kind that are wrong."""
    return [
        place
        for module in MODULES
        for place in places(module, (node for node in module.nodes if isinstance(node, kind) and is_wrong(node)))
    ]


def test_file_length() -> None:
    lengths = {module.relative: len(module.lines) for module in MODULES}
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE}


def test_function_length() -> None:
    lengths = {
        f"{module.relative}: {name}": (node.end_lineno or 0) - node.lineno + 1
        for module in MODULES
        for name, node in module.functions
    }
    assert not {name: length for name, length in lengths.items() if length > MAX_FUNCTION}


# Its argument names are the public contract; each goes straight into a config dataclass.
PUBLIC_CONSTRUCTORS = {"TensorPipelineStrategy.__init__"}


def test_constructor_arguments() -> None:
    """Own arguments of every ``__init__``; ``self``, ``*args`` and ``**kwargs`` do not count."""
    counts = {
        f"{module.relative}: {name}": num_arguments(node)
        for module in MODULES
        for name, node in module.functions
        if name.endswith(".__init__") and name not in PUBLIC_CONSTRUCTORS
    }
    assert not {name: count for name, count in counts.items() if count > MAX_CONSTRUCTOR}


def num_arguments(function: Function) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1


def test_no_global_statement() -> None:
    assert not offending(ast.Global, lambda node: True)


def test_no_bare_except() -> None:
    assert not offending(ast.ExceptHandler, lambda handler: handler.type is None)


def test_no_print() -> None:
    assert not offending(ast.Call, lambda call: isinstance(call.func, ast.Name) and call.func.id == "print")


def test_no_star_import() -> None:
    assert not [module.relative for module in MODULES if "*" in {entry.name for entry in module.imports}]


def test_asserts_carry_a_text() -> None:
    assert not offending(ast.Assert, lambda statement: statement.msg is None)


def test_no_mutable_class_attributes() -> None:
    assert not offending(ast.ClassDef, lambda node: any(map(assigns_a_mutable, node.body)))


def assigns_a_mutable(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return False
    return is_mutable(statement.value)


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in {"list", "dict", "set", "defaultdict", "deque"}
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def test_mypys_strict_list_is_the_pure_floor() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (strict,) = [o["module"] for o in settings["tool"]["mypy"]["overrides"] if "disallow_any_generics" in o]
    assert sorted(strict) == sorted(module.name for module in MODULES if module.floor == "Pure")
