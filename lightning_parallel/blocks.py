"""Mechanism: the repeated blocks of a model, which pipeline stages and sequence parallelism are made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_parallel.patterns import close_names, digits_as_stars, match_names

__all__ = ["find_blocks", "resolve_blocks"]


@dataclass(frozen=True)
class _Run:
    """Neighbouring children of one container that are structurally alike."""

    container: str
    kind: object
    names: tuple[str, ...]
    parameters: int


def resolve_blocks(model: nn.Module, blocks: str | Sequence[str] = "auto") -> tuple[str, ...]:
    """Full names of the repeated blocks, in execution order.

    ``blocks`` is ``"auto"`` (see :func:`find_blocks`), one pattern (``"model.blocks.*"``), or a sequence of names and
    patterns. Patterns follow :func:`lightning_parallel.patterns.match_names`.

    Raises:
        ValueError: a pattern matches no module, a block is named twice or lies inside another one, or nothing is found.
    """
    if isinstance(blocks, str):
        if blocks == "auto":
            return find_blocks(model)
        blocks = (blocks,)
    names = [name for name, _ in model.named_modules() if name]
    found: list[str] = []
    for pattern in blocks:
        matched = match_names(pattern, names)
        if not matched:
            raise ValueError(
                f"blocks pattern {pattern!r} matches no module; close names: {close_names(pattern, names)}"
            )
        found.extend(matched)
    if not found:
        raise ValueError(f'blocks is empty; give "auto" or names such as {_candidates(model)}')
    for name in found:
        if found.count(name) > 1:
            raise ValueError(
                f"block {name!r} is named {found.count(name)} times in blocks={list(blocks)}; name it once"
            )
        outer = next((other for other in found if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ValueError(f"block {name!r} lies inside block {outer!r}; name only one of them")
    return tuple(found)


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """The repeated blocks: children of a ModuleList or Sequential that are alike and hold the most parameters.

    Containers whose names differ only in numbers (``layer1`` .. ``layer4`` of a ResNet, ``stages.*.blocks``) count as
    one. Shapes may differ between blocks, their class may not. A ModuleDict counts if all of it is blocks. A list of a
    single block is taken only when nothing is repeated.

    Raises:
        ValueError: the model has no such container; the text names alike modules, or the largest children, instead.
    """
    runs: dict[tuple[str, object], list[_Run]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            run = _longest_run(name, module)
            if run is not None and (not isinstance(module, nn.ModuleDict) or _is_all_blocks(module, run)):
                runs.setdefault((re.sub(r"\d+", "#", run.container), run.kind), []).append(run)
    groups = [tuple(group) for group in runs.values()]
    repeated = [group for group in groups if sum(len(run.names) for run in group) > 1]
    lists = [group for group in groups if isinstance(model.get_submodule(group[0].container), nn.ModuleList)]
    choice = repeated or lists
    if not choice:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList or Sequential of alike blocks; name the blocks yourself, "
            f"for example TensorPipelineStrategy(blocks={_alike(model) or _candidates(model)})"
        )
    best = max(choice, key=lambda group: sum(run.parameters for run in group))
    return tuple(name for run in best for name in run.names)


def _is_all_blocks(module: nn.ModuleDict, run: _Run) -> bool:
    """Whether a dict holds blocks, and not the named parts of a model (two embeddings among them)."""
    return len(run.names) == len(module) > 1 and all(
        next(child.children(), None) is not None for child in module.values()
    )


def _longest_run(container: str, module: nn.ModuleList | nn.Sequential | nn.ModuleDict) -> _Run | None:
    """The neighbouring alike children that hold the most parameters; None when no child has parameters."""
    best: _Run | None = None
    names: list[str] = []
    kind: object = None
    parameters = 0
    for leaf, child in module.named_children():
        size = sum(p.numel() for p in child.parameters())
        child_kind = _kind(child) if size else None
        if child_kind is None or child_kind != kind:
            names, parameters, kind = [], 0, child_kind
        if child_kind is None:
            continue
        names.append(f"{container}.{leaf}" if container else leaf)
        parameters += size
        if best is None or parameters > best.parameters:
            best = _Run(container, kind, tuple(names), parameters)
    return best


def _kind(module: nn.Module) -> object:
    """What two alike blocks have in common: the class, and for plain containers the classes inside."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return (type(module), tuple(_kind(child) for child in module.children()))
    return type(module)


def _alike(model: nn.Module) -> str:
    """The pattern of modules in a row that hold the most parameters, quoted; "" if there are none.

    Such are a `layer1` .. `layer4` that are attributes of their model, and all parts of a Sequential.
    """
    sizes: dict[tuple[str, type], list[int]] = {}
    for name, module in model.named_modules():
        if re.search(r"\d", name.rpartition(".")[2]) and next(module.children(), None) is not None:
            size = sum(p.numel() for p in module.parameters())
            sizes.setdefault((re.sub(r"\d+", "*", name), type(module)), []).append(size)
        if name and isinstance(module, nn.Sequential):
            parts = [sum(p.numel() for p in child.parameters()) for child in module]
            sizes.setdefault((f"{name}.*", nn.Sequential), []).extend(parts)
    repeated = {pattern: sum(found) for (pattern, _), found in sizes.items() if len(found) > 1}
    return repr(max(repeated, key=lambda pattern: repeated[pattern])) if repeated else ""


def _candidates(model: nn.Module) -> str:
    """Patterns of the children that hold the most parameters, as a list literal."""
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        if name and next(module.children(), None) is not None:
            size = sum(p.numel() for p in module.parameters())
            sizes[digits_as_stars(name)] = sizes.get(digits_as_stars(name), 0) + size
    if not sizes:
        sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_children()}
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:3]
    return str(largest or ["<module name>"])
