"""Mechanism: in which order the ranks of a group gather units, although each knows only what it needs itself."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup

__all__ = ["MEET", "NOTHING", "Rounds"]

NOTHING, MEET = -1, -2
"""What a rank says that needs no unit now; and one that goes on when all others say the same."""


class Rounds:
    """A message of one number per rank, over and over: every rank says what it wants, and hears what all want.

    All ranks then gather all of that in the same order, so that they may use units in orders of their own, or not use
    some at all, without waiting for each other in different collectives.

    Args:
        group: the ranks, on a host-side backend.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.is_open = False
        self._said = torch.empty(0)
        self._heard = torch.empty(0)
        self._work: comm.Work | None = None

    def post(self, wish: int) -> None:
        """Says what this rank wants, without waiting for the others."""
        assert not self.is_open, "a round ends before the next one begins"
        self._said, self._heard = _numbers(1), _numbers(comm.group_size(self.group))
        self._said.fill_(wish)
        self._work = comm.all_gather_into(self._heard, self._said, self.group, async_op=True)
        self.is_open = True

    @property
    def is_done(self) -> bool:
        """Whether all have said what they want."""
        return self._work is None or self._work.is_completed()

    def finish(self) -> list[int]:
        """What all want, in the order of ranks."""
        assert self.is_open, "a round begins before it ends"
        if self._work is not None:
            self._work.wait()
            self._work = None
        self.is_open = False
        heard: list[int] = self._heard.tolist()
        return heard


def _numbers(count: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.int64)
