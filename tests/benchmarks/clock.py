"""Times steps, and takes turns with the other jobs of a heat."""

from __future__ import annotations

import contextlib
import socket
import time


class StepClock:
    """One rank's side of the referee: `tick()` ends a step and waits for leave to begin the next.

    Waiting is not counted.

    Args:
        turns: connection to the referee, which sends one byte for each step; None measures without taking turns.
    """

    def __init__(self, turns: socket.socket | None = None) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._turns = turns
        self._began: tuple[float, float] | None = None

    def tick(self) -> None:
        """A step begins, and the one before it is over."""
        if self._stop() and self._turns is not None:
            self._turns.sendall(b"d")
        if self._turns is not None and self._turns.recv(1) != b"g":
            raise RuntimeError("the referee has ended the heat")
        self._began = (time.perf_counter(), time.process_time())

    def finish(self) -> None:
        """The last step is over: waits until every other job is done too, so that tearing down disturbs nobody."""
        self._stop()
        if self._turns is not None:
            with contextlib.suppress(OSError):
                self._turns.sendall(b"f")
                self._turns.recv(1)
                self._turns.close()
            self._turns = None

    def _stop(self) -> bool:
        if self._began is None:
            return False
        self.seconds.append(time.perf_counter() - self._began[0])
        self.cpu_seconds.append(time.process_time() - self._began[1])
        self._began = None
        return True
