"""Pure: what every function about sizes refuses: numbers that are none, negative or beyond anything that can be run."""

from __future__ import annotations

import math
from numbers import Integral, Real

__all__ = ["BUDGETS", "COUNTS", "check_range", "check_whole"]

BUDGETS = (1e6, 1e32)
"""FLOPs of a training run: a second of a slow processor, and a million times all training done so far."""
COUNTS = (1.0, 1e20)
"""Parameters or tokens."""


def check_range(name: str, value: float, limits: tuple[float, float], example: str) -> float:
    """``value`` as a float; refused unless it is a finite number within ``limits``, of Python or numpy.

    >>> check_range("flops", 5.76e23, BUDGETS, "5.76e23")
    5.76e+23
    >>> check_range("flops", -1, BUDGETS, "5.76e23")
    Traceback (most recent call last):
    ...
    ValueError: flops=-1 is not within 1e+06 .. 1e+32; use a value such as 5.76e23
    """
    number = _finite(value)
    if number is None or not limits[0] <= number <= limits[1]:
        raise ValueError(
            f"{name}={value!r} is not within {limits[0]:g} .. {limits[1]:g}; use a value such as {example}"
        )
    return number


def check_whole(name: str, value: int, least: int, example: str) -> int:
    """``value`` as an int; refused unless it is a whole number of Python or numpy and at least ``least``.

    >>> check_whole("window", 0, 1, "10")
    Traceback (most recent call last):
    ...
    ValueError: window=0 must be a whole number of at least 1, such as 10
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}, such as {example}")
    return int(value)


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
