"""What the test process and its workers say to each other."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

Launch = Literal["gloo", "lightning", "none"]

COLLECTIVE_TIMEOUT = 20.0
"""Seconds after which a gloo collective gives up, so that a lost peer shows as an error of the waiting rank."""


@dataclass(frozen=True)
class Call:
    """One rank's part of one test: the function by name, so that the worker imports the test module itself."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    rank: int
    world_size: int
    port: int | None
    launch: Launch
    folder: str


@dataclass(frozen=True)
class Returned:
    """The function came back; `payload` is its pickled value."""

    payload: bytes


@dataclass(frozen=True)
class Raised:
    """The function, its import or the pickling of its value failed."""

    traceback: str


@dataclass(frozen=True)
class Finish:
    """All ranks are back: leave the group."""


@dataclass(frozen=True)
class Idle:
    """The worker is ready for a call.

    Attributes:
        is_worn: earlier calls left threads in it that wake up all the time; a new one takes its place.
    """

    is_worn: bool = False


def send(connection: Connection, message: object) -> None:
    """Send `message` pickled by value.

    ``Connection.send`` would use torch's reducers, which hand tensors over as shared memory that dies with the sender.
    """
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Receive one message; EOFError when the other side is gone."""
    return pickle.loads(connection.recv_bytes())


def address_of(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and qualified name of a worker function; ValueError if another process could not import it."""
    module, qualname = function.__module__, function.__qualname__
    if "<" in qualname or module == "__main__":
        raise ValueError(f"{module}.{qualname} must be a top-level function of an importable module")
    return module, qualname
