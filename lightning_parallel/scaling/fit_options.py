"""Pure: how a law is fitted, apart from the fit, which needs numpy and scipy."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FitOptions"]


@dataclass(frozen=True)
class FitOptions:
    """How a fit is done.

    Attributes:
        starts: number of starting points, the best of the 4500 of Hoffmann et al.'s grid.
        bootstraps: number of resampled fits for intervals.
        delta: residual of the log loss from which on the Huber loss grows linearly.
        seed: of the resampling.
    """

    starts: int = 40
    bootstraps: int = 200
    delta: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.starts < 1 or self.bootstraps < 0 or not self.delta > 0:
            raise ValueError(
                f"starts={self.starts!r}, bootstraps={self.bootstraps!r} and delta={self.delta!r} must be at least 1, "
                "at least 0 and positive; use for example 40, 200 and 1e-3"
            )
