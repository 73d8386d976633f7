"""Mechanism: collective reads at moments that ranks choose by themselves, also where only one of them reads.

User code between steps runs on every rank of a replica, but need not read the same values there: a histogram may be
written by the first rank alone. Whoever reads says what, all ranks of the group gather it together, and a rank that
leaves keeps serving the others until all have left. Each round costs a message of three integers on a host-side group.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup

__all__ = ["ServedReads"]

_LEAVE, _MEET = -1, -2


class ServedReads:
    """Numbered values that the ranks of a group hold parts of.

    Args:
        group: the ranks that serve one another, on a host-side backend.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.is_open = False
        self._gathers: list[Callable[[], Tensor]] = []
        self._writes: Counter[str] = Counter()

    def register(self, gather: Callable[[], Tensor]) -> int:
        """Adds a value; to be called in the same order on every rank.

        Args:
            gather: returns the whole value. Collective over the group.
        """
        self._gathers.append(gather)
        return len(self._gathers) - 1

    def open(self) -> None:
        """From now on values may be read, until `leave`."""
        self.is_open = True

    def fetch(self, number: int) -> Tensor:
        """The whole value. Other ranks need not ask for the same, nor at the same moment.

        Raises:
            RuntimeError: values cannot be read now, or another rank does not know this one.
        """
        self._check_open()
        return self._round(number)[0][number]

    def note_write(self, name: str) -> None:
        """This rank wrote its part of a value; every other rank must do the same before `leave`."""
        self._check_open()
        self._writes[name] += 1

    def meet(self) -> None:
        """Serves the others until all ranks are about to run the same collective."""
        if self.is_open:
            self._serve_until(_MEET)

    def leave(self) -> None:
        """Serves the others until all ranks leave; nothing can be read afterwards.

        Raises:
            RuntimeError: on every rank, if only some of them changed a value.
        """
        self._serve_until(_LEAVE)
        self.close()

    def close(self) -> None:
        """Like `leave`, after an exception: without the others."""
        self.is_open = False
        self._writes.clear()

    def _check_open(self) -> None:
        if not self.is_open:
            raise RuntimeError(
                "a parameter of the whole model was kept from a hook and used outside of it, where each rank holds "
                "its part; keep p.detach().clone() instead"
            )

    def _serve_until(self, code: int) -> None:
        while True:
            codes = self._round(code)[1]
            if max(codes) >= 0:
                continue
            if len(set(codes)) > 1:
                raise RuntimeError(
                    "some ranks left a hook while others wait in it for a collective operation (a barrier, a "
                    "checkpoint, a reduction); call it on every rank"
                )
            return

    def _round(self, code: int) -> tuple[dict[int, Tensor], list[int]]:
        """Everything that any rank asks for in this round, and what each rank said."""
        said = torch.tensor([code, len(self._gathers), _checksum(self._writes)], device="cpu")
        everyone = torch.empty((comm.group_size(self.group), 3), dtype=torch.int64, device="cpu")
        comm.all_gather_into(everyone, said, self.group)
        codes, known, writes = (column.tolist() for column in everyone.unbind(1))
        if len(set(known)) > 1:
            raise RuntimeError(
                f"ranks copied parameters in a hook different numbers of times ({known}); copy them on every rank"
            )
        if max(codes) < 0 and len(set(writes)) > 1:
            self._refuse_writes()
        return {number: self._gathers[number]() for number in sorted({c for c in codes if c >= 0})}, codes

    def _refuse_writes(self) -> None:
        counts = comm.gather_objects(dict(self._writes), self.group)
        names = sorted({name for own in counts for name in own if len({c.get(name, 0) for c in counts}) > 1})
        raise RuntimeError(
            f"{', '.join(names[:4])} changed in a hook on some ranks only (changes per rank: "
            f"{[sum(own.values()) for own in counts]}), so that the parts no longer fit together; change parameters "
            "and gradients on every rank"
        )


def _checksum(writes: Counter[str]) -> int:
    return zlib.crc32(repr(sorted(writes.items())).encode())
