"""Values that depend on no random stream."""

from __future__ import annotations

import torch
from torch import Tensor


def wave(*shape: int, phase: float = 0.0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers in [-scale, scale] that all differ, the same on every rank."""
    count = torch.Size(shape).numel()
    return (torch.sin(torch.arange(1, count + 1, dtype=torch.float64) * 0.731 + phase) * scale).view(shape).to(dtype)
