"""Pure: the meeting point of the watch. Runs on rank 0, passes news on and keeps the books of who has stopped."""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import threading
from collections.abc import Sequence
from typing import Any

__all__ = ["END", "Channel", "Hub", "Message"]

Message = dict[str, Any]

END = (2**62,)
"""The position of a rank that has left: behind every other."""
_LAST = ("done", "failed", "stopped", "bye", "lost")  # a rank that said this begins no further step
_DRAIN = 0.5  # seconds
_LONGEST = 2**16  # bytes of one message


class Channel:
    """Lines of JSON over a connected socket; sending is safe from several threads."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.settimeout(10.0)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that lost its power says nothing
        for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        self._buffer = b""
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Sends a message; one that cannot be delivered is dropped, since the other side is gone."""
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """The messages that have arrived, or None at the end of the connection; waits for the first byte."""
        try:
            data = self.socket.recv(65536)
        except OSError:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if not data or len(self._buffer) > _LONGEST:
            return None
        with contextlib.suppress(ValueError):  # a stranger who does not speak JSON
            messages = [json.loads(line) for line in lines]
            if all(isinstance(message, dict) for message in messages):
                return messages
        return None

    def close(self) -> None:
        """Ends the connection such that what was sent still arrives: unread data would make it a reset."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.settimeout(_DRAIN)
            while self.socket.recv(65536):
                pass
        self.socket.close()


def _listening_socket(host: str) -> socket.socket:
    if host:
        return socket.create_server((host, 0))
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


class Hub:
    """Passes messages between watchers.

    Args:
        labels: how to call each rank in messages.
        host: address to listen at; "" listens at every address of this machine.

    Attributes:
        port: where the hub listens; chosen by the system.
        token: what a watcher must know to take part.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(self, labels: Sequence[str], host: str = "127.0.0.1") -> None:
        self.labels = tuple(labels)
        self.token = secrets.token_hex(16)
        self._server = _listening_socket(host)
        self.port: int = self._server.getsockname()[1]
        self._books = _Books(self.labels)
        self._channels: dict[int, Channel] = {}
        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="watch-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Says goodbye to every watcher; no thread and no socket remain."""
        self._waker.send(b"\0")
        self._thread.join()

    # -------------------------------------------------------------- the thread
    def _serve(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    self._leave()
                    return
                if key.fileobj is self._server:
                    with contextlib.suppress(OSError):
                        connected, _ = self._server.accept()
                        channel = Channel(connected)
                        self._selector.register(connected, selectors.EVENT_READ, (None, channel))
                else:
                    self._read(*key.data)

    def _leave(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, tuple):
                key.data[1].send(kind="bye")
                key.data[1].close()
        self._selector.close()
        for end in (self._server, self._woken, self._waker):
            end.close()

    def _read(self, rank: int | None, channel: Channel) -> None:
        messages = channel.receive()
        if rank is None and messages:
            rank = self._admit(messages.pop(0), channel)
        if rank is None or messages is None:
            self._forget(rank, channel)
            return
        for message in messages:
            self._tell(self._books.handle(rank, message))
            if message["kind"] == "bye":
                self._forget(None, channel)

    def _admit(self, message: Message, channel: Channel) -> int | None:
        if message.get("kind") != "hello" or message.get("token") != self.token:
            return None
        rank: int = message["rank"]
        self._channels[rank] = channel
        self._selector.modify(channel.socket, selectors.EVENT_READ, (rank, channel))
        for late in self._books.greeting():
            channel.send(**late)
        return rank

    def _forget(self, rank: int | None, channel: Channel) -> None:
        self._selector.unregister(channel.socket)
        self._channels = {r: c for r, c in self._channels.items() if c is not channel}
        channel.close()
        if rank is not None:
            self._tell(self._books.handle(rank, {"kind": "lost"}))

    def _tell(self, messages: Sequence[Message]) -> None:
        for message in messages:
            for rank, channel in self._channels.items():
                if rank != message.get("not_to"):
                    channel.send(**message)


class _Books:
    """What the hub knows. Each message gives the messages that all ranks get in return."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = labels
        self._failure: Message | None = None
        self._asked: Message | None = None
        self._standing: dict[int, tuple[int, ...]] = {}  # answers to the question where everybody stands
        self._stopped: dict[int, tuple[tuple[int, ...], bool]] = {}  # rank -> (position, whether nothing was broken)
        self._finished: set[int] = set()

    def greeting(self) -> list[Message]:
        """What a rank that comes late has missed."""
        return [m for m in (self._failure, self._asked) if m is not None]

    def handle(self, rank: int, message: Message) -> list[Message]:
        kind = message["kind"]
        news: list[Message] = []
        if kind == "terminate":
            if self._asked is None:
                self._asked = {"kind": "terminate", "rank": rank}
                news.append(self._asked)
        elif kind == "position":
            news += self._stand(rank, tuple(message["position"]))
        elif kind == "failed" or (kind == "lost" and rank not in self._stopped):
            lost = f"{self.labels[rank]} was lost: its process ended without a word"
            if self._failure is None:
                self._failure = {"kind": "failed", "text": message.get("text", lost), "not_to": rank}
                news.append(self._failure)
        if kind in _LAST:
            news += self._stand(rank, END)
            news += self._finish(rank)
        if kind in _LAST and kind != "done":
            news += self._stop(rank, tuple(message.get("position", END)), bool(message.get("clean")))
        return news

    def _finish(self, rank: int) -> list[Message]:
        known = len(self._finished)
        self._finished.add(rank)
        return [{"kind": "over"}] if known < len(self._finished) == len(self.labels) else []

    def _stand(self, rank: int, position: tuple[int, ...]) -> list[Message]:
        known = len(self._standing)
        self._standing.setdefault(rank, position)
        if len(self._standing) == known or known + 1 < len(self.labels):
            return []
        return [{"kind": "decision", "position": max(self._standing.values())}]

    def _stop(self, rank: int, position: tuple[int, ...], clean: bool) -> list[Message]:
        known = len(self._stopped)
        self._stopped.setdefault(rank, (position, clean))
        if len(self._stopped) == known or known + 1 < len(self.labels):
            return []
        together = len(set(self._stopped.values())) == 1 and all(clean for _, clean in self._stopped.values())
        return [{"kind": "settled", "together": together}]
