"""Blocks that are compiled one by one train like eager ones, with split layers and with sharded gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.glue.oracle import Layout, Site, check
from tests.glue.training import GPT, Notes, fit
from tests.harness import Ranks

PLAN = {"layers.*.mlp.fc1": "colwise", "layers.*.mlp.fc2": "rowwise"}


class Compiled(GPT):
    """Every layer is compiled; the backend runs the captured graphs as they are, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()

    def configure_model(self) -> None:
        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            self.notes.add("operators", len(graph.graph.nodes))
            return graph.forward

        torch._dynamo.reset()
        for layer in self.layers:
            layer.compile(backend=backend)


class Eager(Compiled):
    def configure_model(self) -> None:
        """Nothing is compiled."""


def two_epochs(site: Site) -> Any:
    module = Eager() if site.layout is None else Compiled()
    seen = fit(site, module)
    if site.layout is not None:
        assert max(module.notes.entries["operators"]) > 10  # whole layers were captured, not single calls
    return seen


@pytest.mark.parametrize(("layout", "zero_stage"), [((2, 1, 1), 0), ((1, 1, 2), 2), ((1, 1, 2), 3)], ids=str)
def test_compiled_blocks_train_like_eager_ones(ranks: Ranks, layout: Layout, zero_stage: int) -> None:
    check(ranks, two_epochs, layout, plan=PLAN, zero_stage=zero_stage)
