"""The file of one rank: its bytes, its space on the disk, and what becomes of its folder."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_parallel.zero import state_file
from lightning_parallel.zero.offload import Extent
from lightning_parallel.zero.state_file import CHUNK, StateFile, remove_stale


def folders(path: Path) -> list[str]:
    return sorted(found.name for found in path.iterdir())


def test_bytes_come_back_in_parts_and_together(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "rank-0")
    size = CHUNK + 12_345
    file.reserve(size + 4096)
    data = bytearray(os.urandom(size))
    file.write(Extent(4096, size), memoryview(data)).wait()
    for start, stop in ((0, size), (CHUNK - 7, CHUNK + 9)):
        into = bytearray(stop - start)
        file.read(Extent(4096 + start, stop - start), memoryview(into)).wait()
        assert into == data[start:stop]
    file.rest()
    file.write(Extent(0, 0), memoryview(b"")).wait()
    with pytest.raises(OSError, match="ends before byte"):
        file.read(Extent(size, 8192), memoryview(bytearray(8192))).wait()
    file.remove()
    file.remove()
    assert folders(tmp_path) == []


def test_space_is_taken_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StateFile(tmp_path, "rank-0")
    file.reserve(1_000_000)
    assert next(tmp_path.glob("*/state.bin")).stat().st_blocks * 512 >= 1_000_000
    monkeypatch.setattr(state_file.os, "fstatvfs", lambda fd: SimpleNamespace(f_bavail=500, f_frsize=1000))
    file.reserve(1_400_000)
    with pytest.raises(OSError, match=r"0\.001 GB are free there, but 0\.600 GB are needed"):
        file.reserve(601_400_000)
    file.remove()


def test_a_disk_that_loses_bytes_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file.os, "pread", lambda fd, count, offset: b"\0" * count)
    with pytest.raises(OSError, match="does not give back what was written to it"):
        StateFile(tmp_path, "rank-0")
    assert folders(tmp_path) == []


def test_folders_of_the_living_stay_and_those_of_the_dead_go(tmp_path: Path) -> None:
    mine = StateFile(tmp_path, "rank-0")
    strangers = tmp_path / "lightning_parallel-elsewhere-1-000000000000-rank-0"
    strangers.mkdir()
    (tmp_path / "notes.txt").touch()
    code = f"from lightning_parallel.zero.state_file import StateFile; a = StateFile({str(tmp_path)!r}, 'rank-1')"
    wait = "; print(flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", code + wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    assert (len(folders(tmp_path)), remove_stale(tmp_path)) == (4, [])
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert len(folders(tmp_path)) == 4, "nobody cleans up after a killed process"
    (gone,) = remove_stale(tmp_path)
    assert gone.name.endswith("-rank-1")
    subprocess.run([sys.executable, "-c", code + "; raise ArithmeticError"], check=False, capture_output=True)
    assert folders(tmp_path) == sorted([strangers.name, mine.folder.name, "notes.txt"])
    child = multiprocessing.get_context("fork").Process(target=mine.remove)
    child.start()
    child.join()
    assert mine.folder.exists(), "a forked child has copies of the parent's objects, not its files"
    mine.remove()


def test_a_folder_goes_with_its_file(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "deep" / "er", "rank-7")
    assert file.folder.name.endswith("-rank-7")
    assert f"-{os.getpid()}-" in file.folder.name
    del file
    assert folders(tmp_path / "deep" / "er") == []


def test_a_folder_goes_wherever_the_process_is_by_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = StateFile("here", "rank-0")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    file.remove()
    assert folders(tmp_path / "here") == []
    monkeypatch.setenv("HOME", str(tmp_path))
    assert StateFile("~/home", "rank-0").folder.parent == tmp_path / "home"
