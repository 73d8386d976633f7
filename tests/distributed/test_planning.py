"""The planning pass: which stages own which parameters of every kind of model, every refusal, and no trace left behind.

Whether the cut models also compute right is tested in tests/distributed/test_cut_runtime.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.alone import Alone
from lightning_parallel.blocks import resolve_blocks
from lightning_parallel.pipeline.planning import observe_step, plan_pipeline
from lightning_parallel.pipeline.trace import CutPlan, StepTrace
from tests import models, transformers_models
from tests.harness import Ranks
from tests.models import VOCABULARY, Batch, ListGPT, Task, TiedGPT, make_batch

BLOCK = [f"{layer}.{leaf}" for layer in ("ln1", "ln2", "qkv", "proj", "mlp.0", "mlp.2") for leaf in ("weight", "bias")]


def plain(clone: nn.Module, batch: Batch) -> Any:
    return clone.step(batch)  # type: ignore[operator]


def reading(clone: nn.Module, batch: Batch) -> Any:
    """Looks at a value of the batch, which fake tensors do not have: the pass must compute."""
    assert int(batch["ids"].sum()) >= 0, "ids are not negative"
    return clone.step(batch)  # type: ignore[operator]


either_pass = pytest.mark.parametrize("step", [plain, reading])


def observe(task: Task, step: Callable[[nn.Module, Batch], Any] = plain, batch: Batch | None = None) -> StepTrace:
    return observe_step(task, resolve_blocks(task, task.pattern), step, batch or make_batch(0), {})


def plan(task: Task, stages: int, step: Callable[[nn.Module, Batch], Any] = plain) -> CutPlan:
    return plan_pipeline(task, resolve_blocks(task, task.pattern), observe(task, step), stages)


def owners_of_gpt(stage_of_block: list[int], **others: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Owners of every parameter that a model with these blocks may have."""
    owners = {f"blocks.{i}.{leaf}": (stage,) for i, stage in enumerate(stage_of_block) for leaf in BLOCK}
    last = (max(stage_of_block),)
    ends = {"tok.weight": (0,), "pos": (0,), "ln.weight": last, "ln.bias": last, "head.weight": last}
    return {**owners, **ends, **{name.replace("__", "."): stages for name, stages in others.items()}}


# ------------------------------------------------------------------------------------------------ owners
SHARED: dict[str, dict[str, tuple[int, ...]]] = {
    "sequential": {},
    "list": {},
    "tied": {"tok__weight": (0, 2)},
    "bias": {"relative": (0, 1, 2)},
    "between": {"scales": (0, 1, 2)},
    "condition": {"tok__weight": (0, 2), "condition__weight": (0, 2), "condition__bias": (0, 2)},
    "in place": {},
    "masked": {},
}
"""Owners on three stages, besides those of a plain GPT."""


@pytest.mark.parametrize("name", models.ACCEPTED)
def test_own_models_are_accepted(name: str) -> None:
    task = models.build(name)
    blocks = resolve_blocks(task, task.pattern)
    trace = observe(task)
    assert trace == observe(task, reading), "the two kinds of pass see the same"
    for stages in (1, 2, 3):
        found = plan_pipeline(task, blocks, trace, stages)
        assert set(found.owners) == {n for n, _ in task.named_parameters()}
        assert len(found.bounds) == stages
        assert found.changing_shapes == (name in ("resnet", "pyramid"))
        assert found.local_writes == (name in ("prefix", "unpacking"))
    if name in SHARED:
        expected = owners_of_gpt([found.stage_of_block(i) for i in range(5)], **SHARED[name])
        expected = {n: expected[n] for n in found.owners}
        assert dict(found.owners) == expected
        assert found.shared == tuple(sorted(n for n, owners in expected.items() if len(owners) > 1))


def test_parameters_tied_between_blocks_live_on_both_stages() -> None:
    found = plan(models.build("shared blocks"), 2)
    assert found.bounds == ((0, 2), (2, 5))
    assert {n: found.owners[n] for n in found.shared} == {
        "blocks.0.mlp.0.weight": (0, 1),
        "blocks.1.proj.weight": (0, 1),
    }


def test_a_transform_of_several_blocks_is_refused() -> None:
    task = models.TransformedAcrossGPT()
    models.fill(task)
    for run in ((task,), (task, reading)):
        with pytest.raises(
            ValueError, match=r"the step runs blocks\.0 inside of torch.func .*pipeline_parallel_size=1"
        ):
            observe(*run)


@pytest.mark.parametrize("name", models.REFUSED)
def test_own_models_are_refused(name: str) -> None:
    _, reason = models.REFUSED[name]
    task = models.build(name)
    blocks = resolve_blocks(task, task.pattern)
    trace = observe(task)
    assert trace == observe(task, reading), "the two kinds of pass see the same"
    with pytest.raises(ValueError, match="cannot be cut into 2 pipeline stages: .*" + reason):
        plan_pipeline(task, blocks, trace, 2)
    if name in ("twice", "reversed", "uncalled", "object", "number"):
        with pytest.raises(ValueError, match="cannot be cut into 1 pipeline stages"):
            plan_pipeline(task, blocks, trace, 1)
    else:
        assert set(plan_pipeline(task, blocks, trace, 1).owners.values()) == {(0,)}


def dtype_of(name: str) -> torch.dtype:
    """The grouped matrix product of the experts has no double precision."""
    return torch.float32 if name.startswith("mixtral") else torch.float64


@pytest.mark.parametrize("name", transformers_models.ACCEPTED)
def test_transformers_are_accepted(name: str) -> None:
    dtype = dtype_of(name)
    task = transformers_models.build(name, dtype)
    trace = observe(task, batch=make_batch(0, dtype=dtype))
    found = plan_pipeline(task, resolve_blocks(task, task.pattern), trace, 3)
    assert found.bounds == ((0, 1), (1, 2), (2, 3))
    tied = {
        "llama tied": "model.model.embed_tokens.weight",
        "gemma2": "model.model.embed_tokens.weight",
        "gpt2": "model.transformer.wte.weight",
        "bert": "model.bert.embeddings.word_embeddings.weight",
    }
    if name == "t5":  # every stage of the decoder runs the encoder
        outside = {n for n in found.owners if not n.startswith("model.decoder.block.")}
        assert set(found.shared) == outside - {"model.decoder.final_layer_norm.weight"}
    else:
        assert found.shared == ((tied[name],) if name in tied else ())
        assert all(found.owners[n] == (0, 2) for n in found.shared)
    for name_of_parameter, stages in found.owners.items():
        inside = [i for i, block in enumerate(found.blocks) if name_of_parameter.startswith(f"{block}.")]
        assert not inside or stages == tuple(inside)


@pytest.mark.parametrize("name", transformers_models.REFUSED)
def test_transformers_are_refused(name: str) -> None:
    _, reason = transformers_models.REFUSED[name]
    dtype = dtype_of(name)
    task = transformers_models.build(name, dtype)
    trace = observe(task, batch=make_batch(0, dtype=dtype))
    with pytest.raises(ValueError, match="cannot be cut into 3 pipeline stages: .*" + reason):
        plan_pipeline(task, resolve_blocks(task, task.pattern), trace, 3)


def test_fewer_blocks_than_stages() -> None:
    with pytest.raises(ValueError, match="5 blocks cannot be split into 6 pipeline stages"):
        plan(models.build("list"), 6)


# ------------------------------------------------------------------------------------------------ no trace
class Leaving(TiedGPT):
    """A step that changes everything it can reach: buffers, parameters in place and anew, attributes, a counter."""

    def __init__(self) -> None:
        super().__init__(2)
        self.norm = nn.BatchNorm1d(VOCABULARY)
        self.momentum = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.average = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.counts: dict[str, int] = {"steps": 0}
        self.seen: list[Tensor] = []

    def step(self, batch: Batch) -> Tensor:
        logits = self.norm(self.logits(batch["ids"]).transpose(1, 2))
        self.momentum.mul_(0.5).add_(1)
        self.average.data = self.average.data * 0.9 + 7
        self.head.weight.data.clamp_(-0.01, 0.01)
        self.counts["steps"] += 1
        self.seen.append(batch["ids"])
        batch["ids"].zero_()
        return F.cross_entropy(logits[:, :, 0], batch["ids"][:, 0])


@either_pass
def test_nothing_of_the_model_changes(step: Callable[[nn.Module, Batch], Any]) -> None:
    task, batch = Leaving(), make_batch(1)
    models.fill(task)
    before = copy.deepcopy(task.state_dict())
    objects = {n: (id(p), p.data_ptr()) for n, p in task.named_parameters()}
    training = {n: m.training for n, m in task.named_modules()}
    values = {key: value.clone() for key, value in batch.items()}
    stream = torch.get_rng_state()
    observe(task, step, batch)
    assert {n: (id(p), p.data_ptr()) for n, p in task.named_parameters()} == objects
    for name, value in task.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, msg=name)
    for key, value in batch.items():
        torch.testing.assert_close(value, values[key], rtol=0, atol=0, msg=key)
    assert task.counts == {"steps": 0}
    assert task.seen == []
    assert all(p.grad is None for p in task.parameters())
    assert {n: m.training for n, m in task.named_modules()} == training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in task.modules())
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_failing_step_leaves_no_trace_either() -> None:
    task = Leaving()
    models.fill(task)
    before = copy.deepcopy(task.state_dict())

    def step(clone: nn.Module, batch: Batch) -> None:
        plain(clone, batch)
        raise KeyError("a mistake of the user")

    with pytest.raises(KeyError, match="a mistake of the user"):
        observe(task, step)
    for name, value in task.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, msg=name)


def test_shared_objects_are_not_copied() -> None:
    task = ListGPT(2)
    models.fill(task)
    shared = object()
    task.shared = shared  # type: ignore[assignment]
    found = []

    def step(clone: nn.Module, batch: Batch) -> Any:
        found.append(clone.shared)
        return plain(clone, batch)

    observe_step(task, ("blocks.0", "blocks.1"), step, make_batch(0), {id(shared): shared})
    assert found == [shared]
    assert found[0] is shared


# ------------------------------------------------------------------------------------------------ places
def test_a_model_on_the_meta_device_gives_the_same_plan() -> None:
    expected = plan(models.build("tied"), 2)
    with torch.device("meta"):
        task = TiedGPT()
    assert plan(task.double(), 2) == expected
    assert all(p.is_meta for p in task.parameters())


def test_a_model_on_the_meta_device_cannot_be_computed() -> None:
    with torch.device("meta"):
        task = ListGPT()
    with pytest.raises(RuntimeError, match="cannot be planned without computing, and the model is on the meta device"):
        plan(task.double(), 2, reading)


def test_the_model_is_planned_where_the_batch_is() -> None:
    """As on a GPU: the model is still on the CPU when the first batch is on the device."""
    batch = {key: value.to("meta") for key, value in make_batch(0).items()}
    devices = []

    def step(clone: nn.Module, batch: Batch) -> Any:
        devices.append({t.device.type for t in [*clone.parameters(), *clone.buffers(), *batch.values()]})
        return plain(clone, batch)

    task = models.build("resnet")
    assert observe(task, step, batch).calls == [0, 1, 2, 3, 4]
    assert devices == [{"meta"}]
    assert {t.device.type for t in [*task.parameters(), *task.buffers()]} == {"cpu"}


# ------------------------------------------------------------------------------------------------ one rank for all
def communicating(clone: nn.Module, batch: Batch) -> Any:
    dist.barrier()
    dist.broadcast_object_list([batch["ids"].shape], 0)
    dist.all_reduce(torch.ones(2))
    return clone.step(batch)  # type: ignore[operator]


def plan_for_both(rank: int, world_size: int) -> None:
    """The other rank is in no collective, and comes to none."""
    if rank > 0:
        return
    task = models.build("sequential")
    blocks = resolve_blocks(task, task.pattern)
    trace = observe_step(task, blocks, communicating, make_batch(0), {}, alone=Alone())
    assert plan_pipeline(task, blocks, trace, 2) == plan(task, 2)
    with pytest.raises(Exception, match="_local_scalar_dense"):
        observe_step(task, blocks, reading, make_batch(0), {}, alone=Alone())


def test_who_plans_for_all_waits_for_none(ranks: Ranks) -> None:
    ranks(2, plan_for_both, timeout=15)
