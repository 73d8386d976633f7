"""Mechanism: a resolved tensor-parallel plan as data: what happens to each module, and the tag of each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lightning_parallel.parameters import ParameterTag
from lightning_parallel.patterns import digits_as_stars
from lightning_parallel.tensor_parallel.sharding import ShardSpec

__all__ = ["HeadPatch", "ModuleRule", "Region", "TensorPlan", "is_conv1d", "is_matrix_layer"]


@dataclass(frozen=True)
class ModuleRule:
    """What happens to one module.

    Attributes:
        name: full name in the user's model.
        style: canonical style name, see :mod:`lightning_parallel.tensor_parallel.styles`.
        shards: (own parameter, how it is split). Own parameters that are missing here stay whole.
        partial: the whole own parameters see only local heads or rows, so that their gradients must be summed.
        shared_input: columns with the same id read the same tensor and share one backward all-reduce; "" for none.
    """

    name: str
    style: str
    shards: tuple[tuple[str, ShardSpec], ...] = ()
    partial: bool = False
    shared_input: str = ""

    def shard(self, leaf: str) -> ShardSpec | None:
        """How the own parameter ``leaf`` is split."""
        return dict(self.shards).get(leaf)


@dataclass(frozen=True)
class HeadPatch:
    """An integer attribute (a head count or a width) that is ``local`` instead of ``full`` while parallel."""

    module: str
    attribute: str
    full: int
    local: int


@dataclass(frozen=True)
class Region:
    """Column layers and the row layer that sums their products, inside the module that holds them all.

    Attributes:
        name: the module that holds them, the lowest one.
        columns: names of the column layers, in module order.
        row: name of the row layer.
        shared: groups of columns that read the same tensor.
        patches: integer attributes that change while parallel.
        stand_in: parameters of the module's forward whose tensor is replaced by one that only tells the local shape.
        local_views: ``view`` and ``reshape`` calls that ask for the full width get the local one.
        partial: whole parameters between the columns and the row: each tensor rank holds part of their gradient.
        random: random numbers (dropout) may be drawn between the columns and the row.
        evidence: how it is known that the split computes the same: "known", "checked" or "given".
    """

    name: str
    columns: tuple[str, ...]
    row: str
    shared: tuple[tuple[str, ...], ...] = ()
    patches: tuple[HeadPatch, ...] = ()
    stand_in: tuple[str, ...] = ()
    local_views: bool = False
    partial: tuple[str, ...] = ()
    random: bool = True
    evidence: str = "given"


@dataclass(frozen=True)
class TensorPlan:
    """What tensor parallelism does to a model. An empty plan (size 1) does nothing.

    Attributes:
        tensor_parallel_size: number of tensor ranks.
        rules: one per module that changes.
        regions: one per row layer, with everything that its module needs to run on local shapes.
        replicated: names of the Linear and Embedding layers that nothing covers: they stay whole on every rank.
        notes: why layers that look like a pair were left whole.
        sequence_parallel: activations between regions are split along ``sequence_dim``.
        blocks: the repeated blocks, in execution order (needed for sequence parallelism only).
    """

    tensor_parallel_size: int
    rules: tuple[ModuleRule, ...] = ()
    regions: tuple[Region, ...] = ()
    replicated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sequence_parallel: bool = False
    sequence_dim: int = 1
    blocks: tuple[str, ...] = ()

    def tags(self, model: nn.Module) -> dict[str, ParameterTag]:
        """One tag per parameter of the full, uncut model, by its first name in ``named_parameters()``.

        Raises:
            ValueError: two names of one tied parameter ask for different splits, or ranks would hold part of the
                gradient for one of them, and all of it for another.
        """
        specs = {(id(model.get_submodule(rule.name)), leaf): spec for rule in self.rules for leaf, spec in rule.shards}
        partial = self._partial(model)
        aliases: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append((name, parameter))
        tags: dict[str, ParameterTag] = {}
        for named in aliases.values():
            name, parameter = named[0]
            found = {alias: specs.get(_place(model, alias)) for alias, _ in named}
            spec = found[name]
            odd = next((alias for alias, other in found.items() if other != spec), None)
            if odd is not None:
                raise ValueError(
                    f"{name!r} and {odd!r} are one tied weight, but the plan does not split it in the same way for "
                    f"both; use 'vocab' for the embedding together with 'colwise_gather' for the head"
                )
            split_gradient = spec is None and self._has_partial_gradient(model, list(found), partial)
            tags[name] = ParameterTag(name, tuple(parameter.shape), spec, partial_gradient=split_gradient)
        return tags

    def _has_partial_gradient(self, model: nn.Module, names: list[str], partial: set[tuple[int, str]]) -> bool:
        """Whether each tensor rank holds part of the gradient of a whole parameter, which has several names if tied."""
        parts = [_place(model, name) in partial for name in names]
        if self.sequence_parallel and any(parts):  # a module of a block may also run outside
            blocks = {id(model.get_submodule(block)) for block in self.blocks}
            parts = [part and _is_within(model, name, blocks) for name, part in zip(names, parts, strict=True)]
        if any(parts) and not all(parts):
            part, whole = names[parts.index(True)], names[parts.index(False)]
            raise ValueError(
                f"{part!r} and {whole!r} are one parameter, but each of {self.tensor_parallel_size} tensor ranks would "
                f"have part of its gradient from the one and all of it from the other; give {whole!r} a parameter of "
                "its own, or use sequence_parallel=False"
            )
        return any(parts)

    def _partial(self, model: nn.Module) -> set[tuple[int, str]]:
        """Places of whole parameters of which each tensor rank holds only part of the gradient."""
        partial = {name for region in self.regions for name in region.partial}
        for rule in self.rules:
            if rule.partial:
                module = model.get_submodule(rule.name)
                partial.update(f"{rule.name}.{leaf}" for leaf, _ in module.named_parameters())
        if self.sequence_parallel:
            for block in self.blocks:
                module = model.get_submodule(block)
                partial.update(f"{block}.{leaf}" for leaf, _ in module.named_parameters(remove_duplicate=False))
        places = {_place(model, name) for name in partial}
        if self.sequence_parallel:
            # A row layer's backward gathers the gradient of all tokens, for its weight: its bias gets all of it too.
            rows = [rule.name for rule in self.rules if rule.style in {"rowwise", "attention_output"}]
            places.difference_update(_place(model, f"{name}.bias") for name in rows)
        return places

    def describe(self, model: nn.Module | None = None) -> tuple[tuple[str, str, str], ...]:
        """Rows (layers, style, split) of a table; layers that differ only in a number share a row.

        ``model`` is the full model; with it whole layers show their shape too.
        """
        rows: Counter[tuple[str, str, str]] = Counter()
        for rule in self.rules:
            text = _split_text(*rule.shards[0]) if rule.shards else ""
            rows[(_row_name(rule.name), rule.style, text)] += 1
        for name in self.replicated:
            weight = model.get_submodule(name).weight if model is not None else None
            shape = "x".join(map(str, weight.shape)) if isinstance(weight, nn.Parameter) else ""
            rows[(_row_name(name), "replicated", shape)] += 1
        return tuple(
            (name if count == 1 else f"{name} ({count})", style, text) for (name, style, text), count in rows.items()
        )

    def __iter__(self) -> Iterator[ModuleRule]:
        return iter(self.rules)

    def __bool__(self) -> bool:
        return bool(self.rules)


def is_matrix_layer(module: nn.Module) -> bool:
    """Whether the module is a Linear or an Embedding (or a Conv1D of transformers, a Linear stored transposed)."""
    return isinstance(module, (nn.Linear, nn.Embedding)) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D: a Linear whose weight is stored as (inputs, outputs)."""
    return any(
        cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils" for cls in type(module).mro()
    )


def _place(model: nn.Module, name: str) -> tuple[int, str]:
    parent, _, leaf = name.rpartition(".")
    return id(model.get_submodule(parent)), leaf


def _is_within(model: nn.Module, name: str, holders: set[int]) -> bool:
    """Whether a parameter's name leads through one of some modules, given by id."""
    module: nn.Module = model
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        if id(module) in holders:
            return True
    return False


def _row_name(name: str) -> str:
    """The name without the numbers of repeated modules; a number at the end tells layers of a Sequential apart."""
    parent, _, leaf = name.rpartition(".")
    return f"{digits_as_stars(parent)}.{leaf}" if parent else leaf


def _split_text(leaf: str, spec: ShardSpec) -> str:
    sizes = sorted({spec.local_size(rank) for rank in range(spec.ranks)}, reverse=True)
    repeated = ", heads repeated" if spec.replicated else ""
    return f"{leaf} {spec.size} -> {'/'.join(map(str, sizes))} along {spec.dim}{repeated}"
