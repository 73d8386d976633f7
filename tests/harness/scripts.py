"""Runs a script on workers, which have imported already what takes a new process most of its time."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
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
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise AssertionError(f"{script.name} ended with {ended.code}\n{printed.getvalue()}") from ended
    finally:
        sys.argv, sys.path[:] = argv, path
    return printed.getvalue()
