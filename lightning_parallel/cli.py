"""Glue: the command line, ``lightning-parallel`` or ``python -m lightning_parallel``.

A subcommand is a module of ``lightning_parallel.commands`` with a function ``add_parser``; it is listed in COMMANDS.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from lightning_parallel.commands import doctor, explain, plan, scaling
from lightning_parallel.commands.answer import show, standard_console

__all__ = ["main"]

COMMANDS = (plan, explain, scaling, doctor)
USAGE_ERROR = 2


class _Parser(argparse.ArgumentParser):
    """One that complains in one line, as the commands do."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line on ``arguments`` (those of the process by default) and returns the exit status.

    Raises:
        SystemExit: help was asked for and printed.
    """
    parser = _Parser(prog="lightning-parallel", description="plan and understand parallel training")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    try:
        parsed = parser.parse_args(arguments)
        answer = parsed.answer(parsed)
    except ValueError as error:
        sys.stderr.write(f"lightning-parallel: error: {error}\n")
        return USAGE_ERROR
    if not answer.quiet:
        show(answer, as_json=parsed.json, console=standard_console())
    return answer.status
