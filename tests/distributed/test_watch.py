"""The watch: hub and watchers as threads of this one, which are told to end instead of ended."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_parallel.watch import TERMINATED, Watcher, WatchTimes, is_broken_connection
from lightning_parallel.watch_hub import Hub

TIMES = WatchTimes(grace=0.3, patience=0.6, notice=0.3, connect=5.0)
LIMIT = 5.0


class Run:
    """A hub and its watchers; `ended` holds (rank, exit code, text) of every rank that would have been ended."""

    def __init__(self, size: int) -> None:
        self.labels = [f"rank {rank}" for rank in range(size)]
        self.ended: list[tuple[int, int, str]] = []
        self.hub = Hub(self.labels)
        self.watchers = [self.join(rank) for rank in range(size)]
        wait_until(lambda: len(self.hub._channels) == size)

    def join(self, rank: int) -> Watcher:
        def end(code: int, text: str) -> None:
            self.ended.append((rank, code, text))

        return Watcher(("127.0.0.1", self.hub.port), self.hub.token, rank, self.labels, TIMES, end)

    def wait_for_ends(self, count: int) -> list[tuple[int, int, str]]:
        wait_until(lambda: len(self.ended) >= count)
        return sorted(self.ended)


@contextlib.contextmanager
def running(size: int) -> Iterator[Run]:
    before = set(threading.enumerate())
    run = Run(size)
    try:
        yield run
    finally:
        for watcher in run.watchers:
            watcher.close()
        run.hub.close()
    assert set(threading.enumerate()) <= before, "closing leaves no thread"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.01)


def vanish(watcher: Watcher) -> None:
    """What the system does to the socket of a process that is killed."""
    watcher._channel.socket.shutdown(socket.SHUT_RDWR)


def test_a_quiet_run_ends_nobody_and_leaves_nothing() -> None:
    with running(3) as run:
        assert [watcher.step((0,)) for watcher in run.watchers] == [False] * 3
        time.sleep(2 * TIMES.grace)
        assert not any(watcher.must_stop for watcher in run.watchers)
    assert run.ended == []


def test_the_others_are_ended_after_a_failure_with_its_text() -> None:
    with running(3) as run:
        run.watchers[1].report("ValueError: boom")
        ended = run.wait_for_ends(2)
    text = "rank 1 failed: ValueError: boom"
    assert ended == [(0, 1, f"rank 0 is ended: {text}"), (2, 1, f"rank 2 is ended: {text}")]


def test_ranks_that_fail_by_themselves_are_not_ended() -> None:
    with running(2) as run:
        for watcher in run.watchers:
            watcher.step((4,))
            watcher.report("ValueError: the same everywhere")
        assert [watcher.settle(LIMIT) for watcher in run.watchers] == [True, True]
        time.sleep(2 * TIMES.grace)
    assert run.ended == []


@pytest.mark.parametrize("reason", ["another step", "a broken connection", "left", "vanished"])
def test_ranks_do_not_count_as_together(reason: str) -> None:
    with running(2) as run:
        first, second = run.watchers
        first.step((4,))
        second.step((5,) if reason == "another step" else (4,))
        first.report("ValueError: boom")
        if reason == "vanished":
            vanish(second)
        elif reason == "left":
            second.close()
        else:
            second.report("RuntimeError: boom", clean=reason != "a broken connection")
        assert first.settle(LIMIT) is False
        run.watchers = run.watchers[:1] if reason == "left" else run.watchers


def test_a_rank_that_vanishes_is_named() -> None:
    with running(3) as run:
        vanish(run.watchers[2])
        assert run.watchers[0].first_failure(LIMIT) == "rank 2 was lost: its process ended without a word"
        # Rank 2, of which only the socket is dead, ends as well: it has lost the hub.
        assert [(rank, code) for rank, code, _ in run.wait_for_ends(3)] == [(0, 1), (1, 1), (2, 1)]


def test_the_end_of_the_hubs_process_is_noticed() -> None:
    with running(2) as run:
        for channel in run.hub._channels.values():
            channel.socket.shutdown(socket.SHUT_RDWR)
        assert run.watchers[1].first_failure(LIMIT) == "rank 0 was lost: its process ended without a word"


def test_the_hubs_goodbye_is_no_failure() -> None:
    with running(2) as run:
        run.hub.close()
        run.watchers[1].wait_for_hub(LIMIT)
        time.sleep(2 * TIMES.grace)
        assert run.watchers[1].first_failure(0) is None
        run.hub = Hub(run.labels)
    assert run.ended == []


def test_a_failure_is_told_to_a_rank_that_comes_late() -> None:
    with running(2) as run:
        run.watchers[1].close()
        run.watchers[0].report("ValueError: boom")
        run.watchers[1] = run.join(1)
        assert run.watchers[1].first_failure(LIMIT) == "rank 0 failed: ValueError: boom"


def test_all_ranks_stop_at_the_first_step_that_none_has_begun() -> None:
    with running(3) as run:
        for watcher, position in zip(run.watchers, [(7, 0), (8, 0), (7, 1, 0, 3)], strict=True):
            assert not watcher.step(position)
        run.watchers[2].ask_to_stop()
        wait_until(lambda: all(watcher.must_stop for watcher in run.watchers))
        stops = []
        for watcher, positions in zip(
            run.watchers,
            [[(7, 1, 0, 0), (8, 0), (9, 0)], [(8, 1, 0, 0), (9, 0)], [(7, 1, 0, 4), (8, 0), (8, 1, 0, 0), (9, 0)]],
            strict=True,
        ):
            stops.append(next(position for position in positions if watcher.step(position)))
        assert stops == [(9, 0), (8, 1, 0, 0), (8, 1, 0, 0)]
        time.sleep(2 * TIMES.patience)
        for watcher in run.watchers:
            watcher.stopped()
    assert run.ended == []


def test_a_step_waits_until_it_is_known_where_everybody_stands() -> None:
    with running(2) as run:
        blocked = threading.Event()
        slow = run.watchers[1]
        original = slow._channel.send

        def send_late(**message: object) -> None:
            if message["kind"] == "position":
                blocked.wait(LIMIT)
            original(**message)

        slow._channel.send = send_late  # type: ignore[method-assign]
        slow.step((3,))
        run.watchers[0].step((2,))
        run.watchers[0].ask_to_stop()
        wait_until(lambda: run.watchers[0].must_stop)
        threading.Timer(0.2, blocked.set).start()
        began = time.monotonic()
        assert run.watchers[0].step((3,)) is False
        assert time.monotonic() - began > 0.1
        assert run.watchers[0].step((4,)) is True
        assert slow.step((4,)) is True


@pytest.mark.parametrize("asked", [False, True])
def test_all_ranks_learn_at_the_end_whether_one_was_asked_to_stop(asked: bool) -> None:
    with running(3) as run, ThreadPoolExecutor(3) as pool:
        if asked:
            run.watchers[1].ask_to_stop()
        found = list(pool.map(lambda watcher: watcher.finish(LIMIT), run.watchers))
    assert found == [asked] * 3
    assert run.ended == []


def test_the_end_does_not_wait_for_a_rank_that_is_gone() -> None:
    with running(2) as run:
        vanish(run.watchers[1])
        began = time.monotonic()
        assert run.watchers[0].finish(LIMIT) is False
        assert time.monotonic() - began < LIMIT / 2


def test_ranks_without_a_step_are_ended_as_terminated() -> None:
    with running(2) as run:
        run.watchers[0].ask_to_stop()
        ended = run.wait_for_ends(2)
    assert [(rank, code) for rank, code, _ in ended] == [(0, TERMINATED), (1, TERMINATED)]
    assert TERMINATED == 143
    assert all("rank 0 received SIGTERM, and no step began here within 1 s" in text for _, _, text in ended)


def test_a_rank_that_is_ended_while_stopping_takes_the_others_along() -> None:
    with running(2) as run:
        run.watchers[0].step((1,))
        run.watchers[0].ask_to_stop()
        wait_until(lambda: run.watchers[0].must_stop)
        assert run.watchers[0].step((2,))  # its deadline is over, but rank 1 never begins that step
        ended = run.wait_for_ends(2)
    assert [(rank, code) for rank, code, _ in ended] == [(0, TERMINATED), (1, TERMINATED)]


def test_the_wakeup_descriptor_asks_to_stop() -> None:
    with running(1) as run:
        socket.socket(fileno=socket.dup(run.watchers[0].wakeup_fd)).send(bytes([signal.SIGINT, signal.SIGTERM]))
        wait_until(lambda: run.watchers[0].must_stop)
        assert run.watchers[0].step((0,))


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b"\xff\xfe\n",
        json.dumps({"kind": "hello", "rank": 1, "token": "x"}).encode(),
    ],
)
def test_strangers_are_turned_away(line: bytes) -> None:
    with running(2) as run:
        with socket.create_connection(("127.0.0.1", run.hub.port), LIMIT) as stranger:
            stranger.sendall(line + b"\n" + json.dumps({"kind": "failed", "text": "lie"}).encode() + b"\n")
            assert stranger.recv(100) == b""
        assert run.watchers[0].first_failure(0.1) is None


def test_texts_arrive_whole_up_to_a_limit() -> None:
    with running(2) as run:
        run.watchers[1].report("ValueError: ä\n" + "x" * 100_000)
        text = run.watchers[0].first_failure(LIMIT)
    assert text is not None
    assert text.startswith("rank 1 failed: ValueError: ä\nxxx")
    assert len(text) == 4000


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Timed out waiting 20000ms for recv operation to complete"), True),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("NCCL"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_that_only_say_that_a_peer_is_gone(error: BaseException, expected: bool) -> None:
    assert is_broken_connection(error) is expected
