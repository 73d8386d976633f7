"""Runs a model uncut in one process and cut on the ranks of a pipeline, without Lightning, and compares the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.blocks import resolve_blocks
from lightning_parallel.gradient_sync import GradientCompleter
from lightning_parallel.layout import ParallelLayout
from lightning_parallel.mesh import Mesh, add_stage_groups, build_mesh
from lightning_parallel.parameters import ParameterTag
from lightning_parallel.pipeline.cut import StageCut
from lightning_parallel.pipeline.placeholder import Placeholder
from lightning_parallel.pipeline.planning import observe_step, plan_pipeline
from lightning_parallel.pipeline.runtime import PipelineRuntime
from lightning_parallel.pipeline.schedules import build_schedule, forward_only_schedule
from lightning_parallel.pipeline.trace import CutPlan
from lightning_parallel.random_streams import StepRandom
from tests.models import Batch, Task

CPU = torch.device("cpu")
Record = dict[str, Any]


def pipeline_mesh(**options: Any) -> Mesh:
    """A mesh of one pipeline over the whole world."""
    return build_mesh(ParallelLayout(pipeline=dist.get_world_size()), CPU, **options)


class CutModel:
    """A model cut for this rank, which runs steps of micro-batches. Collective.

    Args:
        task: the plain model.
        mesh: a pipeline.
        batch: a micro-batch to plan with.
    """

    def __init__(self, task: Task, mesh: Mesh, batch: Batch) -> None:
        self.task = task
        self.mesh = mesh
        self.plan = make_plan(task, batch, mesh.layout.pipeline)
        parameters = dict(task.named_parameters())
        tags = {n: ParameterTag(n, tuple(p.shape), None, False, self.plan.owners[n]) for n, p in parameters.items()}
        add_stage_groups(mesh, tuple(sorted({tag.stages for tag in tags.values() if tag.shared})))
        self.local = {n: p for n, p in parameters.items() if mesh.stage in self.plan.owners[n]}
        self.random = StepRandom(3, 0, mesh.stage, CPU)
        self.cut = StageCut(task, self.plan, mesh.stage, CPU, self.random.enter_blocks, splits_backward=True)
        self.cut.apply()
        self.cut.free_foreign()
        self.completer = GradientCompleter(self.local, tags, mesh)
        self.runtime = PipelineRuntime(mesh, self.cut)
        self.batches: Sequence[Batch] = ()
        self.calls: list[str] = []

    # What the runtime calls.
    def forward(self, micro_batch: int) -> Any:
        self.calls.append(f"F{micro_batch}")
        with self.random.scope(micro_batch):
            return self.task.step(self.batches[micro_batch])

    def backward(self, output: Any, micro_batch: int) -> Tensor:
        loss: Tensor = output / len(self.batches)
        loss.backward()
        return loss

    def before_last_backward(self) -> None:
        self.calls.append("last")

    def reduce(self) -> None:
        self.completer.complete()

    # What tests call.
    def train(self, schedule: str, batches: Sequence[Batch]) -> list[Tensor]:
        """Forward and backward; gradients are added to what is there. Losses on the last stage."""
        self.batches = batches
        return self.runtime.run(build_schedule(schedule, self.mesh.layout.pipeline, len(batches)), self)

    def evaluate(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Forward only. Losses on the last stage."""
        self.batches = batches
        with torch.no_grad():
            return self.runtime.run(forward_only_schedule(self.mesh.layout.pipeline, len(batches)), self)

    def record(self, losses: Sequence[Tensor]) -> Record:
        """What this rank holds: losses, gradients and buffers."""
        record = record_of(losses, self.local, self.task)
        for name, parameter in self.task.named_parameters():
            if isinstance(parameter, Placeholder):
                assert parameter.grad is None, f"{name} is of another stage and must have no gradient"
                assert name not in self.local, f"{name} is of this stage and must have data"
        return record


def _step(clone: Any, batch: Batch) -> Any:
    return clone.step(batch)


def make_plan(task: Task, batch: Batch, stages: int) -> CutPlan:
    """Plans the cut of a task."""
    blocks = resolve_blocks(task, task.pattern)
    with StepRandom(0, 0, 0, CPU).scope("planning"):
        trace = observe_step(task, blocks, _step, batch, {})
    return plan_pipeline(task, blocks, trace, stages)


def record_of(losses: Sequence[Tensor], parameters: dict[str, torch.nn.Parameter], task: Task) -> Record:
    """Copies of losses, gradients and buffers."""
    return {
        "losses": [loss.detach().clone() for loss in losses],
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()},
        "buffers": {n: b.clone() for n, b in task.named_buffers() if "running" in n},
    }


def uncut(task: Task, batches: Sequence[Batch], train: bool = True) -> Record:
    """One step of the plain model: the reference."""
    random = StepRandom(3, 0, 0, CPU)
    losses = []
    for number, batch in enumerate(batches):
        with random.scope(number), torch.set_grad_enabled(train):
            loss = task.step(batch)
        if train:
            (loss / len(batches)).backward()
        losses.append(loss)
    return record_of(losses, dict(task.named_parameters()), task)


def compare(found: Record, expected: Record, plan: CutPlan, stage: int, atol: float) -> None:
    """Losses on the last stage, gradients of every parameter of this stage, running statistics of its blocks."""
    if stage == len(plan.bounds) - 1:
        torch.testing.assert_close(found["losses"], expected["losses"], atol=atol, rtol=0)
    else:
        assert found["losses"] == [], "only the last stage has losses"
    owned = {n for n, stages in plan.owners.items() if stage in stages}
    assert found["gradients"].keys() == owned, "a rank has the parameters that its stage owns"
    for name, gradient in found["gradients"].items():
        reference = expected["gradients"][name]
        if gradient is None or reference is None:
            assert gradient is reference or not any_value(gradient, reference), f"{name}: one gradient is missing"
            continue
        with naming(f"gradient of {name}"):
            torch.testing.assert_close(gradient, reference, atol=atol, rtol=0)
    blocks = plan.blocks[slice(*plan.bounds[stage])]
    for name, buffer in found["buffers"].items():
        if name.startswith(blocks):
            torch.testing.assert_close(buffer, expected["buffers"][name], atol=atol, rtol=0)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Says in the failure's text what was looked at."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {error}") from error


def any_value(*tensors: Tensor | None) -> bool:
    """Whether some tensor has an element that is not 0."""
    return any(t is not None and bool(t.any()) for t in tensors)


def check_case(
    mesh: Mesh, build: Callable[[], Task], batches: Sequence[Batch], schedule: str, atol: float = 1e-10
) -> CutModel:
    """Runs one training step uncut and cut on every rank of a pipeline and compares."""
    expected = uncut(build(), batches)
    model = CutModel(build(), mesh, batches[0])
    losses = model.train(schedule, batches)
    compare(model.record(losses), expected, model.plan, mesh.stage, atol)
    assert all(math.isfinite(float(x)) for x in losses), "a loss that is not finite proves nothing"
    return model
