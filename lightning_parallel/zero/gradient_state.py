"""Mechanism: what a bucket holds of gradients at which time, and in which dtype."""

from __future__ import annotations

from enum import Enum

import torch

__all__ = ["GradientState", "wide_dtype"]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are summed and the optimizer works: half precision is widened to float32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class GradientState(Enum):
    """What a bucket holds between and during backward passes, besides the gradients that optimizers see.

    EMPTY -> LOCAL (a gradient arrived) -> REDUCING (`launch`) -> REDUCED (`wait`) -> EMPTY (`deliver`). `clear` leads
    back to EMPTY from anywhere but REDUCING.
    """

    EMPTY = "nothing; in stage 2 also no memory for the full gradient"
    LOCAL = "the sum of this rank's own gradients, in full"
    REDUCING = "the same, while it is being summed over ranks"
    REDUCED = "this rank's share of the sum over ranks"
