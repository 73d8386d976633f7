"""Mechanism: from a model and one step to a cut plan, without touching the model and, if possible, without computing.

The step runs on a copy whose tensors are fake (shapes only), so that it costs seconds for any size and leaves no trace
in counters, metrics or running statistics. A step that looks at the values of its batch cannot run that way; then it
runs for real, on a copy that shares the parameters.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from lightning_parallel.pipeline.partition import partition_blocks
from lightning_parallel.pipeline.taint import trace_step
from lightning_parallel.pipeline.trace import CutPlan, StepTrace, plan_cut

__all__ = ["observe_step", "plan_pipeline"]

Step = Callable[[nn.Module, Any], Any]


def observe_step(
    module: nn.Module, blocks: tuple[str, ...], step: Step, batch: Any, shared: Mapping[int, Any]
) -> StepTrace:
    """Runs one uncut step on a copy of the model and reports what every block used.

    Args:
        module: the whole, uncut model; may be on the meta device.
        blocks: module paths of the blocks, in order.
        step: called as `step(copy, batch)`.
        batch: a micro-batch.
        shared: objects that copies refer to instead of copying, by id.

    Raises:
        RuntimeError: the step fails on fake tensors and the model has no data to run it for real.
    """
    try:
        with _quiet_fake_tensors():
            return _observe_fake(module, blocks, step, batch, shared)
    except Exception as error:
        # Values were needed (labels counted, masks indexed): compute them.
        if any(p.is_meta for p in module.parameters()):
            raise RuntimeError(
                "the step cannot be planned without computing, and the model is on the meta device; build it on the "
                f"CPU, or keep Python from reading tensor values in the step: {error}"
            ) from error
        return _observe_real(module, blocks, step, batch, shared)


@contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    """A step that cannot run on fake tensors is no error here: torch's log must not say so."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _observe_fake(
    module: nn.Module, blocks: tuple[str, ...], step: Step, batch: Any, shared: Mapping[int, Any]
) -> StepTrace:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = dict(shared)
    for parameter in module.parameters():
        fake = mode.from_tensor(parameter.detach())
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer.detach())
    clone = copy.deepcopy(module, memo)
    fake_batch = tree_map_only(torch.Tensor, mode.from_tensor, batch)
    with mode:
        return trace_step(clone, blocks, _parameters(clone), lambda: step(clone, fake_batch))


def _observe_real(
    module: nn.Module, blocks: tuple[str, ...], step: Step, batch: Any, shared: Mapping[int, Any]
) -> StepTrace:
    memo: dict[int, Any] = {**shared, **{id(p): p for p in module.parameters()}}
    clone = copy.deepcopy(module, memo)
    return trace_step(clone, blocks, _parameters(clone), lambda: step(clone, batch))


def _parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters())


def plan_pipeline(module: nn.Module, blocks: tuple[str, ...], trace: StepTrace, stages: int) -> CutPlan:
    """Spreads blocks over stages by the number of parameters they use, embedding and head included.

    Raises:
        ValueError: fewer blocks than stages, or the model cannot be cut (every reason is named).
    """
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    before, after = trace.outside_cost(sizes)
    bounds = partition_blocks(trace.block_costs(sizes), stages, first=before, last=after)
    return plan_cut(trace, blocks, tuple(bounds), sizes)
