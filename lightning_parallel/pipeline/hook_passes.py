"""Mechanism: backward passes that users write themselves, on the last stage: what earlier stages wait for must come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_parallel.pipeline.cut import StageCut
from lightning_parallel.pipeline.placeholder import PipelineCutError

__all__ = ["WatchedPasses", "refuse_unserved"]

_PASSES = frozenset({torch.autograd.backward, torch.Tensor.backward, torch.autograd.grad})
_CURE = "call loss.backward() for every batch and without inputs, or use pipeline_parallel_size=1"


class WatchedPasses(TorchFunctionMode):
    """Refuses gradients that are asked for by parameters of other stages, to which no graph of this stage leads.

    Args:
        cut: the cut model of this stage.
    """

    def __init__(self, cut: StageCut) -> None:
        super().__init__()
        self._cut = cut

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PASSES:
            inputs = args[1] if func is torch.autograd.grad else kwargs.get("inputs")
            self._refuse_foreign(inputs)
        return func(*args, **kwargs)

    def _refuse_foreign(self, inputs: Any) -> None:
        if inputs is None:
            return
        if isinstance(inputs, Mapping):
            inputs = list(inputs.values())
        asked = {id(value) for value in (inputs if isinstance(inputs, Sequence) else (inputs,))}
        for name, original in self._cut.foreign.items():
            if asked & {id(original), id(self._cut.stand_ins[id(original)])}:
                raise PipelineCutError(
                    f"a backward pass on stage {self._cut.stage} is for some inputs only, among them {name}, which "
                    f"lives on stage {self._cut.plan.owners[name][0]} and would be left out; {_CURE}"
                )


def refuse_unserved(loss: Tensor, anchors: Sequence[Tensor], stage: int, micro_batch: int) -> None:
    """Raises PipelineCutError if no backward pass came to what a stage had received, although the loss depends on it.

    Args:
        loss: from which the graph is followed.
        anchors: leaves where gradients of what was received arrive. One that the loss does not depend on may lack it.
        stage: of this process.
        micro_batch: whose backward pass is over.
    """
    missing = [anchor for anchor in anchors if anchor.grad is None]
    if missing and _leads_to(loss, missing):
        raise PipelineCutError(
            f"the backward pass of micro-batch {micro_batch} left out what stage {stage} received from stage "
            f"{stage - 1}, although the loss depends on it: the hook backward took a gradient for some inputs only "
            f"(inputs=..., torch.autograd.grad), or none at all; {_CURE}"
        )


def _leads_to(loss: Tensor, leaves: Sequence[Tensor]) -> bool:
    wanted = {id(leaf) for leaf in leaves}
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wanted:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False
