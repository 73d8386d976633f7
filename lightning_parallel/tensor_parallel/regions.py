"""Mechanism: which column layers belong to which row layer, and the module that holds both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_parallel.tensor_parallel.rules import Region
from lightning_parallel.tensor_parallel.styles import COLUMN_STYLES, ROW_STYLES

__all__ = ["group_regions", "lowest_common"]


def group_regions(styles: Mapping[str, str]) -> tuple[Region, ...]:
    """One region per row layer.

    ``styles`` maps module names, in module order, to canonical styles. A row layer takes the unclaimed columns under
    its lowest ancestor that has some; rows deeper in the tree choose first. Where several rows choose among the same
    columns each takes those before it, and the last one the rest.

    >>> [r.columns for r in group_regions({"a.q": "colwise", "a.o": "rowwise", "m.0": "colwise", "m.2": "rowwise"})]
    [('a.q',), ('m.0',)]

    Raises:
        ValueError: a column has no row behind it, or a row no column before it.
    """
    order = {name: place for place, name in enumerate(styles)}
    rows = [name for name, style in styles.items() if style in ROW_STYLES]
    free = [name for name, style in styles.items() if style in COLUMN_STYLES]
    rows.sort(key=lambda row: (-_depth(_ancestor(row, free)), order[row]))
    regions: dict[str, Region] = {}
    for row in rows:
        ancestor = _ancestor(row, free)
        under = [name for name in free if _inside(name, ancestor)] if ancestor is not None else []
        others = [
            other for other in rows if other not in regions and other != row and _ancestor(other, free) == ancestor
        ]
        columns = [name for name in under if not others or order[name] < order[row]]
        if not columns:
            raise ValueError(
                f"{row!r} is 'rowwise' but no 'colwise' layer produces its split input; "
                f"use 'rowwise_split' or name the columns before it"
            )
        free = [name for name in free if name not in columns]
        regions[row] = Region(lowest_common([*columns, row]), tuple(columns), row)
    if free:
        raise ValueError(
            f"{free[0]!r} is {styles[free[0]]!r} but no 'rowwise' layer sums over its split output; "
            f"use 'colwise_gather' or name the row layer behind it"
        )
    return tuple(regions[row] for row in sorted(regions, key=lambda row: order[row]))


def lowest_common(names: Sequence[str]) -> str:
    """Name of the lowest module that holds all ``names``; a module does not hold itself.

    >>> lowest_common(["layers.0.attn.q", "layers.0.attn.out.dense"])
    'layers.0.attn'
    """
    paths = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _ancestor(row: str, columns: Sequence[str]) -> str | None:
    """Lowest module above ``row`` that holds a column; "" is the model itself."""
    name = row
    while name:
        name = name.rpartition(".")[0]
        if any(_inside(column, name) for column in columns):
            return name
    return None


def _inside(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _depth(name: str | None) -> int:
    return -1 if name is None else (name.count(".") + 1 if name else 0)
