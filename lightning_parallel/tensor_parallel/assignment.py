"""Mechanism: which style each module gets, before sizes are looked at; and the user's patterns turned into that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_parallel.patterns import close_names, match_names
from lightning_parallel.tensor_parallel.heads import attribute_patch
from lightning_parallel.tensor_parallel.rules import HeadPatch
from lightning_parallel.tensor_parallel.styles import canonical_style

__all__ = ["Assignment", "assign_patterns"]


@dataclass
class Assignment:
    """Styles by module name, gathered step by step.

    Attributes:
        styles: canonical style of each module.
        parameters: canonical style of each bare parameter.
        patches: attribute patches that are known or were asked for.
        known: modules of which it is known, not guessed, that the styles are right.
        guessed: modules found by their names only; a pair of them that does not fit is left whole.
        optional: guessed modules that are left whole when their sizes do not split either.
        alternatives: further styles for the guessed columns of a row, by the row's name.
        notes: why something that looks like a pair was left whole.
    """

    styles: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    patches: list[HeadPatch] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    guessed: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    alternatives: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def assign_patterns(model: nn.Module, plan: Mapping[str, str], ranks: int) -> Assignment:
    """Expand the user's patterns. Of several patterns for one module, the one with the fewest ``*`` counts.

    Raises:
        ValueError: a pattern that matches nothing, an unknown style, or an empty plan.
    """
    if not plan:
        raise ValueError('plan is empty; give patterns such as {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}')
    assignment = Assignment()
    modules = {name: module for name, module in model.named_modules() if name}
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, str] = {}
    for pattern in sorted(plan, key=lambda pattern: -pattern.count("*")):
        style = canonical_style(plan[pattern], pattern)
        if style == "local":
            assignment.patches.extend(_attribute_patches(modules, pattern, ranks))
        elif matched := match_names(pattern, list(modules)):
            found.update(dict.fromkeys(matched, style))
        elif matched := match_names(pattern, parameters):
            assignment.parameters.update(dict.fromkeys(matched, style))
        else:
            raise ValueError(
                f"plan pattern {pattern!r} matches no module; close names: {close_names(pattern, modules)}"
            )
    assignment.styles = {name: found[name] for name in modules if name in found}
    for name in assignment.styles:
        parent = name.rpartition(".")[0]
        if parent and isinstance(modules[parent], nn.MultiheadAttention):
            raise ValueError(
                f"plan names {name!r}, but nn.MultiheadAttention uses it without calling it; "
                f"give {parent!r} the style 'attention' instead"
            )
    return assignment


def _attribute_patches(modules: Mapping[str, nn.Module], pattern: str, ranks: int) -> list[HeadPatch]:
    path, _, attribute = pattern.rpartition(".")
    matched = [name for name in match_names(path, list(modules)) if attribute in vars(modules[name])] if path else []
    if not matched:
        raise ValueError(
            f"plan pattern {pattern!r} (local) matches no integer attribute of a module; "
            f"close names: {close_names(path, modules)}"
        )
    return [attribute_patch(name, modules[name], attribute, ranks) for name in matched]
