"""Pure: measured speeds of finished runs, from which the budget of a number of device hours follows."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lightning_parallel.scaling.checks import check_range
from lightning_parallel.scaling.runs import append_row, is_header, open_table

__all__ = ["RATES", "SPEED_COLUMNS", "Speed", "append_speed", "first_speed"]

RATES = (1.0, 1e18)
"""FLOPs per second of one device."""


@dataclass(frozen=True)
class Speed:
    """How fast a run was.

    Attributes:
        flops_per_second: of one device, counted as the laws do: 6 per parameter and token.
        params: parameters of the model that was measured.
        devices: of the job.
        tokens_per_second: of the job.
    """

    flops_per_second: float
    params: float
    devices: float
    tokens_per_second: float

    def __post_init__(self) -> None:
        check_range("flops_per_second", self.flops_per_second, RATES, "4e14")
        for name in ("params", "devices", "tokens_per_second"):
            check_range(name, getattr(self, name), (1e-9, 1e20), "1e9")


SPEED_COLUMNS = tuple(field.name for field in fields(Speed))


def append_speed(path: str | Path, speed: Speed) -> None:
    """Adds a measurement to a CSV file; makes the file."""
    append_row(path, asdict(speed))


def first_speed(path: str | Path) -> Speed:
    """The first measurement of a file that `ThroughputMonitor(table=...)` wrote.

    The first and not the last, so that a run keeps its size on resume while runs add their speeds, itself included.

    Raises:
        ValueError: the file is missing, has other columns or no row, or a cell that is no positive number.
    """
    try:
        with open_table(path) as file:
            row = next((row for row in csv.DictReader(file) if not is_header(row)), {})
    except OSError as error:
        raise ValueError(
            f"the speed of an earlier run cannot be read ({error}); let ThroughputMonitor(table={str(path)!r}) measure "
            "one, or pass flops_per_second as a number such as 4e14"
        ) from error
    if not set(SPEED_COLUMNS) <= set(row):
        raise ValueError(
            f"{path} holds no speed of a run; let ThroughputMonitor(table=...) measure one, which writes the columns "
            f"{', '.join(SPEED_COLUMNS)}"
        )
    try:
        return Speed(**{name: float(row[name] or "nan") for name in SPEED_COLUMNS})
    except ValueError as error:
        raise ValueError(f"{path}, first row: {error}") from error
