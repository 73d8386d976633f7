"""Pure: what one uncut step was seen to do (who uses which parameter where), and the cut that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["BlockUse", "CutPlan", "StepTrace", "plan_cut"]

# A model whose parameters would mostly have to live on several stages gains nothing from a pipeline.
MAX_SHARED_FRACTION = 0.5
_READERS = MappingProxyType({"_local_scalar_dense": ".item(), float(), bool() or if", "nonzero": "a mask as an index"})
# How a block's value may reach another one, besides the ways that need no care.
SIDE_CHANNEL, WRITE = "side channel", "tensor that it writes into"


@dataclass
class BlockUse:
    """What one block was seen to use.

    Attributes:
        inside: parameters used by the block itself.
        inputs: parameters that the tensors handed to the block were computed from, outside of any block.
        values: (producer block, how) for every value of another block that reached this block.
        fed_by: blocks that the tensors handed to this block were computed from.
    """

    inside: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    values: set[tuple[int, str]] = field(default_factory=set)
    fed_by: set[int] = field(default_factory=set)


@dataclass
class StepTrace:
    """One uncut step as seen by the planning pass.

    Attributes:
        blocks: use of each block, in order.
        calls: order in which blocks were called.
        before: parameters used before the first block.
        after: parameters used after the last block.
        after_values: blocks whose values were used after the last block.
        after_writes: blocks that wrote into a tensor handed to them which was used after the last block.
        reads: (where, operator, of what) for every place where Python read the value of a tensor.
        writes: (where, of what, into which buffer, or "") for every place outside of the blocks where a value of a
            parameter or block was written into a tensor that was there before.
        derivatives: (block, or -1, of what it differentiates by; block of what it differentiates; where) for every
            place outside of the blocks where the step takes a derivative of a block's value itself.
        changing: whether blocks return values of different shapes.
        problems: reasons to refuse that hold for any cut.
    """

    blocks: list[BlockUse]
    calls: list[int] = field(default_factory=list)
    before: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)
    after_values: set[int] = field(default_factory=set)
    after_writes: set[int] = field(default_factory=set)
    reads: list[tuple[str, str, str]] = field(default_factory=list)
    writes: list[tuple[str, str, str]] = field(default_factory=list)
    derivatives: list[tuple[int, int, str]] = field(default_factory=list)
    changing: bool = False
    problems: list[str] = field(default_factory=list)

    def outside_cost(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Number of elements of the parameters used before the first and after the last block."""
        return sum(sizes[n] for n in self.before), sum(sizes[n] for n in self.after)

    def block_costs(self, sizes: Mapping[str, int]) -> list[int]:
        """Number of elements of the parameters used inside each block (at least 1)."""
        return [max(1, sum(sizes[n] for n in use.inside)) for use in self.blocks]


@dataclass(frozen=True)
class CutPlan:
    """Which stage runs which blocks and owns which parameters.

    Attributes:
        blocks: module paths of the blocks, in order.
        bounds: half-open range of blocks of each stage.
        owners: stages that own each parameter, ascending. Gradients of a parameter with several owners are summed. What
            the step did not use belongs to every stage that may use it in another step.
    """

    blocks: tuple[str, ...]
    bounds: tuple[tuple[int, int], ...]
    owners: Mapping[str, tuple[int, ...]]
    changing_shapes: bool = False
    local_writes: bool = False

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of parameters owned by more than one stage, sorted."""
        return tuple(sorted(name for name, stages in self.owners.items() if len(stages) > 1))

    def stage_of_block(self, block: int) -> int:
        """Stage that runs a block."""
        return next(s for s, (start, stop) in enumerate(self.bounds) if start <= block < stop)


def plan_cut(
    trace: StepTrace, names: tuple[str, ...], bounds: tuple[tuple[int, int], ...], sizes: Mapping[str, int]
) -> CutPlan:
    """Decides the owners of every parameter, or refuses with every reason found.

    Args:
        trace: what the planning pass saw.
        names: module paths of the blocks.
        bounds: blocks of each stage.
        sizes: number of elements of every parameter of the model.

    Raises:
        ValueError: the model cannot be cut like this; the message lists blocks and reasons.
    """
    plan = CutPlan(names, bounds, {})
    problems = list(trace.problems) + _order_problems(trace, names)
    problems += _value_problems(trace, plan) + _read_problems(trace, plan) + _derivative_problems(trace, plan)
    owners = _owners(trace, plan, sizes)
    used = trace.before.union(trace.after, *(use.inside | use.inputs for use in trace.blocks))
    shared = sum(sizes[n] * (len(owners[n]) - 1) for n in used)
    total = max(1, sum(sizes.values()))
    if shared / total > MAX_SHARED_FRACTION:
        problems.append(
            f"{shared / total:.0%} of the parameters would have to live on several stages (at most "
            f"{MAX_SHARED_FRACTION:.0%} is useful)"
        )
    if problems:
        raise ValueError(
            f"this model cannot be cut into {len(bounds)} pipeline stages: {'; '.join(dict.fromkeys(problems))}. "
            f"Use pipeline_parallel_size=1, or name other blocks with blocks=..."
        )
    early_writes = any(where != f"after {names[-1]}" for where, _, _ in trace.writes)
    return CutPlan(names, bounds, owners, trace.changing, early_writes)


def _order_problems(trace: StepTrace, names: tuple[str, ...]) -> list[str]:
    if trace.calls == list(range(len(names))):
        return []
    shown = ", ".join(names[i] for i in trace.calls[:12]) or "none of them"
    return [f"the {len(names)} blocks must each run once, in order, but the step ran: {shown}"]


def _value_problems(trace: StepTrace, plan: CutPlan) -> list[str]:
    problems = []
    for index, use in enumerate(trace.blocks):
        stage = plan.stage_of_block(index)
        start = plan.bounds[stage][0]
        name = plan.blocks[index]
        for producer, how in sorted(use.values):
            # A stage has its own blocks' values and the output it received from the block just before them.
            if producer < start - (how not in (SIDE_CHANNEL, WRITE)):
                problems.append(f"{name} uses a value of {plan.blocks[producer]} through a {how}")
        if index == start and stage > 0 and index - 1 not in use.fed_by:
            problems.append(f"{name} does not receive the output of {plan.blocks[index - 1]}")
    start = plan.bounds[-1][0]
    foreign = {b for b in trace.after_values if b < start - 1} | {b for b in trace.after_writes if b < start}
    problems += [
        f"the code after the last block uses a value of {plan.blocks[producer]} (collected hidden states, router "
        "logits or an auxiliary loss?)"
        for producer in sorted(foreign)
    ]
    return problems


def _spoken(sources: str, blocks: tuple[str, ...]) -> str:
    """Sources of a value in words.

    >>> _spoken("block:1, parameter:head.weight", ("layers.0", "layers.1"))
    'layers.1, head.weight'
    """
    parts = (source.partition(":") for source in sources.split(", "))
    return ", ".join(name if kind == "parameter" else blocks[int(name)] for kind, _, name in parts)


def _read_problems(trace: StepTrace, plan: CutPlan) -> list[str]:
    """What only the last stage can do, and only after the last block."""
    if len(plan.bounds) == 1:
        return []
    last = f"after {plan.blocks[-1]}"
    problems = [
        f"Python reads the value of a tensor that depends on {_spoken(what, plan.blocks)} "
        f"({_READERS.get(operator, operator)}, {where})"
        for where, operator, what in trace.reads
        if not where.startswith("inside ") and where != last
    ]
    problems += [
        f"the step writes a value that depends on {_spoken(what, plan.blocks)} into the buffer {buffer} ({where})"
        for where, what, buffer in trace.writes
        if buffer and where != last
    ]
    return problems


def _derivative_problems(trace: StepTrace, plan: CutPlan) -> list[str]:
    """The last stage has the graph from the value it received on, and no stage has more."""
    if len(plan.bounds) == 1:
        return []
    return [
        f"the step itself differentiates a value of {plan.blocks[last]} with respect to "
        f"{'one from before the blocks' if first < 0 else f'one of {plan.blocks[first]}'} (autograd.grad or backward, "
        f"{where}), and no stage has all of that graph"
        for first, last, where in trace.derivatives
        if first < plan.bounds[-1][0] - 1
    ]


def _owners(trace: StepTrace, plan: CutPlan, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    owners: dict[str, set[int]] = {name: set() for name in sizes}
    for name in trace.before:
        owners[name].add(0)
    for index, use in enumerate(trace.blocks):
        for name in use.inside | use.inputs:
            owners[name].add(plan.stage_of_block(index))
    for name in trace.after:
        owners[name].add(len(plan.bounds) - 1)
    # What this step did not use another one may, for example a head for some batches only, or for validation.
    return {name: tuple(sorted(stages)) if stages else _possible_owners(name, plan) for name, stages in owners.items()}


def _possible_owners(name: str, plan: CutPlan) -> tuple[int, ...]:
    """Stages that may use a parameter which was not seen in use: that of its block, else all."""
    for index, block in enumerate(plan.blocks):
        if name.startswith(f"{block}."):
            return (plan.stage_of_block(index),)
    return tuple(range(len(plan.bounds)))
