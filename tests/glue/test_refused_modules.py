"""Modules that are refused before anything of them is divided."""

from __future__ import annotations

import pytest
from lightning.pytorch import LightningModule
from torch import nn

from lightning_parallel.layout import ParallelLayout
from lightning_parallel.strategies.refusals import refuse_module


def test_a_lazy_layer_is_named() -> None:
    module = LightningModule()
    module.first = nn.LazyLinear(4)
    with pytest.raises(
        ValueError, match=r"LightningModule has a lazy layer with first.weight of unknown shape; run it"
    ):
        refuse_module(module, ParallelLayout(), 1, 1)
