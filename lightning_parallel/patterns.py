"""Pure: patterns over dotted module names, and the close names that an error should offer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

__all__ = ["close_names", "digits_as_stars", "match_names"]

_NAMES_SHOWN = 5


def match_names(pattern: str, names: Sequence[str]) -> tuple[str, ...]:
    """Names that ``pattern`` selects, in the order of ``names``.

    ``*`` stands for exactly one component of the dotted path (inside a component, for any part of it). The pattern is
    anchored on the full path; when no full path fits, on the end of the path at a component boundary, so that the
    prefix under which a module hangs in its LightningModule need not be written.

    >>> match_names("layers.*.qkv", ["model.layers.0.qkv", "model.layers.0.attn.qkv", "model.layers.1.qkv"])
    ('model.layers.0.qkv', 'model.layers.1.qkv')
    """
    text = r"\.".join(_component(part) for part in pattern.split("."))
    exact = re.compile(text)
    found = tuple(name for name in names if exact.fullmatch(name))
    if found:
        return found
    suffix = re.compile(rf"(?:.*\.)?{text}")
    return tuple(name for name in names if suffix.fullmatch(name))


def digits_as_stars(name: str) -> str:
    """The name with every component made of digits written as ``*``.

    >>> digits_as_stars("model.layers.11.mlp.fc1")
    'model.layers.*.mlp.fc1'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def close_names(pattern: str, names: Iterable[str]) -> str:
    """Up to five patterns close to ``pattern`` as text for an error, best first; "none" when there are no names.

    >>> close_names("layers.*.fc", ["layers.0.fc1", "layers.1.fc1", "head"])
    'layers.*.fc1, head'
    """
    general = list(dict.fromkeys(digits_as_stars(name) for name in names if name))
    leaf = pattern.rpartition(".")[2]

    def likeness(name: str) -> float:
        whole = difflib.SequenceMatcher(None, pattern, name).ratio()
        return whole + difflib.SequenceMatcher(None, leaf, name.rpartition(".")[2]).ratio()

    return ", ".join(sorted(general, key=likeness, reverse=True)[:_NAMES_SHOWN]) or "none"


def _component(part: str) -> str:
    if part == "*":
        return r"[^.]+"
    return r"[^.]*".join(re.escape(piece) for piece in part.split("*"))
