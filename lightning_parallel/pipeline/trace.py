"""Pure: what one uncut step was seen to do (who uses which parameter where), and the cut that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["BlockUse", "CutPlan", "StepTrace", "plan_cut"]

# A model whose parameters would mostly have to live on several stages gains nothing from a pipeline.
MAX_SHARED_FRACTION = 0.5


@dataclass
class BlockUse:
    """What one block was seen to use.

    Attributes:
        inside: parameters used by the block itself.
        inputs: parameters that the tensors handed to the block were computed from, outside of any block.
        values: (producer block, how) for every value of another block that reached this block.
        main_from: blocks that the first tensor argument was computed from.
    """

    inside: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    values: set[tuple[int, str]] = field(default_factory=set)
    main_from: set[int] = field(default_factory=set)


@dataclass
class StepTrace:
    """One uncut step as seen by the planning pass.

    Attributes:
        blocks: use of each block, in order.
        calls: order in which blocks were called.
        before: parameters used before the first block.
        after: parameters used after the last block.
        after_values: blocks whose values were used after the last block.
        reads: (where, operator, of what) for every place where Python read the value of a tensor.
        problems: reasons to refuse that hold for any cut.
    """

    blocks: list[BlockUse]
    calls: list[int] = field(default_factory=list)
    before: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)
    after_values: set[int] = field(default_factory=set)
    reads: list[tuple[str, str, str]] = field(default_factory=list)
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
    problems += _value_problems(trace, plan) + _read_problems(trace, plan)
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
    return CutPlan(names, bounds, owners)


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
            reachable = producer >= start - (how != "side channel")
            if not reachable:
                problems.append(f"{name} uses a value of {plan.blocks[producer]} through a {how}")
        if index == start and stage > 0 and use.main_from != {index - 1}:
            problems.append(f"{name} does not receive the output of {plan.blocks[index - 1]} as its first tensor")
    last_start = plan.bounds[-1][0]
    for producer in sorted(trace.after_values):
        if producer < last_start - 1 or (producer < last_start and producer != len(plan.blocks) - 1):
            problems.append(
                f"the code after the last block uses a value of {plan.blocks[producer]} (collected hidden states, "
                "router logits or an auxiliary loss?)"
            )
    return problems


def _read_problems(trace: StepTrace, plan: CutPlan) -> list[str]:
    if len(plan.bounds) == 1:
        return []
    last = f"after {plan.blocks[-1]}"
    return [
        f"Python reads the value of a tensor that depends on {what} ({operator}, {where})"
        for where, operator, what in trace.reads
        if not where.startswith("inside ") and where != last
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
