"""The worker process: runs one call after another."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, reduce
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.protocol import COLLECTIVE_TIMEOUT, Call, Finish, Idle, Raised, Returned, receive, send

_PR_SET_PDEATHSIG = 1
_MOST_LOOPS = 4
"""Threads of groups that nobody ended. Each wakes up a hundred times a second, and dozens take a third of two cores."""
_STACKS_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class Files:
    """Paths of a worker.

    Attributes:
        stacks: where stacks go on SIGUSR2 and when the process crashes.
        output: where stdout and stderr go.
        folder: working directory between calls.
    """

    stacks: Path
    output: Path
    folder: Path


def main(connection: Connection, files: Files, environment: Mapping[str, str]) -> None:
    """What a worker does until its connection to the test process ends."""
    os.setsid()  # the worker and whatever it starts are one process group, killed as one
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(files.folder)
    _redirect_output(files.output)
    stacks = files.stacks.open("w")  # stays open for faulthandler until the process ends
    faulthandler.register(_STACKS_SIGNAL, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks, all_threads=True)
    _keep_stack_signals()
    _die_with_parent()
    _remember_installed_plugins()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            send(connection, Idle(is_worn=_leftover_loops() > _MOST_LOOPS))
            _serve(connection, receive(connection))
    sys.stdout.flush()
    os._exit(0)


def _leftover_loops() -> int:
    """Threads of gloo's that run between calls, where a call left a group; 0 where threads cannot be listed."""
    names = []
    for thread in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(thread.read_text().strip())
    return names.count("gloo_tcp_loop")


def _redirect_output(output: Path) -> None:
    # Appended to, because each call truncates the file.
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)


def _serve(connection: Connection, call: Call) -> None:
    """Run one call, report it, and stay in the group until every rank has reported."""
    with _clean_process(call):
        try:
            function = reduce(getattr, call.qualname.split("."), importlib.import_module(call.module))
            gc.freeze()  # what was imported stays: looking through it after every call would cost more than most calls
            assert callable(function), f"{call.module}.{call.qualname} is not callable"
            if call.launch == "gloo":
                _join_group(call)
            message: Returned | Raised = Returned(pickle.dumps(function(call.rank, call.world_size, *call.args)))
        except BaseException:
            message = Raised(traceback.format_exc())
        send(connection, message)
        finish = receive(connection)
        assert isinstance(finish, Finish), f"expected Finish, got {finish}"


def _join_group(call: Call) -> None:
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT)
    store = dist.FileStore(f"{call.folder}.store", call.world_size)
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.world_size, timeout=timeout)


def _torchrun_environment(call: Call) -> dict[str, str]:
    """What torchrun would set for one node; it is how Lightning's TorchElasticEnvironment is found."""
    rank, size = str(call.rank), str(call.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": "0",
        "ROLE_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(call.port),
        "TORCHELASTIC_RUN_ID": f"test-{call.port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


@contextlib.contextmanager
def _clean_process(call: Call) -> Iterator[None]:
    """Give the call its own folder, environment and random stream, and take back whatever it changed."""
    # Here and not above: who only needs the names of this room is spared the seconds that Lightning takes to load.
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    os.chdir(call.folder)
    if call.launch == "lightning":
        os.environ.update(_torchrun_environment(call))
        rank_zero_only.rank = call.rank  # type: ignore[attr-defined]
    random.seed(0)
    torch.manual_seed(0)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # groups end with the last reference, and each keeps several threads awake until then
        os.environ.clear()
        os.environ.update(environment)
        rank_zero_only.rank = 0  # type: ignore[attr-defined]
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)


def _remember_installed_plugins() -> None:
    """Every Trainer asks for callbacks of installed packages, which reads the metadata of all of them once more."""
    from lightning.fabric.utilities import registry

    registry.entry_points = cache(registry.entry_points)  # type: ignore[attr-defined]


def _keep_stack_signals() -> None:
    """Leave faulthandler's signals alone: a Trainer that ends sets every signal to what Python thinks it was before."""
    kept = {_STACKS_SIGNAL, signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
    set_handler = signal.signal

    def set_unless_kept(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number in kept else set_handler(number, handler)

    signal.signal = set_unless_kept  # type: ignore[assignment]


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the test process is killed; elsewhere the closed connection ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
