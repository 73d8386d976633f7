"""Glue: the share of the devices' peak that the model's own arithmetic reaches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_parallel.mesh import world_size
from lightning_parallel.metrics.sums import SumsMetric, single_number
from lightning_parallel.scaling.checks import COUNTS, check_range

__all__ = ["ModelFlopsUtilization"]


class ModelFlopsUtilization(SumsMetric):
    """Model FLOPs per second over the peak of all devices (Chowdhery et al. 2022, appendix B).

    FLOPs of a token count once, however many tensor ranks and stages share them; every device counts in the peak.

    Args:
        flops_per_token: training FLOPs of one token, for example from `lightning_parallel.scaling.TransformerSize`.
        peak_flops: FLOPs per second that one device can reach in the precision that is used.
        **kwargs: as for every torchmetrics object.

    >>> mfu = ModelFlopsUtilization(flops_per_token=6e9, peak_flops=1e15)
    >>> mfu.update(tokens=50_000, seconds=1.0)
    >>> round(float(mfu.compute()), 6)
    0.3
    """

    higher_is_better = True

    def __init__(self, flops_per_token: float, peak_flops: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.flops_per_token = check_range("flops_per_token", flops_per_token, COUNTS, "6e9")
        self.peak_flops = check_range("peak_flops", peak_flops, COUNTS, "1e15")
        self.add_sum("tokens")
        self.add_sum("device_seconds")

    def update(self, tokens: Tensor | int, seconds: Tensor | float) -> None:
        """Counts a stretch of training.

        Args:
            tokens: tokens of this replica.
            seconds: how long it took them.
        """
        counted, elapsed = single_number("tokens", tokens), single_number("seconds", seconds)
        self.add("tokens", counted)
        self.add("device_seconds", elapsed * (world_size() // self.replicas))

    def compute(self) -> Tensor:
        """Utilization between 0 and 1, float64; NaN before the first second."""
        return self.total("tokens") * (self.flops_per_token / self.peak_flops) / self.total("device_seconds")
