"""Runs the jobs of a heat at once, but lets only one of them step at a time: A B C, C B A, A B C, ...

So the noise of the machine hits all alike, and ratios between jobs mean something where absolute times do not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.job import Order, run_rank
from tests.benchmarks.model import Sizes


@dataclass(frozen=True)
class Job:
    """One way to train the model.

    Attributes:
        name: as the tables show it.
        work: module and function, such as "lightning_jobs.ddp".
        ranks: number of processes.
        needs: a module that must be importable.
        last_rank_loss: the loss is that of the last rank (a pipeline), not the mean of the ranks.
    """

    name: str
    work: str
    ranks: int = 2
    needs: str | None = None
    last_rank_loss: bool = False


@dataclass
class Result:
    """What one job measured, one entry per step without the first ones."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class HeatOptions:
    """How a heat is run."""

    sizes: Sizes
    steps: int
    warmup: int
    micro_batches: int
    packages: str | None
    timeout: float


@dataclass
class _Running:
    job: Job
    processes: list[Any] = field(default_factory=list)
    pipes: list[Any] = field(default_factory=list)
    turns: dict[int, socket.socket] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return len(self.turns) == self.job.ranks

    @property
    def is_alive(self) -> bool:
        return all(p.is_alive() for p in self.processes)


def run_heat(jobs: Sequence[Job], options: HeatOptions) -> dict[str, Result]:
    """Runs the jobs; one that fails has an error instead of times. No process outlives the call."""
    deadline = time.monotonic() + options.timeout
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.benchmarks.lightning_jobs", "tests.benchmarks.bare_jobs"])
    running: list[_Running] = []
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        path = str(Path(folder) / "referee")
        server.bind(path)
        server.listen(64)
        try:
            for job in jobs:
                running.append(_start(context, job, options, path))
            _connect(server, {r.job.name: r for r in running}, deadline)
            _take_turns([r for r in running if r.is_ready], deadline)
            return {r.job.name: _collect(r, options.warmup, deadline) for r in running}
        finally:
            for process in (p for r in running for p in r.processes):
                process.kill()
                process.join()


def _start(context: Any, job: Job, options: HeatOptions, path: str) -> _Running:
    running, port = _Running(job), _free_port()
    for rank in range(job.ranks):
        ours, theirs = context.Pipe(duplex=False)
        order = Order(
            job=job.name.replace(" ", "_"),
            work=job.work,
            rank=rank,
            ranks=job.ranks,
            sizes=options.sizes,
            steps=options.warmup + options.steps,
            micro_batches=options.micro_batches,
            port=port,
            referee=path,
            packages=options.packages,
        )
        process = context.Process(target=run_rank, args=(order, theirs), daemon=True)
        process.start()
        theirs.close()
        running.processes.append(process)
        running.pipes.append(ours)
    return running


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _connect(server: socket.socket, running: dict[str, _Running], deadline: float) -> None:
    """Waits until every rank of every living job has said who it is."""
    by_word = {name.replace(" ", "_"): r for name, r in running.items()}
    while any(r.is_alive and not r.is_ready for r in running.values()) and time.monotonic() < deadline:
        if not select.select([server], [], [], 0.2)[0]:
            continue
        connection, _ = server.accept()
        line = b""
        while not line.endswith(b"\n"):
            line += connection.recv(1)
        job, rank = line.decode().split()
        by_word[job].turns[int(rank)] = connection


def _take_turns(racing: list[_Running], deadline: float) -> None:
    """Gives every job one step in turn, in alternating order, until all are done; then lets them go."""
    active, forwards = list(racing), True
    while active:
        for runner in active if forwards else active[::-1]:
            if _one_step(runner, deadline) != {b"d"}:
                active = [r for r in active if r is not runner]
        forwards = not forwards
    for connection in (c for r in racing for c in r.turns.values()):
        with contextlib.suppress(OSError):
            connection.sendall(b"x")
        connection.close()


def _one_step(runner: _Running, deadline: float) -> set[bytes]:
    try:
        for connection in runner.turns.values():
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            connection.sendall(b"g")
        return {connection.recv(1) for connection in runner.turns.values()}
    except OSError:
        return {b""}


def _collect(runner: _Running, warmup: int, deadline: float) -> Result:
    ranks: list[dict[str, Any]] = []
    for pipe in runner.pipes:
        try:
            arrived = pipe.poll(max(0.1, min(30.0, deadline - time.monotonic())))
            ranks.append(pipe.recv() if arrived else {"error": "did not finish in time"})
        except EOFError:
            ranks.append({"error": "ended without a result"})
    errors = [r["error"] for r in ranks if "error" in r]
    if errors:
        return Result(error=errors[0])
    losses = [r["losses"] for r in ranks]
    return Result(
        seconds=[max(step) for step in zip(*(r["seconds"] for r in ranks), strict=True)][warmup:],
        cpu_seconds=[sum(step) for step in zip(*(r["cpu_seconds"] for r in ranks), strict=True)][warmup:],
        losses=losses[-1] if runner.job.last_rank_loss else [sum(s) / len(s) for s in zip(*losses, strict=True)],
    )
