"""A clock for tests that count seconds."""

from __future__ import annotations


class Clock:
    """Every look takes half a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now
