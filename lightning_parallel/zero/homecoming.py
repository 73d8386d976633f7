"""Mechanism: whether a share was written into while it was on the device, which the host hears without stopping for it.

Version counters do not tell: what is written through `parameter.data` does not count. So bits are compared.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from lightning_parallel.zero.link import HostLink

__all__ = ["POSTPONED", "Homecoming", "Postponed", "same_bits"]

POSTPONED = 2
"""Shares of which the host may not know yet whether they changed, at most: each takes its bytes on the device."""


class Homecoming:
    """A comparison that has begun.

    Args:
        link: to the device.
        now: a share as it is on the device, kept as a copy until `changed`.
        before: as it was.
    """

    def __init__(self, link: HostLink, now: Tensor, before: Tensor) -> None:
        self._now = now.clone()
        self._differs = torch.empty((), dtype=torch.bool, pin_memory=link.pins)
        self._told = link.down(_bits(now).ne(_bits(before)).any(), self._differs)

    def changed(self) -> Tensor | None:
        """What was written, on the device; None if nothing was. The host waits for the comparison."""
        self._told.wait()
        return self._now if bool(self._differs) else None


class _Resolves(Protocol):
    def resolve(self) -> None:
        """Waits for the comparison, and takes over what has changed."""


class Postponed:
    """Homes whose shares have come back. The host waits for those that came long before the latest."""

    def __init__(self) -> None:
        self._waiting: deque[_Resolves] = deque()

    def add(self, home: _Resolves) -> None:
        """Lets a share come back while the host goes on."""
        self._waiting.append(home)
        while len(self._waiting) > POSTPONED:
            self._waiting.popleft().resolve()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bit by bit, so that what is not a number equals itself."""
    return torch.equal(_bits(one), _bits(other))


def _bits(flat: Tensor) -> Tensor:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.dtype.itemsize, torch.uint8)
    return flat.view(kind)
