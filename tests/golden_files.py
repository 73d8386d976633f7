"""Golden text files: what is printed today is compared with what was printed before.

Run the tests with UPDATE_GOLDEN=1 to write the files anew, then read the difference before committing it.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare ``text`` with the file ``tests/golden/<name>``; fails when the file is missing or differs."""
    path = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"golden file {name} is missing; run with UPDATE_GOLDEN=1 to write it"
    assert text == path.read_text(encoding="utf-8"), f"golden file {name} differs; UPDATE_GOLDEN=1 writes it anew"
