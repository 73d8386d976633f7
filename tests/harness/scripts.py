"""Runs a script on workers, which have imported already what takes a new process most of its time."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path


def run_script(rank: int, world_size: int, script: Path, arguments: list[str], folder: Path) -> str:
    """What the script prints on this rank, run in `folder` as if a launcher had started it.

    Raises:
        AssertionError: it exits with another code than 0.
    """
    argv, path = sys.argv, list(sys.path)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        with _levels_kept(), contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise AssertionError(f"{script.name} ended with {ended.code}\n{printed.getvalue()}") from ended
    finally:
        sys.argv, sys.path[:] = argv, path
    return printed.getvalue()


@contextlib.contextmanager
def _levels_kept() -> Iterator[None]:
    """What the script wants to hear of logs and warnings is not what the tests after it want."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    levels = [(logger, logger.level) for logger in [logging.root, *loggers]]
    with warnings.catch_warnings():
        yield
    for logger, level in levels:
        logger.setLevel(level)
