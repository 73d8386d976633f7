"""Pure: how ranks hear of one another's failures and of a request to stop, whoever waits in whatever collective.

Every rank keeps one socket to a hub on rank 0, beside the process groups and with a thread of its own, so that news
arrive while the main thread waits in a collective, and a rank that dies without a word is noticed when its socket
closes. Messages are lines of JSON and only come from ranks that know the hub's token.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_parallel.watch_hub import Channel, Message

__all__ = [
    "TERMINATED",
    "Position",
    "WatchTimes",
    "Watcher",
    "end_process",
    "is_broken_connection",
    "wait_for_parent",
]

Position = tuple[int, ...]
"""Where a rank stands in its program; ranks pass the same positions in the same, ascending order."""

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a process that ended because of SIGTERM, as a shell would report it."""

_BEFORE_ALL: Position = (-(2**62),)
_BROKEN = re.compile(
    r"gloo|nccl|connection (closed|reset|refused|was likely closed)|broken pipe|timed out|socket timeout", re.IGNORECASE
)
_DISTRIBUTED_ERRORS = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")


@dataclass(frozen=True)
class WatchTimes:
    """Limits in seconds.

    Attributes:
        grace: a rank that hears of another one's failure has this long to fail by itself before it is ended.
        patience: after a request to stop, how long the next step may be away before the rank is ended (at least twice
            the time between the last two steps).
        notice: how long a broken connection waits for the news that explain it.
        connect: how long a rank tries to reach the hub.
    """

    grace: float = 5.0
    patience: float = 15.0
    notice: float = 3.0
    connect: float = 30.0


def is_broken_connection(error: BaseException) -> bool:
    """Whether an error says no more than that a peer is gone.

    >>> is_broken_connection(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    True
    >>> is_broken_connection(ValueError("connection closed"))
    False
    """
    if type(error).__name__ in _DISTRIBUTED_ERRORS or isinstance(error, ConnectionError):
        return True
    return isinstance(error, RuntimeError | OSError) and _BROKEN.search(str(error)) is not None


def end_process(code: int, text: str) -> None:
    """Ends this process with one line on stderr, also while its main thread waits in a collective.

    It lingers for two seconds, unless its parent ends before: launchers tell of the rank that exits first, which should
    be the one with the traceback.
    """
    os.write(2, f"{text}\n".encode(errors="replace"))
    wait_for_parent(2.0)
    for child in multiprocessing.active_children():  # workers of data loaders
        child.kill()
    os._exit(code)


def wait_for_parent(limit: float) -> None:
    """Waits until the parent process has ended."""
    parent, until = os.getppid(), time.monotonic() + limit
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.05)


class Watcher:
    """One rank's end of the watch. Its thread ends the process if the main thread cannot.

    Args:
        address: host and port of the hub.
        token: the hub's token.
        rank: rank of this process.
        labels: how to call each rank in messages.
        times: limits.
        end: called from the thread as `end(exit code, text)` when the process must end.

    Raises:
        OSError: the hub cannot be reached.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        rank: int,
        labels: Sequence[str],
        times: WatchTimes | None = None,
        end: Callable[[int, str], None] = end_process,
    ) -> None:
        self.rank = rank
        self.labels = tuple(labels)
        self.times = times or WatchTimes()
        self._end = end
        self._channel = Channel(socket.create_connection(address, self.times.connect))
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._asked_by: int | None = None
        self._decision: Position | None = None
        self._position, self._stepped_at, self._step_took = _BEFORE_ALL, time.monotonic(), 0.0
        self._deadline: tuple[float, int, str] | None = None
        self._has_stopped = self._settled = self._together = self._hub_left = self._closing = False
        self._asks = self._over = False
        self._channel.send(kind="hello", rank=rank, token=token)
        self._thread = threading.Thread(target=self._listen, name=f"watch-{rank}", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------- this rank's news
    def report(self, text: str, clean: bool = True) -> None:
        """This rank failed.

        Args:
            text: what happened, without this rank's label.
            clean: no communication was broken, so that collectives would still work if every rank stopped here.
        """
        self._stop("failed", text=f"{self.labels[self.rank]} failed: {text}"[:4000], clean=clean)

    def stopped(self) -> None:
        """This rank's main thread left the run because of others: it need not be ended."""
        self._stop("stopped", clean=False)

    def _stop(self, kind: str, **message: Any) -> None:
        with self._changed:
            if self._has_stopped:
                return
            self._has_stopped, self._deadline = True, None
            position = self._position
        self._channel.send(kind=kind, position=position, **message)

    def ask_to_stop(self) -> None:
        """Asks every rank to stop at its next step; may be called from a signal handler."""
        self._asks = True
        self._wake(signal.SIGTERM)

    def finish(self, limit: float) -> bool:
        """This rank's run is over. Waits for the other ranks, up to `limit` seconds.

        Returns:
            Whether some rank was asked to stop before its run was over; the same on every rank, if all came in time.
        """
        if self._asks:  # the thread may not have woken up yet
            self._channel.send(kind="terminate", rank=self.rank)
        self._channel.send(kind="done")
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._hub_left, limit)
            self._deadline = None if self._failure is None else self._deadline
            return self._asks or self._asked_by is not None

    @property
    def wakeup_fd(self) -> int:
        """For `signal.set_wakeup_fd`: SIGTERM asks every rank to stop, also while the main thread cannot run."""
        return self._waker.fileno()

    # -------------------------------------------------------------- news of the others
    @property
    def must_stop(self) -> bool:
        """Whether some rank was asked to stop."""
        return self._asked_by is not None

    def step(self, position: Position) -> bool:
        """Passes a position; True at the first position at which all ranks stop together.

        A rank waits here only between a request and the answer to where everybody stands, which every rank's thread
        gives at once.
        """
        with self._changed:
            if self._asked_by is not None:
                self._changed.wait_for(lambda: self._decision is not None or self._hub_left, self.times.patience)
            now = time.monotonic()
            self._position, self._step_took, self._stepped_at = position, now - self._stepped_at, now
            if self._decision is None or position <= self._decision:
                return False
            if self._failure is None:
                self._deadline = None
            return True

    def first_failure(self, limit: float) -> str | None:
        """The first failure of another rank, waiting for it up to `limit` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._settled, limit)
            return self._failure

    def settle(self, limit: float) -> bool:
        """Waits until every rank has stopped, failed or gone; whether all stopped at one position, none broken."""
        with self._changed:
            self._changed.wait_for(lambda: self._settled or self._hub_left, limit)
            return self._together

    def wait_for_hub(self, limit: float) -> None:
        """Waits until rank 0 has left."""
        with self._changed:
            self._changed.wait_for(lambda: self._hub_left, limit)

    def close(self) -> None:
        """Leaves the watch; no thread and no socket remain."""
        self._closing = True
        self._wake(0)
        self._thread.join()
        for end in (self._woken, self._waker):
            end.close()

    # -------------------------------------------------------------- the thread
    def _wake(self, byte: int) -> None:
        try:
            self._waker.send(bytes([byte]))
        except OSError:  # full: the thread wakes up anyway; closed: too late
            return

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._channel.socket, selectors.EVENT_READ)
            while not self._closing:
                deadline = self._deadline
                timeout = None if deadline is None else max(0.0, deadline[0] - time.monotonic())
                ready = [key.fileobj for key, _ in selector.select(timeout)]
                if self._woken in ready and signal.SIGTERM in self._woken.recv(4096):
                    self._channel.send(kind="terminate", rank=self.rank)
                if self._channel.socket in ready and not self._hear():
                    selector.unregister(self._channel.socket)
                self._check_deadline()
        self._channel.send(kind="bye")
        self._channel.close()

    def _check_deadline(self) -> None:
        with self._changed:
            due = self._deadline
            if due is None or time.monotonic() < due[0]:
                return
            self._deadline, self._has_stopped = None, True
        # The others need not wait for this rank; after SIGTERM its end is news to them.
        kind = "stopped" if due[1] == 1 else "failed"
        self._channel.send(kind=kind, position=self._position, clean=False, text=due[2])
        self._end(due[1], due[2])

    def _hear(self) -> bool:
        """Handles what the hub sent; False if there will be no more."""
        messages = self._channel.receive()
        with self._changed:
            for message in messages or ():
                self._handle(message)
            if messages is None and not self._hub_left:
                self._hub_left = True
                self._mourn(f"{self.labels[0]} was lost: its process ended without a word")
            self._changed.notify_all()
            return not self._hub_left

    def _handle(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "failed":
            self._mourn(message["text"])
        elif kind == "terminate":
            self._asked_by = message["rank"]
            self._channel.send(kind="position", position=self._position)
            patience = max(self.times.patience, 2 * self._step_took)
            text = (
                f"{self.labels[self.rank]} is ended: {self.labels[message['rank']]} received SIGTERM, and no step "
                f"began here within {patience:.0f} s"
            )
            self._set_deadline(patience, TERMINATED, text)
        elif kind == "decision":
            self._decision = tuple(message["position"])
        elif kind == "over":
            self._over = True
        elif kind == "settled":
            self._settled, self._together = True, message["together"]
        elif kind == "bye":
            self._hub_left = True

    def _mourn(self, text: str) -> None:
        """Another rank failed: this one has a moment left to fail by itself."""
        if self._failure is None:
            self._failure = text
            self._deadline = None
            code = 1 if self._asked_by is None else TERMINATED
            self._set_deadline(self.times.grace, code, f"{self.labels[self.rank]} is ended: {text}")

    def _set_deadline(self, seconds: float, code: int, text: str) -> None:
        if self._deadline is None and not self._has_stopped:
            self._deadline = (time.monotonic() + seconds, code, text)
