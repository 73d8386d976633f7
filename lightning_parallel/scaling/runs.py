"""Pure: tables of training runs: one row of parameters, tokens, FLOPs and final loss per run, for fits."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from lightning_parallel.scaling.laws import FLOPS_PER_PARAM_AND_TOKEN

__all__ = [
    "COLUMNS",
    "Run",
    "RunTable",
    "append_row",
    "append_run",
    "drop_worst",
    "is_header",
    "open_table",
    "read_runs",
    "why_unwritable",
]

COLUMNS = ("params", "tokens", "flops", "loss")
# Names under which published tables of runs carry the same columns.
ALIASES = (
    ("params", ("params", "parameters", "n", "model size", "num_params", "n_params")),
    ("tokens", ("tokens", "d", "training tokens", "num_tokens", "n_tokens")),
    ("flops", ("flops", "flop", "c", "compute", "training flop", "training flops", "compute_flops")),
    ("loss", ("loss", "final loss", "val_loss", "l")),
)


@dataclass(frozen=True)
class Run:
    """One finished training run; ``loss`` in nats per token, ``flops`` 6ND unless something better was counted."""

    params: float
    tokens: float
    loss: float
    flops: float

    def __post_init__(self) -> None:
        for name in COLUMNS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r} of a run is not a positive number")

    @classmethod
    def of(cls, params: float, tokens: float, loss: float) -> Run:
        """A run whose compute is taken as 6ND."""
        return cls(params, tokens, loss, FLOPS_PER_PARAM_AND_TOKEN * params * tokens)


@dataclass(frozen=True)
class RunTable:
    """Runs of a file, and how many rows it had that were incomplete."""

    runs: tuple[Run, ...]
    skipped: int


def read_runs(path: str | Path) -> RunTable:
    """Reads a CSV file with columns for parameters, loss, and tokens or FLOPs (the other follows from 6ND).

    Rows with an empty cell or NaN among these are left out and counted. A repeated header is none.

    Raises:
        ValueError: a column is missing, a cell is no positive number, or the file is no text in UTF-8.
    """
    with open_table(path) as file:
        reader = csv.DictReader(file)
        found = _columns(path, reader.fieldnames or ())
        runs, skipped = [], 0
        for number, row in enumerate(reader, start=2):
            if is_header(row):
                continue
            cells = {name: (row[column] or "").strip() for name, column in found.items()}
            if any(cell.lower() in ("", "nan", "none") for cell in cells.values()):
                skipped += 1
                continue
            try:
                runs.append(_run({name: float(cell) for name, cell in cells.items()}))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return RunTable(tuple(runs), skipped)


@contextmanager
def open_table(path: str | Path) -> Iterator[TextIO]:
    """A CSV file to read, also with the mark that spreadsheets put in front of UTF-8.

    Raises:
        ValueError: the file is no text in UTF-8, or no CSV.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error}); save it as CSV in UTF-8") from error
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV: {error}") from error


def _columns(path: str | Path, header: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, aliases in ALIASES:
        for column in header:
            if column is not None and column.strip().lower() in aliases:
                found.setdefault(name, column)
    if not {"params", "loss"} <= found.keys() or not {"tokens", "flops"} & found.keys():
        raise ValueError(
            f"{path} has the columns {', '.join(header) or 'none'}; needed are params, loss, and tokens or flops, "
            f"separated by commas, for example '{','.join(COLUMNS)}'"
        )
    return found


def _run(cells: dict[str, float]) -> Run:
    params, tokens, flops = cells["params"], cells.get("tokens"), cells.get("flops")
    if tokens is None:
        tokens = cells["flops"] / (FLOPS_PER_PARAM_AND_TOKEN * params)
    if flops is None:
        flops = FLOPS_PER_PARAM_AND_TOKEN * params * tokens
    return Run(params, tokens, cells["loss"], flops)


def append_run(path: str | Path, run: Run) -> None:
    """Adds a run to a table; see `append_row`."""
    append_row(path, {name: float(getattr(run, name)) for name in COLUMNS})


def append_row(path: str | Path, row: Mapping[str, float]) -> None:
    """Adds a row to a CSV file in one write, so that runs that end together do not mix their rows; makes the file.

    Two that make the file at one time may both write its header, which `is_header` tells readers.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    header, line = ",".join(row) + "\n", ",".join(map(repr, row.values())) + "\n"
    with file.open("ab+", buffering=0) as table:
        if table.seek(0, os.SEEK_END) == 0:
            line = header + line
        else:
            table.seek(-1, os.SEEK_END)
            line = line if table.read(1) == b"\n" else "\n" + line
        table.write(line.encode())


def why_unwritable(path: str | Path, columns: Sequence[str] = ()) -> str:
    """Why a file cannot be written; empty if it can. It makes neither file nor folder.

    Args:
        path: of the file.
        columns: of the rows that are to be added; a file that is there must have the same ones.
    """
    file = Path(path)
    if file.is_dir():
        return f"{file} is a folder; name a file in it"
    nearest = file if file.exists() else next(folder for folder in file.absolute().parents if folder.exists())
    usable = os.access(nearest, os.W_OK) and (nearest == file or nearest.is_dir())
    if not usable:
        return f"{file} cannot be written: check who may write to {nearest}"
    return _other_columns(file, columns) if columns and nearest == file else ""


def _other_columns(file: Path, columns: Sequence[str]) -> str:
    """Under another header a row would be read as what it is not."""
    try:
        with open_table(file) as table:
            header = next(csv.reader(table), [])
    except (OSError, ValueError) as error:
        return f"rows cannot be added to {file}: {error}"
    if not header or tuple(name.strip() for name in header) == tuple(columns):
        return ""
    return f"{file} has the columns {', '.join(header)}, not {', '.join(columns)}; name another file"


def is_header(row: Mapping[str, str | None]) -> bool:
    """Whether a row repeats the names of the columns."""
    return all(value == column for column, value in row.items())


def drop_worst(runs: Iterable[Run], count: int) -> tuple[Run, ...]:
    """All runs but the ``count`` of highest loss, as the published refit leaves out five, in the order given."""
    kept = list(runs)
    if count and not 0 <= count < len(kept):
        raise ValueError(f"cannot leave out the {count} worst of {len(kept)} runs; use 0 .. {max(0, len(kept) - 1)}")
    worst = sorted(range(len(kept)), key=lambda index: kept[index].loss, reverse=True)[:count]
    return tuple(run for index, run in enumerate(kept) if index not in worst)
