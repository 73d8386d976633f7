"""Models cut over 2 to 4 gloo ranks, without Lightning: losses and gradients are those of the uncut model.

fp64 with a tolerance of 1e-10 (1e-5 in fp32, for models that compute in it anyway); the reference runs on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.pipeline import boundary as boundaries
from lightning_parallel.pipeline.boundary import Boundary, BoundaryLink
from lightning_parallel.pipeline.placeholder import PipelineCutError
from lightning_parallel.pipeline.schedules import SCHEDULE_NAMES
from tests import models, transformers_models
from tests.distributed.cut_tools import CPU, CutModel, check_case, compare, naming, pipeline_mesh, uncut
from tests.harness import Ranks
from tests.models import Batch, ListGPT, SequentialGPT, Task, make_batch

NAMES = list(models.ACCEPTED)
GROUPS = [NAMES[start::4] for start in range(4)]
LIBRARY = list(transformers_models.ACCEPTED)
LIBRARY_GROUPS = [LIBRARY[start::3] for start in range(3)]


def changing_batches(dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Four micro-batches of different shapes."""
    return [make_batch(i, samples=2 + i % 2, length=4 + i % 3, dtype=dtype) for i in range(4)]


# ------------------------------------------------------------------------------------------------ kinds of models
def check_own(rank: int, world_size: int, names: Sequence[str], schedule: str) -> None:
    mesh = pipeline_mesh()
    for name in names:
        with naming(f"model {name!r}"):
            check_case(mesh, partial(models.build, name), changing_batches(), schedule)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("names", GROUPS, ids=", ".join)
def test_own_models(ranks: Ranks, world_size: int, names: list[str]) -> None:
    ranks(world_size, check_own, names, "1f1b" if world_size == 2 else "gpipe")


def check_library(rank: int, world_size: int, names: Sequence[str], schedule: str) -> None:
    mesh = pipeline_mesh()
    for name in names:
        dtype = torch.float32 if name in ("mixtral", "t5") else torch.float64
        atol = 1e-5 if dtype == torch.float32 else 1e-10
        with naming(f"model {name!r}"):
            check_case(mesh, partial(transformers_models.build, name, dtype), changing_batches(dtype), schedule, atol)


@pytest.mark.parametrize("names", LIBRARY_GROUPS, ids=", ".join)
def test_transformers(ranks: Ranks, names: list[str]) -> None:
    ranks(2, check_library, names, "1f1b")


def test_transformers_on_three_stages(ranks: Ranks) -> None:
    """Those whose boundary holds more than hidden states, changes shape, or whose weights are tied."""
    ranks(3, check_library, ["convnext", "t5", "gpt2"], "zero-bubble")


# ------------------------------------------------------------------------------------------------ schedules
def check_few_micro_batches(rank: int, world_size: int) -> None:
    mesh = pipeline_mesh(timeout=timedelta(seconds=15))
    for schedule in SCHEDULE_NAMES:
        for count in (1, 2, 3):
            check_case(mesh, partial(models.build, "tied"), changing_batches()[:count], schedule)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_f13_fewer_micro_batches_than_stages(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_few_micro_batches, timeout=40)


def check_uneven(rank: int, world_size: int) -> list[str]:
    task = ListGPT(7)
    models.fill(task)
    reference = ListGPT(7)
    models.fill(reference)
    batches = changing_batches()
    model = CutModel(task, pipeline_mesh(), batches[0])
    for schedule in ("1f1b", "zero-bubble"):
        compare(model.record(model.train(schedule, batches)), uncut(reference, batches), model.plan, rank, 1e-10)
    return list(model.plan.blocks[slice(*model.plan.bounds[rank])])


def test_f17_seven_blocks_on_four_stages(ranks: Ranks) -> None:
    parts = ranks(4, check_uneven)
    assert [name for part in parts for name in part] == [f"blocks.{i}" for i in range(7)]
    assert all(parts)


# ------------------------------------------------------------------------------------------------ shapes and dtypes
def check_alternation(rank: int, world_size: int, name: str) -> None:
    reference = models.build(name)
    train = [make_batch(i, samples=2, length=3) for i in range(3)]
    other = [make_batch(i, samples=5, length=7) for i in range(2)]
    model = CutModel(models.build(name), pipeline_mesh(), train[0])
    for _ in range(3):
        compare(model.record(model.train("1f1b", train)), uncut(reference, train), model.plan, rank, 1e-10)
        with torch.inference_mode():
            losses = model.evaluate(other)
        expected = uncut(reference, other, train=False)
        assert rank < world_size - 1 or len(losses) == 2
        torch.testing.assert_close(losses, expected["losses"][: len(losses)], rtol=0, atol=1e-10)


@pytest.mark.parametrize("world_size", [2, 3])
def test_f14_train_evaluate_train_with_other_shapes(ranks: Ranks, world_size: int) -> None:
    """The boundary holds float64, float32, bool, int64, a tensor without gradient, None and a string."""
    ranks(world_size, check_alternation, "tuple")


def check_evaluation_writes(rank: int, world_size: int) -> None:
    reference, batches = models.build("in-place blocks"), changing_batches()
    model = CutModel(models.build("in-place blocks"), pipeline_mesh(), batches[0])
    losses = model.evaluate(batches)
    torch.testing.assert_close(losses, uncut(reference, batches, train=False)["losses"][: len(losses)])
    assert len(losses) == (4 if rank == world_size - 1 else 0)


def test_forward_only_with_blocks_that_write_into_their_input(ranks: Ranks) -> None:
    ranks(2, check_evaluation_writes)


def check_autocast(rank: int, world_size: int) -> None:
    batches = changing_batches(torch.float32)

    class Autocast(ListGPT):
        """Hidden states cross the boundary in bfloat16."""

        def run(self, x: Tensor, ids: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                for block in self.blocks:
                    x = block(x.bfloat16()).bfloat16()
            seen.append(x.dtype)
            return x.float()

    def build() -> Task:
        task = Autocast()
        models.fill(task, torch.float32)
        return task

    seen: list[torch.dtype] = []
    check_case(pipeline_mesh(), build, batches, "1f1b", atol=1e-6)
    assert set(seen) == {torch.bfloat16}


def test_f14_bfloat16_boundary(ranks: Ranks) -> None:
    ranks(2, check_autocast)


class Identity(nn.Module):
    """Adds nothing, but has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.zero


class Pairing(Task):
    """The loss is the distance between what arrives at the end and the sample's number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Identity() for _ in range(4)))

    def step(self, batch: Batch) -> Tensor:
        return (self.blocks(batch["x"]) - batch["id"].view(-1, 1)).abs().sum()


def check_pairs(rank: int, world_size: int) -> None:
    lengths = [3, 5, 2, 4]
    ids = [torch.arange(2, dtype=torch.float64) + 10 * place for place in range(4)]
    batches = [{"x": i.view(-1, 1).expand(2, n).clone(), "id": i} for i, n in zip(ids, lengths, strict=True)]
    model = CutModel(Pairing(), pipeline_mesh(), batches[0])
    for _ in range(2):
        assert [float(x) for x in model.train("1f1b", batches)] == ([0.0] * 4 if rank == world_size - 1 else [])
        assert [float(x) for x in model.evaluate(batches)] == ([0.0] * 4 if rank == world_size - 1 else [])


@pytest.mark.parametrize("world_size", [2, 3])
def test_f15_outputs_meet_their_own_labels(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_pairs)


# ------------------------------------------------------------------------------------------------ frozen parts
def check_frozen(rank: int, world_size: int, frozen: str) -> None:
    batches = changing_batches()

    def freeze(task: Task, on: bool) -> Task:
        for name, parameter in task.named_parameters():
            parameter.requires_grad_(not (on and name.startswith(tuple(frozen.split()))))
        return task

    reference = freeze(models.build("list"), True)
    model = CutModel(freeze(models.build("list"), True), pipeline_mesh(timeout=timedelta(seconds=15)), batches[0])
    compare(model.record(model.train("1f1b", batches)), uncut(reference, batches), model.plan, rank, 1e-10)
    for name, parameter in model.local.items():
        assert (parameter.grad is None) == name.startswith(tuple(frozen.split()))
    # Later everything learns.
    freeze(reference, False)
    freeze(model.task, False)
    compare(model.record(model.train("1f1b", batches)), uncut(reference, batches), model.plan, rank, 1e-10)
    assert all(p.grad is not None for p in model.local.values())


@pytest.mark.parametrize(
    "frozen", ["tok pos blocks.0 blocks.1", "blocks.2 blocks.3", "tok pos", "blocks.3 blocks.4 ln head"]
)
def test_f19_frozen_parts_and_unfreezing(ranks: Ranks, frozen: str) -> None:
    ranks(2, check_frozen, frozen)


# ------------------------------------------------------------------------------------------------ failures
class Failing(models.Block):
    """Fails at its second call of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.calls = 0

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        self.calls += 1
        if self.fails and self.calls == 2:
            raise ArithmeticError("a mistake in a block")
        return super().forward(x, bias)


class FailingGPT(SequentialGPT):
    """Blocks that may fail."""

    block = Failing


def check_failure(rank: int, world_size: int) -> str:
    limit = 4
    batches = changing_batches()
    task = FailingGPT()
    models.fill(task)
    model = CutModel(task, pipeline_mesh(timeout=timedelta(seconds=limit)), batches[0])
    if rank == 1:
        model.task.blocks[model.plan.bounds[1][0]].fails = True  # type: ignore[index,union-attr]
    start = time.monotonic()
    try:
        model.train("1f1b", batches)
    except ArithmeticError as error:
        time.sleep(limit + 3)  # the process lives on, so that nobody is saved by a closed connection
        return str(error)
    except RuntimeError as error:
        assert time.monotonic() - start < limit + 3, "the group's time limit holds"
        return type(error).__name__
    return "no error"


def test_an_exception_on_one_stage_ends_the_others_within_the_time_limit(ranks: Ranks) -> None:
    first, failing, last = ranks(3, check_failure, timeout=40)
    assert failing == "a mistake in a block"
    assert {first, last} <= {"RuntimeError", "DistBackendError", "DistNetworkError"}


# ------------------------------------------------------------------------------------------------ the link itself
def links(rank: int) -> BoundaryLink:
    mesh = pipeline_mesh()
    previous, following = (None, 1) if rank == 0 else (0, None)
    return BoundaryLink(previous, following, mesh.boundary, mesh.control, CPU)


def pass_on(link: BoundaryLink, rank: int, value: Any) -> Boundary:
    """Sends a value from rank 0 to rank 1; the sent or received boundary."""
    if rank == 0:
        sent = link.pack(value, "a block")
        link.announce(sent)
        works = comm.exchange([comm.SendRecv(t.detach(), 1, send=True) for t in sent.tensors], link.group)
        for work in works:
            work.wait()
        return sent
    link.await_headers(1)
    received = link.expect()
    for work in comm.exchange([comm.SendRecv(t, 0, send=False) for t in received.tensors], link.group):
        work.wait()
    received.enter_graph()
    return received


def check_values(rank: int, world_size: int) -> None:
    link = links(rank)
    twice = torch.arange(3.0, requires_grad=True) * 2
    value = {
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.arange(4, dtype=torch.bfloat16),
        "int8": torch.arange(3, dtype=torch.int8),
        "complex": torch.tensor([1 + 2j]),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.5),
        "twice": (twice, twice),
        "nothing": None,
        "others": [1, 2.5, "text", True, torch.float16, b"bytes"],
        "none at all": [],
    }
    found = pass_on(link, rank, value).value()
    assert list(found) == list(value)
    for key, expected in value.items():
        torch.testing.assert_close(found[key], expected, rtol=0, atol=0) if key != "others" else None
    assert found["others"] == value["others"]
    assert isinstance(found["twice"], tuple)
    assert [t.requires_grad for t in found["twice"]] == [True, True]
    assert not found["transposed"].requires_grad
    link.finish()


def test_every_value_arrives_as_it_was_sent(ranks: Ranks) -> None:
    ranks(2, check_values)


def check_bounded(rank: int, world_size: int) -> None:
    link = links(rank)
    limit = boundaries._MAX_KNOWN
    for number in range(2 * limit + 10):
        tensor = torch.full((number % (limit + 5),), float(number))
        found = pass_on(link, rank, (tensor, number % 3)).value()
        torch.testing.assert_close(found[0], tensor)
        assert found[1] == number % 3
    assert max(len(link._sent), len(link._known)) <= limit
    link.finish()


def test_ever_new_shapes_do_not_fill_the_memory(ranks: Ranks) -> None:
    ranks(2, check_bounded)


def test_values_that_cannot_travel_are_refused() -> None:
    link = BoundaryLink(None, 1, None, None, CPU)
    with pytest.raises(PipelineCutError, match="layer 3 returns object, which cannot be sent to a stage"):
        link.pack((torch.zeros(1), object()), "layer 3")
    with pytest.raises(PipelineCutError, match="layer 3 returns no tensor"):
        link.pack([1, None], "layer 3")
