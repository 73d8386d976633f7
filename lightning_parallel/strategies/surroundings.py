"""Glue: what else is loaded in this process, and whether the package was tested with it.

Nothing of Lightning is imported at the top: names are registered while Lightning is being imported, by whichever module
of this package was asked for first, so that what registers them must be loaded whatever else is not yet.
"""

from __future__ import annotations

import sys

from lightning_parallel.versions import installed_versions, untested_note

__all__ = ["SECOND_PACKAGE", "note_surroundings"]

SECOND_PACKAGE = "pytorch_lightning"


def note_surroundings() -> None:
    """Warns about untested versions, and about a second Lightning package in this process."""
    from lightning.pytorch.utilities import rank_zero_warn

    note = untested_note(installed_versions())
    if note is not None:
        rank_zero_warn(note)
    if SECOND_PACKAGE in sys.modules:
        rank_zero_warn(
            f"both lightning.pytorch and {SECOND_PACKAGE} are imported, two packages with classes of their own; "
            "lightning_parallel works with lightning.pytorch only: import Trainer, LightningModule and callbacks from "
            "there"
        )
