"""Pure: what every function about sizes refuses: numbers that are none, negative or beyond anything that can be run."""

from __future__ import annotations

import math

__all__ = ["BUDGETS", "COUNTS", "check_range"]

BUDGETS = (1e6, 1e32)
"""FLOPs of a training run: a second of a slow processor, and a million times all training done so far."""
COUNTS = (1.0, 1e20)
"""Parameters or tokens."""


def check_range(name: str, value: float, limits: tuple[float, float], example: str) -> float:
    """``value`` as a float; refused unless it is a number within ``limits``.

    >>> check_range("flops", 5.76e23, BUDGETS, "5.76e23")
    5.76e+23
    >>> check_range("flops", -1, BUDGETS, "5.76e23")
    Traceback (most recent call last):
    ...
    ValueError: flops=-1 is not within 1e+06 .. 1e+32; use a value such as 5.76e23
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not limits[0] <= value <= limits[1]:
        raise ValueError(
            f"{name}={value!r} is not within {limits[0]:g} .. {limits[1]:g}; use a value such as {example}"
        )
    return float(value)
