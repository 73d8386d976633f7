"""Cut plans from traces: owners of every parameter, and every reason to refuse. No torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_parallel.pipeline.trace import MAX_SHARED_FRACTION, SIDE_CHANNEL, WRITE, BlockUse, StepTrace, plan_cut

NAMES = tuple(f"layers.{i}" for i in range(6))
BOUNDS = ((0, 2), (2, 4), (4, 6))
SIZES = {"embed": 40, "head": 40, "rel": 10, "unused": 5, **{f"{n}.w": 100 for n in NAMES}}


def good_trace() -> StepTrace:
    """Six blocks in a chain between an embedding and a head."""
    blocks = [
        BlockUse(inside={f"{name}.w"}, inputs=set() if i else {"embed"}, fed_by={i - 1} if i else set())
        for i, name in enumerate(NAMES)
    ]
    for index in range(1, 6):
        blocks[index].values = {(index - 1, "chain")}
    return StepTrace(blocks, calls=list(range(6)), before={"embed"}, after={"head"}, after_values={5})


def refusal(change: Callable[[StepTrace], object], bounds: tuple[tuple[int, int], ...] = BOUNDS) -> str:
    trace = good_trace()
    change(trace)
    with pytest.raises(ValueError, match=f"^this model cannot be cut into {len(bounds)} pipeline stages: ") as error:
        plan_cut(trace, NAMES, bounds, SIZES)
    text = str(error.value)
    assert text.endswith(". Use pipeline_parallel_size=1, or name other blocks with blocks=...")
    return text.partition("stages: ")[2].rpartition(". Use pipeline")[0]


# ------------------------------------------------------------------------------------------------ owners
def test_owners_of_a_chain() -> None:
    plan = plan_cut(good_trace(), NAMES, BOUNDS, SIZES)
    assert (plan.blocks, plan.bounds) == (NAMES, BOUNDS)
    assert plan.owners["embed"] == (0,)
    assert plan.owners["head"] == (2,)
    assert [plan.owners[f"{n}.w"] for n in NAMES] == [(0,), (0,), (1,), (1,), (2,), (2,)]
    assert [plan.stage_of_block(i) for i in range(6)] == [0, 0, 1, 1, 2, 2]
    assert not plan.changing_shapes
    assert not plan.local_writes


def test_shared_parameters() -> None:
    trace = good_trace()
    trace.after |= {"embed"}  # tied head
    for use in trace.blocks:
        use.inputs |= {"rel"}  # computed once, used by all
    trace.blocks[5].inside |= {"layers.1.w"}  # tied between blocks
    plan = plan_cut(trace, NAMES, BOUNDS, SIZES)
    assert plan.owners["embed"] == (0, 2)
    assert plan.owners["rel"] == (0, 1, 2)
    assert plan.owners["layers.1.w"] == (0, 2)
    assert plan.shared == ("embed", "layers.1.w", "rel", "unused")


def test_a_parameter_used_between_blocks_belongs_to_the_block_that_gets_it() -> None:
    trace = good_trace()
    trace.blocks[2].inputs |= {"rel"}
    assert plan_cut(trace, NAMES, BOUNDS, SIZES).owners["rel"] == (1,)


def test_what_the_step_did_not_use_may_be_used_by_another_one() -> None:
    trace = good_trace()
    trace.blocks[3].inside.clear()
    plan = plan_cut(trace, NAMES, BOUNDS, SIZES)
    assert plan.owners["unused"] == (0, 1, 2)
    assert plan.owners["layers.3.w"] == (1,)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_every_parameter_has_the_stages_that_use_it(lengths: list[int], data: st.DataObject) -> None:
    edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    bounds = tuple(zip(edges, edges[1:], strict=False))
    count = edges[-1]
    names = tuple(f"layers.{i}" for i in range(count))
    parameters = [f"p{i}" for i in range(6)]
    sizes = dict.fromkeys(parameters, 1) | {"filler": 10_000}
    subset = st.sets(st.sampled_from(parameters))
    uses = [BlockUse(inside=data.draw(subset), inputs=data.draw(subset), fed_by={i - 1}) for i in range(count)]
    trace = StepTrace(uses, list(range(count)), before=data.draw(subset), after=data.draw(subset))
    plan = plan_cut(trace, names, bounds, sizes)
    for name in parameters:
        expected = {0} if name in trace.before else set()
        expected |= {len(bounds) - 1} if name in trace.after else set()
        expected |= {plan.stage_of_block(i) for i, use in enumerate(uses) if name in use.inside | use.inputs}
        assert set(plan.owners[name]) == (expected or set(range(len(bounds))))
        assert list(plan.owners[name]) == sorted(plan.owners[name])


# ------------------------------------------------------------------------------------------------ order
@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        ([0, 1, 2, 4, 3, 5], "layers.0, layers.1, layers.2, layers.4, layers.3, layers.5"),
        ([0, 1, 2, 3, 4], "layers.0, layers.1, layers.2, layers.3, layers.4"),
        ([0, 0, 1, 2, 3, 4, 5], "layers.0, layers.0, layers.1, layers.2, layers.3, layers.4, layers.5"),
        ([], "none of them"),
    ],
)
def test_blocks_must_run_once_in_order(calls: list[int], shown: str) -> None:
    text = refusal(lambda trace: setattr(trace, "calls", calls))
    assert text == f"the 6 blocks must each run once, in order, but the step ran: {shown}"


def test_a_block_must_receive_what_the_one_before_it_returned() -> None:
    text = refusal(lambda trace: trace.blocks[4].fed_by.clear())
    assert text == "layers.4 does not receive the output of layers.3"
    trace = good_trace()
    trace.blocks[3].fed_by.clear()  # both on one stage
    plan_cut(trace, NAMES, BOUNDS, SIZES)


# ------------------------------------------------------------------------------------------------ values
@pytest.mark.parametrize("how", ["chain", "skip connection", SIDE_CHANNEL, WRITE])
@pytest.mark.parametrize("producer", range(5))
def test_values_of_blocks_on_other_stages(producer: int, how: str) -> None:
    """Block 4 starts stage 2, which receives the value of block 3 and nothing else."""
    trace = good_trace()
    trace.blocks[5].values.add((producer, how))
    reachable = producer == 4 or (producer == 3 and how in ("chain", "skip connection"))
    if reachable:
        plan_cut(trace, NAMES, BOUNDS, SIZES)
    else:
        text = refusal(lambda trace: trace.blocks[5].values.add((producer, how)))
        assert text == f"layers.5 uses a value of layers.{producer} through a {how}"


@pytest.mark.parametrize("producer", range(6))
def test_values_used_after_the_last_block(producer: int) -> None:
    trace = good_trace()
    trace.after_values.add(producer)
    if producer >= 3:
        plan_cut(trace, NAMES, BOUNDS, SIZES)
    else:
        text = refusal(lambda trace: trace.after_values.add(producer))
        assert text.startswith(f"the code after the last block uses a value of layers.{producer} (collected hidden")
    trace = good_trace()
    trace.after_writes.add(producer)
    if producer >= 4:
        plan_cut(trace, NAMES, BOUNDS, SIZES)
    else:
        assert f"value of layers.{producer} (" in refusal(lambda trace: trace.after_writes.add(producer))


# ------------------------------------------------------------------------------------------------ reads and writes
@pytest.mark.parametrize(
    ("where", "refused"),
    [
        ("before the first block", True),
        ("after layers.2", True),
        ("inside layers.2", False),
        ("inside layers.5", False),
        ("after layers.5", False),
    ],
)
def test_reads_and_writes(where: str, refused: bool) -> None:
    def read(trace: StepTrace) -> None:
        trace.reads.append((where, "nonzero", "block:1, parameter:embed"))

    def write(trace: StepTrace) -> None:
        trace.writes.append((where, "write:1, parameter:embed", "statistics.mean"))

    for change, words in ((read, "Python reads the value of a tensor"), (write, "into the buffer statistics.mean")):
        if change is write and where.startswith("inside"):
            continue  # a block's own statistics are not noted
        if refused:
            text = refusal(change)
            assert words in text
            assert "depends on layers.1, embed" in text
            assert text.endswith(f"{where})")
        else:
            trace = good_trace()
            change(trace)
            plan_cut(trace, NAMES, BOUNDS, SIZES)
        trace = good_trace()
        change(trace)
        plan_cut(trace, NAMES, ((0, 6),), SIZES)


@pytest.mark.parametrize(("where", "followed"), [("before the first block", True), ("after layers.5", False)])
def test_writes_into_other_tensors_are_followed(where: str, followed: bool) -> None:
    trace = good_trace()
    trace.writes.append((where, "parameter:embed", ""))
    trace.changing = True
    plan = plan_cut(trace, NAMES, BOUNDS, SIZES)
    assert plan.local_writes == followed
    assert plan.changing_shapes


# ------------------------------------------------------------------------------------------------ shared fraction
@pytest.mark.parametrize(("numel", "refused"), [(200, False), (700, True)])
def test_a_model_that_is_mostly_shared_gains_nothing(numel: int, refused: bool) -> None:
    sizes = {**SIZES, "rel": numel}

    def share(trace: StepTrace) -> None:
        for use in trace.blocks:
            use.inside.add("rel")

    trace = good_trace()
    share(trace)
    fraction = 2 * numel / sum(sizes.values())  # two more copies on three stages
    assert (fraction > MAX_SHARED_FRACTION) == refused
    if not refused:
        assert plan_cut(trace, NAMES, BOUNDS, sizes).shared == ("rel", "unused")
        return
    words = f"{fraction:.0%} of the parameters would have to live on several stages \\(at most 50% is useful\\)"
    with pytest.raises(ValueError, match=words):
        plan_cut(trace, NAMES, BOUNDS, sizes)


def test_every_reason_is_told_once() -> None:
    def change(trace: StepTrace) -> None:
        trace.problems += ["layers.1 returns no tensor", "layers.1 returns no tensor"]
        trace.blocks[4].fed_by.clear()
        trace.after_values.add(0)

    text = refusal(change)
    assert text.count("layers.1 returns no tensor") == 1
    assert len(text.split("; ")) == 3


def test_costs() -> None:
    trace = good_trace()
    trace.blocks[2].inside.clear()
    assert trace.outside_cost(SIZES) == (40, 40)
    assert trace.block_costs(SIZES) == [100, 100, 1, 100, 100, 100]
