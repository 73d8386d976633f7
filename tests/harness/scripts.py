"""Runs a script on workers, or forked from one: they have imported what takes a new process most of its time."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tests.harness.process import Finished, end


def run_script(rank: int, world_size: int, script: Path, arguments: list[str], folder: Path) -> str:
    """What the script and its processes print on this rank, run in `folder` as if a launcher had started it.

    Raises:
        AssertionError: it exits with another code than 0.
    """
    argv, path = sys.argv, list(sys.path)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        with _levels_kept(), tempfile.TemporaryFile() as printed:
            try:
                with _stdout_in(printed):
                    runpy.run_path(str(script), run_name="__main__")
            except SystemExit as ended:
                if ended.code not in (None, 0):
                    raise AssertionError(f"{script.name} ended with {ended.code}\n{_text(printed)}") from ended
            return _text(printed)
    finally:
        sys.argv, sys.path[:] = argv, path


def fork_script(
    rank: int, world_size: int, script: Path, arguments: list[str], folder: Path, timeout: float = 100
) -> Finished:
    """What `run_python` returns of a script in a process of its own, which may start others and may be killed.

    Raises:
        AssertionError: it takes longer than `timeout` seconds. Either way nothing that it started goes on.
    """
    with tempfile.TemporaryFile() as output:
        process = multiprocessing.get_context("fork").Process(
            target=_be_script, args=(script, arguments, folder, output.fileno())
        )
        process.start()
        assert process.pid is not None, "the process was started"
        process.join(timeout)
        returncode = process.exitcode
        end(process.pid)
        process.join()
        if returncode is None:
            raise AssertionError(f"hang: {script.name} did not end within {timeout:g} s\n{_text(output)[-8000:]}")
        return Finished(returncode, _text(output))


def _be_script(script: Path, arguments: list[str], folder: Path, output: int) -> None:
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


@contextlib.contextmanager
def _stdout_in(file: IO[bytes]) -> Iterator[None]:
    """Also what the processes print that the script starts."""
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        os.close(before)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@contextlib.contextmanager
def _levels_kept() -> Iterator[None]:
    """What the script wants to hear of logs and warnings is not what the tests after it want."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    levels = [(logger, logger.level) for logger in [logging.root, *loggers]]
    with warnings.catch_warnings():
        yield
    for logger, level in levels:
        logger.setLevel(level)
