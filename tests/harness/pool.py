"""The test process's side: starts workers, hands out calls, and turns what comes back into values or failures."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Protocol

from tests.harness import worker as worker_process
from tests.harness.process import end, worker_environment
from tests.harness.protocol import Call, Finish, Idle, Launch, Raised, Returned, address_of, receive, send

MAX_WORKERS = 8
START_LIMIT = 60.0
GRACE = 3.0
"""Seconds that the other ranks get to report after the first one has failed."""
RECOVERY = 6.0
"""Seconds that a worker gets to leave its group after a call that failed."""

_FORKS = multiprocessing.get_context("forkserver")


class RanksFailed(AssertionError):
    """A rank raised or died; the text holds every failing rank's traceback.

    Attributes:
        reported: ranks that came back, with a value or an exception.
    """

    reported: frozenset[int] = frozenset()


class RanksHung(RanksFailed):
    """Some rank did not return in time; the text holds the stacks of those that did not."""


class Ranks(Protocol):
    """The type of the `ranks` fixture."""

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        launch: Launch = "gloo",
    ) -> list[Any]: ...


class Worker:
    """One worker process and the connection to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.stacks = folder / "stacks.txt"
        self.output = folder / "output.txt"
        self.idle: Idle | None = None  # what it said since its last call
        self.connection, theirs = Pipe()
        # Forked from a process that has imported everything, which takes longer than most tests.
        files = worker_process.Files(self.stacks, self.output, folder)
        with theirs:
            self.process = _FORKS.Process(target=worker_process.main, args=(theirs, files, worker_environment()))
            self.process.start()
        self.output.touch()

    @property
    def pid(self) -> int:
        """Process id; also that of the group of all that the worker starts."""
        assert self.process.pid is not None, "the process was started"
        return self.process.pid

    def printed(self) -> str:
        """The end of what the worker wrote to stdout and stderr during the current call."""
        return self.output.read_text(errors="replace")[-3000:]

    def dump_stacks(self) -> str:
        """Python stacks of every thread of the process, as far as it is alive."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR2)
        deadline = time.monotonic() + 8
        text, previous = "", None
        while time.monotonic() < deadline and (not text or text != previous):
            time.sleep(0.1)
            text, previous = self.stacks.read_text(errors="replace"), text
        return text

    def await_idle(self) -> Idle:
        """Waits until the worker is ready: started, or through with leaving its last group."""
        if self.idle is None:
            try:
                if not self.connection.poll(START_LIMIT):
                    raise RanksHung(f"a worker was not ready after {START_LIMIT:g} s\n{self.dump_stacks()}")
                message = receive(self.connection)
            except (EOFError, ConnectionResetError):
                raise RanksFailed(f"a worker ended before its call\n{self.printed()}") from None
            assert isinstance(message, Idle), f"expected Idle, got {message}"
            self.idle = message
        return self.idle

    def recovers(self) -> bool:
        """Whether the worker, which has reported, leaves its group and is ready for another call."""
        try:
            send(self.connection, Finish())
            message = receive(self.connection) if self.connection.poll(RECOVERY) else None
        except (OSError, EOFError):
            return False
        self.idle = message if isinstance(message, Idle) else None
        return self.idle is not None

    def kill(self) -> None:
        """End the process and all it started."""
        end(self.pid)
        self.process.join()
        self.connection.close()


class WorkerPool:
    """Grows to the largest world asked for. Workers that did not report in a failed call are never used again."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._workers: list[Worker] = []
        self._num_started = 0
        self._num_calls = 0
        # What this process has imported every worker would import, too, when it first runs a function of it.
        test_modules = sorted(name for name in sys.modules if name.startswith("tests.") and ".test_" in name)
        _FORKS.set_forkserver_preload(["tests.harness.preload", *test_modules])

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        launch: Launch = "gloo",
    ) -> list[Any]:
        """Run ``function(rank, world_size, *args)`` on `world_size` processes; the values in rank order.

        `timeout` counts seconds of the call alone, not the start of missing workers. RanksHung when it passes,
        RanksFailed when a rank raises or dies.
        """
        if not 1 <= world_size <= MAX_WORKERS:
            raise ValueError(f"world size must lie in 1..{MAX_WORKERS}, got {world_size}")
        module, qualname = address_of(function)
        workers = self._take(world_size)
        try:
            # Under "lightning" rank 0 opens a store at the port, as it does under a real launcher.
            port = free_port() if launch == "lightning" else None
            folder = self._call_folder()
            for rank, worker in enumerate(workers):
                os.truncate(worker.output, 0)
                send(worker.connection, Call(module, qualname, args, rank, world_size, port, launch, folder))
            values = _collect(workers, timeout)
            for worker in workers:
                send(worker.connection, Finish())
        except RanksFailed as failure:
            all_reported = len(failure.reported) == world_size
            self._drop([worker for worker in workers if not (all_reported and worker.recovers())])
            raise
        except BaseException:
            self._drop(workers)
            raise
        return values

    def close(self) -> None:
        """End every worker and remove the pool's files."""
        self._drop(list(self._workers))
        shutil.rmtree(self._folder, ignore_errors=True)

    def pids(self) -> list[int]:
        """Process ids of the live workers, in rank order."""
        return [worker.pid for worker in self._workers]

    def _take(self, count: int) -> list[Worker]:
        """Workers that wait for a call; worn ones are replaced."""
        try:
            while True:
                while len(self._workers) < count:
                    self._num_started += 1
                    self._workers.append(Worker(self._folder / f"worker-{self._num_started}"))
                workers = self._workers[:count]
                worn = [worker for worker in workers if worker.await_idle().is_worn]
                if not worn:
                    break
                self._drop(worn)
        except BaseException:
            self._drop(self._workers[:count])
            raise
        for worker in workers:
            worker.idle = None
        return workers

    def _drop(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            worker.kill()
        self._workers = [worker for worker in self._workers if worker not in workers]

    def _call_folder(self) -> str:
        """A fresh working directory per call, so that stray relative paths meet nobody else's files."""
        self._num_calls += 1
        folder = self._folder / f"call-{self._num_calls}"
        folder.mkdir()
        return str(folder)


def _collect(workers: Sequence[Worker], timeout: float) -> list[Any]:
    """Every rank's value; raises as soon as the picture of a failure is complete."""
    outcomes: dict[int, bytes] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    pending = {worker.connection: rank for rank, worker in enumerate(workers)}
    while pending and (remaining := deadline - time.monotonic()) > 0:
        for ready in wait(list(pending), remaining):
            assert isinstance(ready, Connection), "only connections are waited for"
            rank = pending.pop(ready)
            message = _result(ready, workers[rank])
            if isinstance(message, Returned):
                outcomes[rank] = message.payload
            else:
                errors[rank] = message.traceback
                deadline = min(deadline, time.monotonic() + GRACE)
    waiting = sorted(pending.values())
    if not errors and not waiting:
        return [pickle.loads(outcomes[rank]) for rank in range(len(workers))]
    failure = _failure(workers, errors, waiting, timeout)
    failure.reported = frozenset(range(len(workers))) - frozenset(waiting)
    raise failure


def _result(connection: Connection, worker: Worker) -> Returned | Raised:
    try:
        message: Returned | Raised = receive(connection)
    except (EOFError, ConnectionResetError):
        worker.process.join()
        return Raised(
            f"the process ended with exit code {worker.process.exitcode}\n{worker.stacks.read_text(errors='replace')}"
        )
    return message


def _failure(
    workers: Sequence[Worker], errors: dict[int, str], waiting: Sequence[int], timeout: float
) -> RanksFailed | RanksHung:
    """The exception that tells what each rank was doing."""
    of = f"of {len(workers)}"
    parts = [f"rank {rank} {of} failed:\n{text}" for rank, text in sorted(errors.items())]
    parts += [f"rank {rank} {of} was still running:\n{workers[rank].dump_stacks()}" for rank in waiting]
    ranks = sorted({*errors, *waiting})
    parts += [f"rank {rank} printed:\n{text}" for rank in ranks if (text := workers[rank].printed().strip())]
    body = "\n".join(parts)
    if errors:
        return RanksFailed(f"failure in rank {', '.join(map(str, sorted(errors)))} {of}\n{body}")
    return RanksHung(f"hang after {timeout:g} s: rank {', '.join(map(str, waiting))} {of} did not return\n{body}")


def free_port() -> int:
    """A free port below the range from which the system serves outgoing connections, so that none can take it."""
    for port in random.SystemRandom().sample(range(20000, 32000), 50):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError("found no free port between 20000 and 32000")
