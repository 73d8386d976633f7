"""Glue: torchmetrics objects for language models, reduced over data replicas only, right under every strategy."""

from __future__ import annotations

from lightning_parallel.metrics.language import BitsPerByte, PerplexityFromLoss, TokensSeen
from lightning_parallel.metrics.utilization import ModelFlopsUtilization

__all__ = ["BitsPerByte", "ModelFlopsUtilization", "PerplexityFromLoss", "TokensSeen"]
