"""Shares away from the device: what is lent, what comes back, what is written, and which memory that takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_parallel.zero.homecoming import POSTPONED, Postponed
from lightning_parallel.zero.link import HostBuffers, HostLink, Transfer
from lightning_parallel.zero.offload import Extent, FileLayout
from lightning_parallel.zero.share_home import DistantHome, FileHome, HostHome, Shelf
from lightning_parallel.zero.state_file import Pending, StateFile

SIZE = 40
BYTES = 4 * SIZE


class Counted(StateFile):
    """Notes what is written."""

    def __init__(self, path: Path) -> None:
        self.written: list[int] = []
        super().__init__(path, "rank-0")

    def write(self, extent: Extent, data: memoryview) -> Pending:
        self.written.append(extent.nbytes)
        return super().write(extent, data)


def shelf_of(folder: Path) -> Shelf:
    return Shelf(Counted(folder), HostBuffers(False), HostBuffers(False))


def homes(shelf: Shelf, count: int) -> list[FileHome]:
    """Shares full of their own number, with one element that is not a number."""
    layout, found = FileLayout(), []
    for number in range(count):
        share = torch.full((SIZE,), float(number))
        share[3] = float("nan")
        extent = layout.place(number, "parameters", BYTES)
        shelf.file.reserve(layout.size)
        found.append(FileHome(share, HostLink(torch.device("cpu")), shelf, extent))
    written(shelf).clear()
    return found


def lent_by(home: DistantHome) -> torch.Tensor:
    """What a gather gets."""
    return home.lend(lambda share: None).share


def written(shelf: Shelf) -> list[int]:
    """Bytes of every write so far."""
    assert isinstance(shelf.file, Counted)
    return shelf.file.written


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("at_once", [True, False])
def test_what_comes_back_is_written_if_it_has_changed(at_once: bool, tmp_path: Path) -> None:
    """At once, or, as from a GPU, once the share is used again or others have come back after it."""
    shelf = shelf_of(tmp_path)
    found = homes(shelf, POSTPONED + 2)
    for home in found:
        home._compares_at_once = at_once
    first = found[0]
    lent = lent_by(first).clone()
    first.take_back(lent, lent.clone())
    first.forget()
    same(first.read(0, SIZE), lent)
    assert written(shelf) == [], "nothing was written into it, and what is not a number equals itself"
    values = []
    for number, home in enumerate(found):
        lent = lent_by(home).clone()
        values.append(lent.clone())
        values[-1][5] = 100.0 + number
        home.take_back(values[-1], lent)
        home.forget()
    assert written(shelf) == [BYTES] * (len(found) - (0 if at_once else POSTPONED))
    for home, value in zip(found, values, strict=True):
        same(home.read(0, SIZE), value)
        same(lent_by(home), value)
        home.forget()
    assert written(shelf) == [BYTES] * len(found)
    assert shelf.loans.nbytes <= (POSTPONED + 1) * BYTES, "what is forgotten is used again"
    shelf.file.remove()


def test_a_share_is_read_ahead_once_and_parts_are_written_into_what_is_lent(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path)
    (home,) = homes(shelf, 1)
    home.read_ahead()
    home.read_ahead()
    assert shelf.loans.nbytes == BYTES
    home.write(7, torch.tensor([[70.0, 80.0]]))
    lent = lent_by(home)
    assert lent[7:9].tolist() == [70.0, 80.0]
    assert home.read(6, 9).tolist() == [0.0, 70.0, 80.0]
    values, pending = home.bring()
    pending.wait()
    same(values, lent)
    values[0] = 9.0
    home.put(values).wait()
    home.settle(values)
    home.forget()
    assert lent_by(home)[0] == 9.0, "what a step has written is read anew"
    assert (shelf.loans.nbytes, shelf.buffers.nbytes) == (BYTES, BYTES)
    shelf.file.remove()


def test_on_cpus_a_share_in_host_memory_stays_where_it_is() -> None:
    share = torch.arange(SIZE, dtype=torch.float32)
    home = HostHome(share, HostLink(torch.device("cpu")), Postponed())
    places = {lent_by(home).data_ptr(), home.bring()[0].data_ptr(), home.read(0, 4).data_ptr(), share.data_ptr()}
    assert len(places) == 1
    home.write(2, torch.zeros(3))
    assert share[:6].tolist() == [0, 1, 0, 0, 0, 5]
    home.take_back(torch.ones(SIZE), share)
    assert share.sum() == SIZE


class Copied(HostLink):
    """Counts elements that come back."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.elements = 0

    def down(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        self.elements += source.numel()
        return super().down(source, target)


def test_of_a_share_in_host_memory_one_bit_comes_back_unless_somebody_wrote_into_it() -> None:
    """As from a GPU. Writes through `data`, which no version counts, and what is not a number count by their bits."""
    link, postponed = Copied(), Postponed()
    shares = [torch.full((SIZE,), float(number)) for number in range(POSTPONED + 2)]
    shares[0][3] = float("nan")
    found = [HostHome(share.clone(), link, postponed) for share in shares]
    for home in found:
        home._compares_at_once = False
    for home, share in zip(found, shares, strict=True):
        home.take_back(share.clone(), share)
    assert [int(home._homecoming is not None) for home in found] == [0, 0, *[1] * POSTPONED]
    for home, share in zip(found, shares, strict=True):
        same(home.read(0, SIZE), share)
    assert link.elements == len(found)
    now = shares[1].clone()
    now.data[5] = -0.0
    found[1].take_back(now, shares[1])
    now[5] = 7.0  # whose memory is somebody else's by the time at which the host looks
    assert lent_by(found[1])[5] == 0.0
    assert link.elements == len(found) + 1 + SIZE
