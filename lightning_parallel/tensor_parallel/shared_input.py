"""Mechanism: column-parallel linears over one input, whose input gradient is reduced once.

Query, key and value (or gate and up) read the same activations, and the gradient of that input is the sum over all of
them and over all ranks. One autograd function computes every output, so that one all-reduce carries the whole sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.comm import ProcessGroup
from lightning_parallel.products import autocast_dtype
from lightning_parallel.tensor_parallel.linear import column_linears
from lightning_parallel.weight_gradients import STORE

__all__ = ["SharedInput"]


class SharedInput:
    """Links the column-parallel linears that a model calls with the same tensor.

    The first one called with a tensor computes the outputs of all of them; the others take theirs when they are called
    with that very tensor, unchanged. A member called with anything else is computed alone, so a member that is never
    called, or called with another input, costs time but no correctness.
    """

    def __init__(self) -> None:
        self.members: list[nn.Linear] = []
        self.clear()

    def add(self, module: nn.Linear) -> None:
        """Link another linear with a weight of ``(out_features, in_features)``."""
        self.members.append(module)

    def remove(self, module: nn.Linear) -> None:
        """Unlink a linear; does nothing when it is not linked."""
        self.clear()
        self.members = [member for member in self.members if member is not module]

    def clear(self) -> None:
        """Forget outputs that were computed and not asked for."""
        self._input: Tensor | None = None
        self._version = 0
        self._dtype: torch.dtype | None = None
        self._outputs: dict[int, tuple[Tensor, Tensor, int]] = {}

    def linear(self, module: nn.Linear, x: Tensor, group: ProcessGroup) -> Tensor:
        """Output of ``module`` for ``x``, which needs a gradient."""
        members, store = self.members, module.__dict__.get(STORE)
        index = next((i for i, member in enumerate(members) if member is module), -1)
        if self._input is x and self._version == x._version and self._dtype == autocast_dtype(x):
            output = self._take(index, module)
            if output is not None:
                return output
        if index < 0 or len(members) == 1:
            return column_linears(x, group, module.weight, module.bias, store=store)[0]
        self.clear()
        parameters = [p for member in members for p in (member.weight, member.bias)]
        outputs = column_linears(x, group, *parameters, store=store)
        self._input, self._version, self._dtype = x, x._version, autocast_dtype(x)
        for i, (member, output) in enumerate(zip(members, outputs, strict=True)):
            if i != index:
                self._outputs[i] = (output, member.weight, member.weight._version)
        return outputs[index]

    def _take(self, index: int, module: nn.Linear) -> Tensor | None:
        """The output kept for a member, unless its weight has changed since."""
        output, weight, version = self._outputs.pop(index, (None, None, 0))
        if not self._outputs:
            self._input = None
        return output if weight is module.weight and weight is not None and weight._version == version else None

    def __getstate__(self) -> dict[str, Any]:
        # A copy links the copied modules; outputs belong to the original's graph.
        return {"members": self.members}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.members = state["members"]
        self.clear()
