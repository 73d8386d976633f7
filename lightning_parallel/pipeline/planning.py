"""Mechanism: from a model and one step to a cut plan, without touching the model and, if possible, without computing.

The step runs on a copy whose tensors are fake (shapes only), so that it costs seconds for any size and leaves no trace
in counters, metrics or running statistics. A step that looks at the values of its batch cannot run that way; then it
runs for real, on a copy that shares the parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_parallel.copies import copy_with_shared
from lightning_parallel.fakes import fake_like, quiet_fakes
from lightning_parallel.pipeline.batch import map_tensors
from lightning_parallel.pipeline.padding import keep_padded
from lightning_parallel.pipeline.partition import partition_blocks
from lightning_parallel.pipeline.taint import trace_step
from lightning_parallel.pipeline.trace import CutPlan, StepTrace, plan_cut

__all__ = ["observe_step", "plan_pipeline"]

Step = Callable[[nn.Module, Any], Any]
Convert = Callable[[torch.Tensor], torch.Tensor]
_PLAIN = (torch.Tensor, nn.Parameter)


def observe_step(
    module: nn.Module,
    blocks: tuple[str, ...],
    step: Step,
    batch: Any,
    shared: Mapping[int, Any],
    alone: AbstractContextManager[Any] | None = None,
) -> StepTrace:
    """Runs one uncut step on a copy of the model and reports what every block used.

    Args:
        module: the whole, uncut model; may be on another device than the batch, or on the meta device.
        blocks: module paths of the blocks, in order.
        step: called as `step(copy, batch)`; it keeps the random streams as they are.
        batch: a micro-batch, on the device where steps will run.
        shared: objects that copies refer to instead of copying, by id.
        alone: where no other rank does the same now: inside of it collectives wait for none. The step is not run for
            real then.

    Raises:
        RuntimeError: the step fails on fake tensors and the model has no data to run it for real.
        Exception: what the step raised on fake tensors, if it runs alone.
    """
    try:
        with quiet_fakes():
            return _observe_fake(module, blocks, step, batch, shared, alone or nullcontext())
    except Exception as error:
        if alone is not None:
            raise
        # Values were needed (labels counted, masks indexed): compute them.
        if any(p.is_meta for p in module.parameters()):
            raise RuntimeError(
                "the step cannot be planned without computing, and the model is on the meta device; build it on the "
                f"CPU, or keep Python from reading tensor values in the step: {error}"
            ) from error
        return _observe_real(module, blocks, step, batch, shared)


def _observe_fake(
    module: nn.Module,
    blocks: tuple[str, ...],
    step: Step,
    batch: Any,
    shared: Mapping[int, Any],
    communication: AbstractContextManager[Any],
) -> StepTrace:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = _device_of(batch)
    alone = _alone_in_storage(module)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in alone:
            return fake_like(mode, tensor, device or tensor.device)
        like = mode.from_tensor(tensor.detach())
        if device is None or like.device == device:
            return like
        with mode:
            return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)

    clone = _copy(module, fake, fake, shared)
    keep_padded(clone, blocks)
    fake_batch = map_tensors(batch, mode.from_tensor)
    with mode, communication:
        return trace_step(clone, blocks, _parameters(clone), lambda: step(clone, fake_batch))


def _observe_real(
    module: nn.Module, blocks: tuple[str, ...], step: Step, batch: Any, shared: Mapping[int, Any]
) -> StepTrace:
    """On the device where the parameters are, because a device may be too small for the whole model."""
    clone = _copy(module, torch.Tensor.detach, lambda t: t.detach().clone(), shared)
    keep_padded(clone, blocks)
    device = next((p.device for p in module.parameters()), None)
    real_batch = map_tensors(batch, lambda t: t.to(t.device if device is None else device, copy=True))
    return trace_step(clone, blocks, _parameters(clone), lambda: step(clone, real_batch))


def _copy(module: nn.Module, parameter: Convert, buffer: Convert, shared: Mapping[int, Any]) -> nn.Module:
    """A deep copy whose parameters and buffers are made by two functions. No parameter object is shared."""
    memo: dict[int, Any] = dict(shared)
    for original in module.parameters():
        converted = parameter(original)
        if not isinstance(converted, nn.Parameter):
            converted = nn.Parameter(converted, requires_grad=original.requires_grad)
        converted.__dict__.update(original.__dict__)
        memo[id(original)] = converted
    for original_buffer in module.buffers():
        memo[id(original_buffer)] = buffer(original_buffer)
    return copy_with_shared(module, memo, buffer)


def _alone_in_storage(module: nn.Module) -> set[int]:
    """Ids of the plain parameters and buffers that fill a storage of which nothing else in the module has a part."""
    plain = [t for t in (*module.parameters(), *module.buffers()) if type(t) in _PLAIN and t.layout is torch.strided]
    uses = Counter(t.untyped_storage()._cdata for t in plain)
    return {
        id(t)
        for t in plain
        if uses[t.untyped_storage()._cdata] == 1 and t.numel() * t.element_size() == t.untyped_storage().nbytes()
    }


def _device_of(batch: Any) -> torch.device | None:
    devices: list[torch.device] = []
    map_tensors(batch, lambda t: devices.append(t.device))
    return devices[0] if devices else None


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
