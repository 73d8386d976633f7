"""Mechanism: turn the user's plan (patterns and styles, or "auto") into rules for every module of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from lightning_parallel.patterns import close_names
from lightning_parallel.tensor_parallel.assignment import Assignment, assign_patterns
from lightning_parallel.tensor_parallel.families import assign_automatically
from lightning_parallel.tensor_parallel.fitting import Subject, Uncallable, fit_region, has_dropout, structure_key
from lightning_parallel.tensor_parallel.forwards import STATE
from lightning_parallel.tensor_parallel.heads import patch_sets, read_heads
from lightning_parallel.tensor_parallel.regions import group_regions, lowest_common
from lightning_parallel.tensor_parallel.rehearsal import Bypassed, Mismatch
from lightning_parallel.tensor_parallel.rules import HeadPatch, ModuleRule, Region, TensorPlan, is_matrix_layer
from lightning_parallel.tensor_parallel.sequence import check_sequence_parallel
from lightning_parallel.tensor_parallel.styles import (
    Unit,
    attention_output_rule,
    check_type,
    make_rule,
    parameter_spec,
)

__all__ = ["HeadPatch", "ModuleRule", "Region", "TensorPlan", "refuse_parts", "resolve_plan"]


def resolve_plan(
    model: nn.Module,
    plan: str | Mapping[str, str],
    tensor_parallel_size: int,
    *,
    sequence_parallel: bool = False,
    blocks: Sequence[str] = (),
    sequence_dim: int = 1,
) -> TensorPlan:
    """What tensor parallelism does to each module of the full, uncut model. Shapes are enough: meta tensors do.

    Args:
        model: the user's model.
        plan: ``"auto"``, or patterns and styles, for example ``{"layers.*.fc1": "colwise", "layers.*.fc2":
            "rowwise"}``. Patterns follow :func:`lightning_parallel.patterns.match_names`; styles are those of
            Megatron (Shoeybi et al. 2019) under our names or transformers' names.
        tensor_parallel_size: number of tensor ranks; 1 gives an empty plan.
        sequence_parallel: split the activations between regions along ``sequence_dim`` (Korthikanti et al. 2022).
        blocks: names of the repeated blocks, in order; needed for ``sequence_parallel``.
        sequence_dim: sequence dimension of the activations between blocks.

    Raises:
        ValueError: a pattern matches nothing, a style does not fit, heads or sizes do not split over the ranks, a
            region computes something else when split, nothing is covered, or a layer was split before.
    """
    if tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size must be at least 1, got {tensor_parallel_size}")
    refuse_parts(model)
    if tensor_parallel_size == 1:
        return TensorPlan(1)
    if isinstance(plan, str):
        if plan != "auto":
            raise ValueError(f'plan must be "auto" or a mapping from patterns to styles, got {plan!r}')
        assignment = assign_automatically(model, tensor_parallel_size)
    else:
        assignment = assign_patterns(model, plan, tensor_parallel_size)
    rules, regions = _resolve(model, assignment, tensor_parallel_size)
    if not any(rule.shards for rule in rules.values()):
        raise ValueError(_nothing_covered(model, assignment))
    result = TensorPlan(
        tensor_parallel_size,
        rules=tuple(rules.values()),
        regions=regions,
        replicated=_replicated(model, rules),
        notes=tuple(dict.fromkeys(assignment.notes)),
        sequence_parallel=sequence_parallel,
        sequence_dim=sequence_dim,
        blocks=tuple(blocks) if sequence_parallel else (),
    )
    _refuse_shared_layers(model, result)
    if sequence_parallel:
        check_sequence_parallel(model, result)
    result.tags(model)
    return result


def _refuse_shared_layers(model: nn.Module, plan: TensorPlan) -> None:
    """The layers of a split pair hand each other parts, which other modules that hold one of them would not know of.

    Raises:
        ValueError: a layer of a pair is also in a module that does not hold the whole pair.
    """
    aliases: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        aliases.setdefault(id(module), []).append(name)
    for region in plan.regions:
        holder = model.get_submodule(region.name)
        for layer in (*region.columns, region.row):
            inside = layer[len(region.name) :]
            for alias in aliases[id(model.get_submodule(layer))]:
                around = alias.removesuffix(inside) if alias.endswith(inside) else None
                if region.name and (around is None or model.get_submodule(around) is not holder):
                    raise ValueError(
                        f"{layer} is also {alias}, in a module that does not share the other layers that it is split "
                        f"with over tensor_parallel_size={plan.tensor_parallel_size}; give each module a layer of its "
                        f"own, which may share the weight (b.weight = a.weight), or keep {layer!r} and the layers "
                        f"beside it whole with the style 'replicate'"
                    )


def refuse_parts(model: nn.Module) -> None:
    """Weights that are parts already would pass for whole ones: in start weights, norms and checkpoints.

    Raises:
        ValueError: a layer of the model was split before.
    """
    for name, module in model.named_modules():
        state = module.__dict__.get(STATE)
        if state is not None and state.spec.ranks > 1:
            raise ValueError(
                f"{name} is a {type(module).__name__} that holds {state.spec.local_size(state.rank)} of "
                f"{state.spec.size} along dimension {state.spec.dim} already; make it a plain layer and name it in "
                "plan=..., which splits it"
            )


def _resolve(model: nn.Module, assignment: Assignment, ranks: int) -> tuple[dict[str, ModuleRule], tuple[Region, ...]]:
    """Rules by module name, in module order, and the regions with everything their modules need."""
    styles = {name: assignment.styles[name] for name, _ in model.named_modules() if name in assignment.styles}
    for name, style in styles.items():
        check_type(name, model.get_submodule(name), style)
    rules: dict[str, ModuleRule] = {}
    regions: list[Region] = []
    fitted: dict[object, Region | str] = {}
    for region in group_regions(styles):
        try:
            found = _fit_styles(model, region, styles, assignment, fitted, ranks)
        except ValueError as error:
            if not assignment.optional.issuperset((*region.columns, region.row)):
                raise
            found = str(error)
        if isinstance(found, str):
            assignment.notes.append(found)
        else:
            regions.append(found[0])
            rules.update(found[1])
    grouped = {name for region in group_regions(styles) for name in (*region.columns, region.row)}
    for name, style in styles.items():
        if name not in grouped:
            module = model.get_submodule(name)
            rules[name] = make_rule(name, module, style, Unit(ranks))
            if style == "attention" and isinstance(module, nn.MultiheadAttention):
                rules[f"{name}.out_proj"] = attention_output_rule(name, module, ranks)
    _add_parameters(model, assignment, ranks, rules)
    return {name: rules[name] for name, _ in model.named_modules() if name in rules}, tuple(regions)


def _fit_styles(
    model: nn.Module,
    region: Region,
    styles: Mapping[str, str],
    assignment: Assignment,
    fitted: dict[object, Region | str],
    ranks: int,
) -> tuple[Region, dict[str, ModuleRule]] | str:
    """A region that runs, with the rules of its layers; or why it is left whole."""
    unit = _unit(model, region, ranks)
    layers = (*region.columns, region.row)
    reasons: list[str] = []
    for other in (None, *assignment.alternatives.get(region.row, ())):
        chosen = {name: other if other and name in region.columns else styles[name] for name in layers}
        try:
            rules = {name: make_rule(name, model.get_submodule(name), style, unit) for name, style in chosen.items()}
        except ValueError as error:
            # Only a guess that this is attention: there are no heads that the user would have to change.
            if region.row not in assignment.alternatives or unit.heads is not None:
                raise
            reasons.append(str(error))
            continue
        found = _fit(Subject(model, region, rules, unit.heads, ranks), assignment, fitted)
        if isinstance(found, Region):
            for group in found.shared:
                rules.update({name: replace(rules[name], shared_input=group[0]) for name in group})
            return found, rules
        reasons.append(found)
    return reasons[0]


def _unit(model: nn.Module, region: Region, ranks: int) -> Unit:
    """The heads around a region, read from the lowest module that holds its columns or from one above it."""
    row = model.get_submodule(region.row)
    weight = row.weight
    assert isinstance(weight, nn.Parameter), "a Linear has a weight"
    size = weight.numel() // int(getattr(row, "out_features", weight.shape[-1]))
    name = lowest_common(region.columns)
    while True:
        module = model.get_submodule(name)
        reads_config = "att" in type(module).__name__.lower()
        heads = read_heads(module, size, reads_config=reads_config)
        if heads is not None and heads.query * heads.head_dim == size:
            return Unit(ranks, heads)
        if name == region.name:
            return Unit(ranks)
        name = name.rpartition(".")[0]


def _add_parameters(model: nn.Module, assignment: Assignment, ranks: int, rules: dict[str, ModuleRule]) -> None:
    """Attach bare parameters that the plan splits to the rule of their module."""
    for full_name, style in assignment.parameters.items():
        owner, _, leaf = full_name.rpartition(".")
        spec = parameter_spec(full_name, model.get_parameter(full_name), style, ranks)
        if spec is not None:
            rule = rules.get(owner, ModuleRule(owner, "replicate"))
            rules[owner] = replace(rule, shards=(*rule.shards, (leaf, spec)))


def _fit(subject: Subject, assignment: Assignment, fitted: dict[object, Region | str]) -> Region | str:
    """The region ready to run, or why it is left whole."""
    region = subject.region
    layers = (*region.columns, region.row)
    inside = {name for name, _ in subject.module.named_modules(prefix=region.name)}
    given = tuple(patch for patch in assignment.patches if patch.module in inside)
    if given or assignment.known.issuperset(layers):
        known = assignment.known.issuperset(layers)
        drawing = not known or has_dropout(subject.module)
        evidence = "known" if known else "given"
        return replace(region, patches=given, shared=_siblings(subject), random=drawing, evidence=evidence)
    key = structure_key(subject)
    if key not in fitted:
        fitted[key] = _fit_new(subject, guessed=assignment.guessed.issuperset(layers))
    found = fitted[key]
    if isinstance(found, str):
        return f"{', '.join(layers)}: {found}"
    return _moved(found, subject)


def _fit_new(subject: Subject, *, guessed: bool) -> Region | str:
    names = f"{', '.join(subject.region.columns)} and {subject.region.row}"
    holder = f"{type(subject.module).__name__} {subject.region.name!r}"
    try:
        return fit_region(subject)
    except Uncallable as error:
        if guessed:
            return str(error)
        if next(
            (patches for patches in patch_sets(subject.inner_modules(), subject.heads, subject.ranks) if patches), None
        ):
            raise ValueError(
                f"{holder} stores head counts, but its split over {names} cannot be checked: {error}; give the model "
                f'an example_input_array, or name the counts in the plan with the style "local"'
            ) from error
        return replace(subject.region, shared=_siblings(subject))
    except Bypassed as error:
        if guessed:
            return str(error)
        raise ValueError(
            f"{holder} cannot be split over tensor_parallel_size={subject.ranks}: {error}; call the layer itself, or "
            f'use "replicate" for {names}'
        ) from error
    except Mismatch as error:
        if guessed:
            return str(error)
        raise ValueError(
            f"{holder} does not compute the same when {names} are split over tensor_parallel_size={subject.ranks}: "
            f"{error}; write views of projections as .view(B, T, -1, head_dim), the merge of heads as "
            f'.reshape(B, T, -1) and fused projections as .chunk(3, -1), or use "replicate"'
        ) from error


def _siblings(subject: Subject) -> tuple[tuple[str, ...], ...]:
    """Columns beside one another with inputs of one size: they read the same tensor, unless seen otherwise."""
    groups: dict[tuple[str, int], list[str]] = {}
    for place, name in enumerate(subject.region.columns):
        groups.setdefault((name.rpartition(".")[0], subject.input_width(place)), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _moved(found: Region, subject: Subject) -> Region:
    """A fit of an equal region, with the names of this one."""
    region, old = subject.region, found.name

    def here(name: str) -> str:
        return subject.absolute(name[len(old) :].lstrip(".") if old else name)

    return replace(
        found,
        name=region.name,
        columns=region.columns,
        row=region.row,
        shared=tuple(tuple(map(here, names)) for names in found.shared),
        patches=tuple(replace(patch, module=here(patch.module)) for patch in found.patches),
        partial=tuple(map(here, found.partial)),
    )


def _replicated(model: nn.Module, rules: Mapping[str, ModuleRule]) -> tuple[str, ...]:
    """Names of Linear and Embedding layers without a split parameter."""
    covered = {name for name, rule in rules.items() if rule.shards}
    return tuple(name for name, module in model.named_modules() if is_matrix_layer(module) and name not in covered)


def _nothing_covered(model: nn.Module, assignment: Assignment) -> str:
    reasons = f" ({'; '.join(dict.fromkeys(assignment.notes))})" if assignment.notes else ""
    names = close_names("fc1", [name for name, module in model.named_modules() if is_matrix_layer(module)])
    return (
        f"the plan splits no layer of {type(model).__name__}{reasons}; give one such as "
        f'TensorPipelineStrategy(plan={{"<first layer>": "colwise", "<second layer>": "rowwise"}}) with names from '
        f"{names}"
    )
