"""Pure: the versions of other packages that the test suite runs with, and a note about those outside of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

__all__ = ["OLDEST", "TESTED", "installed_versions", "untested_note"]

OLDEST = (("torch", "2.8"), ("lightning", "2.6"), ("torchmetrics", "1.4"))
"""Oldest allowed version of each package."""
TESTED = (("torch", "2.13.0"), ("lightning", "2.6.6"), ("torchmetrics", "1.9.0"))
"""The versions that are tested together."""


def installed_versions() -> dict[str, str]:
    """Installed versions of the packages of the tested matrix."""
    found = {package: _installed_version(package) for package, _ in TESTED}
    return {package: number for package, number in found.items() if number is not None}


@cache  # read from files, of which a process sees one state
def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def untested_note(installed: Mapping[str, str]) -> str | None:
    """One sentence about versions older than the oldest allowed or of a later minor release than the tested one.

    >>> untested_note({"torch": "2.13.1+cpu", "lightning": "2.6.6"}) is None
    True
    >>> untested_note({"torch": "2.14.0"})
    'torch 2.14.0 is outside of the tested versions (2.8 to 2.13.0): results may be wrong; pip install torch==2.13.0'
    """
    oldest = dict(OLDEST)
    outside = []
    for package, tested in TESTED:
        own = installed.get(package)
        if own is not None and not _minor(oldest[package]) <= _minor(own) <= _minor(tested):
            outside.append((f"{package} {own}", f"({oldest[package]} to {tested})", f"{package}=={tested}"))
    if not outside:
        return None
    found, limits, cures = (" and ".join(texts) for texts in zip(*outside, strict=True))
    verb = "is" if len(outside) == 1 else "are"
    return (
        f"{found} {verb} outside of the tested versions {limits}: results may be wrong; pip install "
        + cures.replace(" and ", " ")
    )


def _minor(text: str) -> tuple[int, int]:
    """Major and minor number of a version.

    >>> _minor("2.13.0a1+cu130")
    (2, 13)
    """
    numbers = [int(n) for n in re.findall(r"\d+", text)[:2]]
    return numbers[0] if numbers else 0, numbers[1] if len(numbers) > 1 else 0
