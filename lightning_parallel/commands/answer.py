"""Glue: what a subcommand answers, as data for ``--json`` and as text for a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = [
    "Answer",
    "add_command",
    "amount",
    "count",
    "positive",
    "short",
    "show",
    "show_parts",
    "standard_console",
    "table",
    "up_to",
]

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Answer:
    """``data`` is printed by ``--json``, ``text`` (strings, tables) otherwise; ``status`` is the exit status.

    ``quiet`` prints nothing: another rank of the same launch does.
    """

    data: Mapping[str, Any]
    text: tuple[RenderableType, ...]
    status: int = 0
    quiet: bool = False


def add_command(
    commands: Subcommands, name: str, answer: Callable[[argparse.Namespace], Answer], *, summary: str
) -> argparse.ArgumentParser:
    """A new subcommand whose parsed arguments go to ``answer``; it gets the option ``--json``.

    ``answer`` raises ValueError for what the user asked wrongly; the command line prints its text.
    """
    parser = commands.add_parser(name, help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.set_defaults(answer=answer)
    return parser


def count(text: str) -> int:
    """The type of arguments that count something: 1 to a billion."""
    return _within(text, int, 1, 10**9)


def up_to(most: int) -> Callable[[str], int]:
    """The type of arguments that say how large an example is that is printed whole."""
    return lambda text: _within(text, int, 1, most)


def positive(text: str) -> float:
    """The type of sizes and rates."""
    return _within(text, float, 1e-9, 1e20)


def amount(text: str) -> float:
    """The type of what there may also be none of."""
    return _within(text, float, 0.0, 1e20)


def _within(text: str, kind: Callable[[str], Number], low: Number, high: Number) -> Number:
    try:
        value = kind(text)
    except ValueError:
        hint = _spelled_out(text)
        raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' if kind is int else ''}number{hint}") from None
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text} is not within {low:g} .. {high:g}")
    return value


def _spelled_out(text: str) -> str:
    """What a number such as 7B is meant to be."""
    exponent = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}.get(text[-1:].lower())
    if exponent is None or not text[:-1].replace(".", "", 1).isdigit():
        return ""
    return f"; write {text[:-1]}e{exponent}"


# Columns of a log or a pipe.
LOG_WIDTH = 80


def standard_console() -> Console:
    """Writes to standard output, as wide as the terminal, or as wide as most where there is none."""
    found = Console(file=sys.stdout)
    return found if found.is_terminal else Console(file=sys.stdout, width=LOG_WIDTH)


def show(answer: Answer, *, as_json: bool, console: Console) -> None:
    """Prints an answer in one of its two forms."""
    if as_json:
        console.file.write(json.dumps(answer.data, indent=2) + "\n")
        return
    show_parts(answer.text, console)


def show_parts(parts: Iterable[RenderableType], console: Console) -> None:
    """Prints tables and sentences."""
    for part in parts:
        # Text is printed as it is: brackets in it are no markup, and a schedule's grid must not be wrapped.
        console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))


def short(number: float) -> str:
    """A large number in three digits and a letter: 1.45B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size and number < 1e15:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def table(title: str, *columns: str) -> Table:
    """An empty table whose first column holds names and whose other columns hold figures."""
    result = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        # What is too wide goes on in the next line: figures must not be cut.
        result.add_column(column, justify="left" if index == 0 else "right", overflow="fold", no_wrap=index == 0)
    return result
