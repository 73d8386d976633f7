"""Mechanism: which column layers belong to which row layer, and the module that holds both."""

from __future__ import annotations

from collections import Counter
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
    free = {name: None for name, style in styles.items() if style in COLUMN_STYLES}
    holding = Counter(ancestor for name in free for ancestor in _ancestors(name))

    def nearest(row: str) -> str | None:
        return next((ancestor for ancestor in _ancestors(row) if holding[ancestor]), None)

    rows = [name for name, style in styles.items() if style in ROW_STYLES]
    rows.sort(key=lambda row: (-_depth(nearest(row)), order[row]))
    regions: dict[str, Region] = {}
    for place, row in enumerate(rows):
        ancestor = nearest(row)
        if ancestor is None:
            raise ValueError(
                f"{row!r} is 'rowwise' but no 'colwise' layer produces its split input; "
                f"use 'rowwise_split' or name the columns before it"
            )
        last = all(nearest(other) != ancestor for other in rows[place + 1 :])
        under = [name for name in free if not ancestor or name.startswith(f"{ancestor}.")]
        columns = [name for name in under if last or order[name] < order[row]]
        if not columns:
            raise ValueError(
                f"{row!r} is 'rowwise' but no 'colwise' layer before it is left for it; use 'rowwise_split'"
            )
        for name in columns:
            del free[name]
            holding.subtract(_ancestors(name))
        regions[row] = Region(lowest_common([*columns, row]), tuple(columns), row)
    if free:
        column = next(iter(free))
        raise ValueError(
            f"{column!r} is {styles[column]!r} but no 'rowwise' layer sums over its split output; "
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


def _ancestors(name: str) -> list[str]:
    """Modules above ``name``, lowest first; "" is the model itself."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, -1, -1)]


def _depth(name: str | None) -> int:
    return -1 if name is None else (name.count(".") + 1 if name else 0)
