"""Mechanism: cuts a model in place for one stage and runs the user's own step on it; everything can be undone.

Parameters of other stages become placeholders. Blocks of other stages return placeholders, except the one just before
the first local block, which returns the activations received from the previous stage. After its last local block a
stage that is not the last leaves the step through a private BaseException.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lightning_parallel.pipeline.outline import Outline
from lightning_parallel.pipeline.padding import keep_padded
from lightning_parallel.pipeline.placeholder import (
    PipelineCutError,
    Placeholder,
    WriteLedger,
    placeholder_like,
    placeholder_parameter,
    placeholders_in,
)
from lightning_parallel.pipeline.trace import CutPlan
from lightning_parallel.weight_gradients import WeightGradients, split_linears

__all__ = ["StageCut", "StageResult"]


class _StageDone(BaseException):
    """Leaves the user's step after the last local block. Not an Exception: user code must not catch it."""


@dataclass(frozen=True)
class StageResult:
    """What a stage got out of one run of the step.

    Attributes:
        output: return value of the step, on the last stage.
        boundary: output of the last local block, on every other stage.
        outlines: of the outputs of all blocks before that one, if shapes change from block to block.
    """

    output: Any = None
    boundary: Any = None
    outlines: tuple[Outline, ...] = ()


class _Role:
    """Shared by every converted block; copies of a module keep talking to the same cut."""

    def __init__(self, cut: StageCut, index: int) -> None:
        self.cut = cut
        self.index = index

    def __deepcopy__(self, memo: dict[int, Any]) -> _Role:
        return self


class _PipelineBlock:
    """Mixed into the class of every block while the model is cut."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        role: _Role = self.__dict__["_pipeline_role"]
        return role.cut._call_block(role.index, super().__call__, args, kwargs)  # type: ignore[misc]


@cache
def _pipeline_class(found: type) -> type:
    names = {"__module__": found.__module__, "__qualname__": found.__qualname__, "__doc__": found.__doc__}
    return type(found.__name__, (_PipelineBlock, found), names)


class StageCut:
    """The cut of one model at one stage.

    Args:
        root: the whole model.
        plan: blocks and owners of every stage.
        stage: the stage of this process.
        device: device that placeholders report.
        on_first_block: called before the first local block runs, for example to change the random stream.
        splits_backward: whether gradients of weights are actions of their own.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: CutPlan,
        stage: int,
        device: torch.device,
        on_first_block: Callable[[], None] | None = None,
        splits_backward: bool = False,
    ) -> None:
        self.root = root
        self.plan = plan
        self.stage = stage
        self.device = device
        self.on_first_block = on_first_block
        self.weight_gradients = WeightGradients() if splits_backward else None
        self.start, self.stop = plan.bounds[stage]
        self.is_last = stage == len(plan.bounds) - 1
        self.foreign: dict[str, nn.Parameter] = {}  # name in the plain model -> the original parameter
        self.stand_ins: dict[int, nn.Parameter] = {}  # id of the original parameter -> its placeholder
        self._swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._undo_padding: Callable[[], None] | None = None
        self._undo_split: Callable[[], None] | None = None
        self.ledger = WriteLedger()
        self._received: Any = None
        self._boundary: Any = None
        self._running = False
        self._next = 0  # blocks before this one have had their turn
        self._with_gradients = False
        self._outlines: list[Outline] = []

    # -------------------------------------------------------------- apply and undo
    def apply(self) -> None:
        """Replaces foreign parameters by placeholders, and converts the blocks."""
        names = {id(p): n for n, p in self.root.named_parameters()}
        for module in self.root.modules():
            for leaf, parameter in list(module._parameters.items()):
                if parameter is None or self.stage in self.plan.owners[names[id(parameter)]]:
                    continue
                module._parameters[leaf] = self._stand_in(names[id(parameter)], parameter)
                self._swapped.append((module, leaf, parameter))
        self._undo_padding = keep_padded(self.root, self.plan.blocks)
        if self.weight_gradients is not None:
            self._undo_split = split_linears(self.root, self.weight_gradients)
        for index, name in enumerate(self.plan.blocks):
            block = self.root.get_submodule(name)
            block.__class__ = _pipeline_class(type(block))  # type: ignore[arg-type]
            block.__dict__["_pipeline_role"] = _Role(self, index)

    def free_foreign(self) -> None:
        """Gives the memory of foreign parameters back; from here on, their data is up to whoever restores."""
        for original in self.foreign.values():
            original.data = torch.empty(0, dtype=original.dtype, device=original.device)

    def _stand_in(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in self.stand_ins:
            self.stand_ins[id(parameter)] = placeholder_parameter(parameter, name, self.device, self.ledger)
            self.foreign[name] = parameter
        return self.stand_ins[id(parameter)]

    def restore(self) -> None:
        """Puts the original parameters (their data is up to the caller) and block classes back."""
        for name in self.plan.blocks:
            block = self.root.get_submodule(name)
            if block.__dict__.pop("_pipeline_role", None) is not None:
                block.__class__ = type(block).__mro__[2]
        if self._undo_split is not None:
            self._undo_split()
        for module, leaf, original in self._swapped:
            original.requires_grad_(module._parameters[leaf].requires_grad)  # type: ignore[union-attr]
            module._parameters[leaf] = original
        if self._undo_padding is not None:
            self._undo_padding()
        self._swapped.clear()
        self.foreign.clear()
        self.stand_ins.clear()

    # -------------------------------------------------------------- one run of the step
    def run(self, step: Callable[[], Any], received: Any = None, outlines: tuple[Outline, ...] = ()) -> StageResult:
        """Runs the user's step on this stage.

        Args:
            step: calls the user's step on one micro-batch.
            received: what the previous stage's last block returned; None on the first stage.
            outlines: of the outputs of all blocks before that one, if shapes change from block to block.

        Raises:
            PipelineCutError: the step used a value of another stage, or never reached this stage's blocks.
        """
        self._received, self._running, self._next = received, True, 0
        self._with_gradients = torch.is_grad_enabled()
        self._outlines = list(outlines)
        if self.plan.changing_shapes and self.start > 0:
            self._outlines.append(Outline.of(received))
        try:
            with self.ledger if self.plan.local_writes and self.start > 0 else nullcontext():
                output = step()
                strangers = self._strangers(output)
        except _StageDone:
            boundary, self._boundary = self._boundary, None
            return StageResult(boundary=boundary, outlines=tuple(self._outlines))
        except AttributeError as error:
            # The planning pass ran the whole step without it: an attribute is missing that a foreign block would set.
            raise PipelineCutError(
                f"the step failed on stage {self.stage} ({error}); what a block stores on itself exists only on the "
                "stage that runs it: return it from the block, or use pipeline_parallel_size=1"
            ) from error
        finally:
            self._received, self._running = None, False
        if not self.is_last:
            early = "returned None" if output is None else "returned"
            raise PipelineCutError(
                f"the step {early} on stage {self.stage} without running {self.plan.blocks[self.stop - 1]}; every "
                f"batch must pass through all {len(self.plan.blocks)} blocks: leave samples out in the data or by "
                "their labels, or use pipeline_parallel_size=1"
            )
        if strangers:
            raise PipelineCutError(f"the step returned a value of another stage: {strangers[0]!r}")
        return StageResult(output=output)

    def _call_block(self, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._running:
            return self._call_outside(index, call, args, kwargs)
        self._take_turn(index)
        if index < self.start:
            return self._foreign_output(index)
        name = self.plan.blocks[index]
        if index >= self.stop:
            raise PipelineCutError(f"{name} was called on stage {self.stage} before {self.plan.blocks[self.stop - 1]}")
        strangers = self._strangers((args, kwargs))
        if strangers:
            raise PipelineCutError(f"{name} on stage {self.stage} received a value of another stage: {strangers[0]!r}")
        if index == self.start and self.on_first_block is not None:
            self.on_first_block()
        out = call(*args, **kwargs)
        if index == self.stop - 1 and not self.is_last:
            self._check_gradients(name)
            self._boundary = out
            raise _StageDone
        if self.plan.changing_shapes:
            self._outlines.append(Outline.of(out))
        return out

    def _take_turn(self, index: int) -> None:
        """What arrives from the previous stage is that of one pass through the blocks."""
        if torch._C._current_graph_task_id() != -1:  # again, in place of kept activations
            return
        if index < self._next:
            raise PipelineCutError(
                f"the step ran {self.plan.blocks[index]} after {self.plan.blocks[self._next - 1]}, but in a pipeline "
                "every block runs once per step, in order: generate text, or compare several forward passes, with "
                "pipeline_parallel_size=1"
            )
        self._next = index + 1

    def _call_outside(self, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block that runs outside of the step: again, in place of kept activations, or in a hook of the user's."""
        if not self.start <= index < self.stop:
            raise PipelineCutError(
                f"{self.plan.blocks[index]} lives on stage {self.plan.stage_of_block(index)}, but was called on stage "
                f"{self.stage} outside of the step; let torch.utils.checkpoint cover one block at a time"
            )
        recomputes = torch._C._current_graph_task_id() != -1
        if recomputes and index == self.start and self.on_first_block is not None:
            self.on_first_block()
        return call(*args, **kwargs)

    def _check_gradients(self, name: str) -> None:
        """The value for the next stage must carry its graph, which an outer function must not add afterwards."""
        if not self._with_gradients or torch.is_grad_enabled():
            return
        if any(p.requires_grad for p in self.root.get_submodule(name).parameters()):
            raise PipelineCutError(
                f"{name}, the last block of stage {self.stage}, ran without gradients although its parameters require "
                "them: use torch.utils.checkpoint with use_reentrant=False, or freeze them by requires_grad_(False) "
                "instead of torch.no_grad()"
            )

    def _strangers(self, tree: Any) -> list[Placeholder]:
        """Values of other stages among the leaves."""
        if not self.ledger.is_empty:
            tree = tree_map_only(torch.Tensor, self.ledger.stand_in, tree)
        return placeholders_in(tree)

    def _foreign_output(self, index: int) -> Any:
        if index == self.start - 1:
            return self._received
        origin = (f"output of {self.plan.blocks[index]}",)
        if self.plan.changing_shapes:
            return self._outlines[index].stand_in(origin, self.device, self.ledger)
        if isinstance(self._received, torch.Tensor):  # nearly always; walking a tree takes longer
            return placeholder_like(self._received, origin, self.ledger)
        return tree_map_only(torch.Tensor, lambda t: placeholder_like(t, origin, self.ledger), self._received)
