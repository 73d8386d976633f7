"""Runs scripts and ends processes with everything that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """How a script ended, and what it wrote to stdout and stderr together."""

    returncode: int
    output: str


def worker_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of test processes: this checkout importable, one thread, gloo on the loopback device, no GPU."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PL_")},  # seeds of other tests
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "RES_OPTIONS": "timeout:1 attempts:1",  # torch's store asks for its peers' names, which some network may drop
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        **(extra or {}),
    }


def run_python(
    arguments: Sequence[str | Path], *, cwd: Path, timeout: float, env: Mapping[str, str] | None = None
) -> Finished:
    """Run ``python *arguments`` in `cwd`; an AssertionError with its output if it takes longer than `timeout` seconds.

    `env` is added to `worker_environment`. Whatever the script started and left behind is ended too.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env=worker_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returncode: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            end(process.pid)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if returncode is None:
        raise AssertionError(f"hang: {arguments[0]} did not end within {timeout:g} s\n{text[-8000:]}")
    return Finished(returncode, text)


def end(pid: int) -> None:
    """Kill a process, its descendants and what is left of its process group, which it must lead."""
    for child in descendants(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Children of `pid`, their children and so on, also those in sessions of their own; empty without /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold spaces; the parent is the second field after it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return found
