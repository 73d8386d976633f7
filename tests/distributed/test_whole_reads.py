"""Values that ranks read one by one, in different orders, or alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_parallel.whole.reads import ServedReads
from tests.harness import Ranks


def make_reads(rank: int, served: list[str]) -> ServedReads:
    reads = ServedReads(dist.group.WORLD)
    for name in ("a", "b", "c"):

        def gather(name: str = name) -> torch.Tensor:
            served.append(name)
            total = torch.tensor([float(ord(name)) * (rank + 1)])
            dist.all_reduce(total)
            return total

        reads.register(gather)
    return reads


def read_apart(rank: int, world_size: int) -> tuple[list[float], list[str]]:
    """Every rank reads something else; one reads nothing; then all meet for a collective, and read again."""
    served: list[str] = []
    reads = make_reads(rank, served)
    reads.open()
    wanted = {0: [0, 1, 0], 1: [1], 2: []}[rank]
    values = [float(reads.fetch(number)) for number in wanted]
    reads.meet()
    dist.barrier()
    values += [float(reads.fetch(2))] if rank == 2 else []
    reads.leave()
    return values, served


def test_ranks_read_what_they_like(ranks: Ranks) -> None:
    found = ranks(3, read_apart)
    a, b, c = (6.0 * ord(name) for name in "abc")
    assert [values for values, _ in found] == [[a, b, a], [b], [c]]
    assert len({tuple(served) for _, served in found}) == 1, "every rank takes part in every gather, in one order"


def misuse(rank: int, world_size: int) -> list[str]:
    texts = []

    def attempt(work: Any) -> None:
        try:
            work()
        except RuntimeError as error:
            texts.append(str(error))

    reads = make_reads(rank, [])
    attempt(lambda: reads.fetch(0))
    reads.open()
    reads.note_write("a.weight")
    if rank == 0:
        reads.note_write("b.weight")
    attempt(reads.leave)
    reads.close()
    reads.open()
    attempt(reads.leave if rank == 0 else reads.meet)
    reads.close()
    if rank == 0:
        reads.register(lambda: torch.zeros(1))
    reads.open()
    attempt(reads.leave)
    return texts


def test_what_does_not_fit_together_is_refused_on_every_rank(ranks: Ranks) -> None:
    for texts in ranks(2, misuse):
        assert len(texts) == 4
        assert "kept from a hook and used outside of it" in texts[0]
        assert "b.weight changed in a hook on some ranks only (changes per rank: [2, 1])" in texts[1]
        assert "call it on every rank" in texts[2]
        assert "different numbers of times ([4, 3])" in texts[3]


def test_one_process_needs_no_group() -> None:
    reads = ServedReads(None)
    number = reads.register(lambda: torch.ones(2))
    reads.open()
    assert reads.fetch(number).sum() == 2
    reads.note_write("a")
    reads.leave()
    assert not reads.is_open
