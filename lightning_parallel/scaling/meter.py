"""Pure: what a run has spent and how fast it goes: FLOPs against a budget, and rates over the last steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from lightning_parallel.scaling.checks import check_whole

__all__ = ["ROUNDING", "ComputeMeter", "RateWindow", "Rates"]

ROUNDING = 1e-9
"""By how much a budget may seem to be exceeded, because sums of floating point numbers are rounded."""


@dataclass
class ComputeMeter:
    """FLOPs spent, step by step.

    Attributes:
        flops_per_token: training FLOPs of one token.
        budget: FLOPs that may be spent.
        tokens: tokens of all steps so far.
        largest_step: tokens of the largest step so far.
        unfinished: tokens of batches since the last step.

    >>> meter = ComputeMeter(6.0, budget=100.0)
    >>> [meter.step(tokens) for tokens in (5, 5, 5)]
    [True, True, False]
    >>> meter.flops
    90.0
    """

    flops_per_token: float
    budget: float
    tokens: float = 0.0
    largest_step: float = 0.0
    unfinished: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs spent."""
        return self.flops_per_token * (self.tokens + self.unfinished)

    def clear(self) -> None:
        """Nothing is spent yet."""
        self.tokens = self.largest_step = self.unfinished = 0.0

    def add(self, tokens: float) -> None:
        """Counts batches of the step that is under way."""
        self.unfinished += tokens

    def end_step(self) -> None:
        """The step is over."""
        self.tokens += self.unfinished
        self.largest_step = max(self.largest_step, self.unfinished)
        self.unfinished = 0.0

    def step(self, tokens: float) -> bool:
        """Counts an optimizer step; returns whether another one still fits, as large as the largest so far."""
        self.add(tokens)
        self.end_step()
        return self.fits_another

    @property
    def fits_another(self) -> bool:
        """Whether a step as large as the largest one would stay within the budget."""
        return self.steps_left >= 1

    @property
    def steps_left(self) -> float:
        """Steps as large as the largest one that stay within the budget; infinite before the first step."""
        if not self.largest_step:
            return math.inf
        left = self.budget * (1 + ROUNDING) - self.flops_per_token * self.tokens
        return max(0, math.floor(left / (self.flops_per_token * self.largest_step)))


@dataclass(frozen=True)
class Rates:
    """Speed of the whole job, each sample and token counted once."""

    steps_per_second: float
    samples_per_second: float
    tokens_per_second: float


class RateWindow:
    """Rates over the latest stretches of training.

    Args:
        size: number of stretches to look back.

    >>> window = RateWindow(2)
    >>> for now in (0.0, 1.0, 2.0, 3.0): window.add(now, steps=1, samples=4, tokens=40)
    >>> window.rates()
    Rates(steps_per_second=1.0, samples_per_second=4.0, tokens_per_second=40.0)
    """

    def __init__(self, size: int) -> None:
        kept = check_whole("window", size, 1, "10")
        self._marks: deque[tuple[float, float, float, float]] = deque(maxlen=kept + 1)

    def clear(self) -> None:
        """Another run begins."""
        self._marks.clear()

    def add(self, now: float, steps: float, samples: float, tokens: float) -> None:
        """Notes the end of a stretch at a clock reading in seconds; the first one only starts the clock."""
        self._marks.append((now, steps, samples, tokens))

    def shift(self, seconds: float) -> None:
        """Leaves out a pause, such as a validation, that ended just now."""
        for _ in range(len(self._marks)):
            now, steps, samples, tokens = self._marks.popleft()
            self._marks.append((now + seconds, steps, samples, tokens))

    def rates(self) -> Rates | None:
        """Speed over the window; None until a stretch has ended."""
        if len(self._marks) < 2:
            return None
        elapsed = self._marks[-1][0] - self._marks[0][0]
        if elapsed <= 0:
            return None
        counted = list(self._marks)[1:]
        steps, samples, tokens = (sum(mark[column] for mark in counted) for column in (1, 2, 3))
        return Rates(steps / elapsed, samples / elapsed, tokens / elapsed)
