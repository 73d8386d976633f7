"""Floors: each module names its own, imports only what may lie below it, and a pure one loads without torch."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys

import pytest

from tests.architecture.source import FLOORS, PACKAGE, ROOT, Import, Module, own_targets, package_modules, places

MODULES = {module.name: module for module in package_modules()}
# What every room of the mechanism floor may use; apart from these, rooms meet only in the strategies.
TOOLS_OF_MECHANISM = {
    f"{PACKAGE}.{name}"
    for name in ("mesh", "comm", "blocks", "calls", "fakes", "copies", "products", "weight_gradients")
}
# A part of such a tool, which only the tool itself uses.
PARTS_OF_TOOLS = {f"{PACKAGE}.host_comm": f"{PACKAGE}.comm"}
RAW_DISTRIBUTED = {"mesh.py", "comm.py", "host_comm.py", "checkpoint/io.py"}
RAW_DISTRIBUTED |= {"strategies/fsdp_units.py", "strategies/_compat_fsdp.py"}
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
PRIVATE_LIGHTNING = ("strategies/_compat.py", "strategies/_compat_example.py", "strategies/_compat_loops.py")

# Refuses the heavy packages however they are asked for; run before the modules under test are imported.
BLOCKED_IMPORT = """
import importlib, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics",
                                      "transformers"}:
            raise ImportError(f"a pure module asked for {name}")

sys.meta_path.insert(0, Block())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_the_package_was_found() -> None:
    assert {PACKAGE, f"{PACKAGE}.layout", f"{PACKAGE}.comm"} <= MODULES.keys()
    assert {module.floor for module in MODULES.values()} == set(FLOORS)


def test_docstrings_name_the_floor() -> None:
    nameless = [module.relative for module in MODULES.values() if module.floor not in FLOORS]
    assert not nameless, f"the docstring must start with one of {', '.join(f'{f}:' for f in FLOORS)}"


def test_imports_point_down() -> None:
    assert not [
        f"{module.floor} {module.name} imports {MODULES[name].floor} {name}"
        for module in MODULES.values()
        for name in own_targets(module, MODULES, with_typing=True)
        if not may_import(module, MODULES[name])
    ]


def may_import(module: Module, target: Module) -> bool:
    allowed = {
        "Pure": target.floor == "Pure",
        "Mechanism": target.floor == "Pure"
        or target.name in TOOLS_OF_MECHANISM
        or PARTS_OF_TOOLS.get(target.name) == module.name
        or (target.floor == "Mechanism" and target.room == module.room),
        "Glue": True,
    }
    return allowed[module.floor]


def test_imports_have_no_cycle() -> None:
    graph = {name: own_targets(module, MODULES, with_typing=False) for name, module in MODULES.items()}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_foreign_imports_fit_the_floor() -> None:
    for module in MODULES.values():
        place = f"{module.relative}, line"
        for entry in module.imports:
            if entry.within("torch"):
                assert module.floor != "Pure", f"{place} {entry.line}: a pure module imports {entry.full}"
            if any(entry.within(package) for package in LIGHTNING):
                assert module.floor == "Glue", f"{place} {entry.line}: only glue imports {entry.full}"


def test_unit_tests_load_no_lightning() -> None:
    """It takes each process longer to load than all tests of a file: what needs it is tested in tests/glue."""
    loading = (*LIGHTNING, *(f"{PACKAGE}.{room}" for room in ("strategies", "callbacks", "metrics")))
    found = []
    for path in sorted((ROOT / "tests" / "unit").rglob("*.py")):
        test = Module(path)
        for entry in test.imports:
            if any(entry.within(package) for package in loading):
                found.append(f"{path.relative_to(ROOT)}:{entry.line} imports {entry.full}")
    assert not found


def test_raw_collectives_stay_in_few_files() -> None:
    others = [module for module in MODULES.values() if module.relative not in RAW_DISTRIBUTED]
    assert not [
        f"{module.relative}:{entry.line}: {entry.full}"
        for module in others
        for entry in module.imports
        if entry.within("torch.distributed")
    ]
    assert not [place for module in others for place in places(module, filter(reaches_distributed, module.nodes))]


def reaches_distributed(node: ast.AST) -> bool:
    """Whether the node is ``torch.distributed``."""
    is_attribute = isinstance(node, ast.Attribute) and node.attr == "distributed"
    return is_attribute and isinstance(node.value, ast.Name) and node.value.id == "torch"


def test_private_names_of_lightning_stay_in_one_file() -> None:
    assert not [
        f"{module.relative}:{entry.line}: {entry.full}"
        for module in MODULES.values()
        if module.relative not in PRIVATE_LIGHTNING
        for entry in module.imports
        if any(entry.within(package) for package in LIGHTNING) and is_private(entry)
    ]


def is_private(entry: Import) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in entry.full.split("."))


def test_package_and_pure_modules_load_without_torch() -> None:
    _import_without_torch(PACKAGE, *(name for name, module in MODULES.items() if module.floor == "Pure"))


def test_the_import_block_works() -> None:
    with pytest.raises(AssertionError, match="a pure module asked for torch"):
        _import_without_torch(f"{PACKAGE}.comm")


def _import_without_torch(*names: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT, *names],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
