"""Pure: a file for one rank of one run: its folder, its space on the disk, reads and writes by threads of its own."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

from lightning_parallel.zero.offload import Extent

__all__ = ["Pending", "StateFile", "remove_stale"]

PREFIX = "lightning_parallel-"
LOCK = "lock"
THREADS = 4
CHUNK = 8 * 2**20
"""Bytes of one read or write: several of them keep a disk busy."""
PROBE = b"lightning_parallel" * 227


class StateFile:
    """A file in a folder of its own, which is removed when the object or its process ends.

    The folder's name holds the machine, the process and a number drawn by lot, so that no other run finds it. A lock,
    which the system gives up when the process ends in whatever way, tells others whether it is in use.

    Args:
        path: the folder above; it is made if it does not exist. Folders that dead runs left there are removed.
        label: says in the folder's name whose it is, such as "rank-3".

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, path: str | Path, label: str) -> None:
        above = Path(path).expanduser().absolute()  # a run may change its working directory
        above.mkdir(parents=True, exist_ok=True)
        remove_stale(above)
        self.folder = above / f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:12]}-{label}"
        self._lock = _locked_folder(self.folder)
        self._fd = os.open(self.folder / "state.bin", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._pool: ThreadPoolExecutor | None = None
        self._close = weakref.finalize(self, _remove, self.folder, [self._fd, self._lock], os.getpid())
        try:
            self._probe()
        except OSError:
            self.remove()
            raise

    def _probe(self) -> None:
        os.pwrite(self._fd, PROBE, 0)
        os.fsync(self._fd)
        if os.pread(self._fd, len(PROBE), 0) != PROBE:
            raise OSError(f"{self.folder} does not give back what was written to it")

    def reserve(self, size: int) -> None:
        """Takes space on the disk for so many bytes, so that no later write can find the disk full.

        Raises:
            OSError: there is not so much.
        """
        used = os.fstat(self._fd).st_size
        if size <= used:
            return
        free = os.fstatvfs(self._fd)
        available = free.f_bavail * free.f_frsize
        if size - used > available:
            raise OSError(f"{available / 1e9:.3f} GB are free there, but {(size - used) / 1e9:.3f} GB are needed")
        os.posix_fallocate(self._fd, used, size - used)

    # -------------------------------------------------------------- traffic
    def read(self, extent: Extent, into: memoryview) -> Pending:
        """Begins to fill a buffer of bytes from an extent."""
        return self._begin(self._read, extent, into)

    def write(self, extent: Extent, data: memoryview) -> Pending:
        """Begins to write a buffer of bytes, which must not change until that is done."""
        return self._begin(self._write, extent, data)

    def _begin(self, work: Callable[[memoryview, int], None], extent: Extent, data: memoryview) -> Pending:
        assert data.nbytes == extent.nbytes, "a buffer is as large as its extent"
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "lightning_parallel-disk")
        starts = range(0, data.nbytes, CHUNK)
        return Pending(
            [self._pool.submit(work, data[start : start + CHUNK], extent.offset + start) for start in starts]
        )

    def _read(self, into: memoryview, offset: int) -> None:
        done = 0
        while done < into.nbytes:
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if count == 0:
                raise OSError(f"{self.folder} ends before byte {offset + into.nbytes}")
            done += count

    def _write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self._fd, data[done:], offset + done)

    def rest(self) -> None:
        """Ends the threads; the next read or write starts them again."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def remove(self) -> None:
        """Removes the folder."""
        self.rest()
        self._close()


class Pending:
    """Reads or writes that have begun."""

    def __init__(self, parts: Sequence[Future[None]]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Returns when all are done.

        Raises:
            OSError: one of them failed.
        """
        for part in self._parts:
            part.result()


def _locked_folder(folder: Path) -> int:
    """Makes a folder that has its lock from the moment on at which others can see its name."""
    hidden = folder.parent / f".{uuid4().hex}"
    hidden.mkdir(mode=0o700)
    lock = os.open(hidden / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hidden.rename(folder)
    except OSError:
        os.close(lock)
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return lock


def _remove(folder: Path, descriptors: Sequence[int], owner: int) -> None:
    if os.getpid() != owner:  # a forked child holds copies of the parent's objects, but not its files
        return
    shutil.rmtree(folder, ignore_errors=True)
    for descriptor in descriptors:
        os.close(descriptor)


def remove_stale(above: Path) -> list[Path]:
    """Removes what dead processes of this machine left behind; returns the folders.

    Only folders with the name of this package and this machine whose lock is free are touched.
    """
    removed = []
    for folder in sorted(above.glob(f"{PREFIX}{socket.gethostname()}-*")):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR)
        except OSError:  # gone by now, somebody else's, or not one of these
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        except OSError:  # in use
            pass
        finally:
            os.close(lock)
    return removed
