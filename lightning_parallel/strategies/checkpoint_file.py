"""Glue: checkpoint files that are either whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.plugins.io import TorchCheckpointIO

__all__ = ["WholeFileIO"]


class WholeFileIO(TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO`, with files that a crash cannot leave half-written under their own name.

    A local file is written under a hidden name in the same folder, flushed to the disk and then renamed, which replaces
    an older file of that name in one step. (`TorchCheckpointIO` writes to the system's temporary folder first; where
    that is another disk, its last step is a copy, which can be interrupted.) The checkpoint is streamed to the file
    instead of being copied in memory first. Other file systems are left to `TorchCheckpointIO`.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes a checkpoint.

        Args:
            checkpoint: what the trainer collected.
            path: the file's final path; folders are made.
            storage_options: not supported.

        Raises:
            TypeError: `storage_options` were given.
        """
        filesystem, local = url_to_fs(str(path))
        if storage_options is not None or not isinstance(filesystem, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(local)
        target.parent.mkdir(parents=True, exist_ok=True)
        # No part of the final name: nothing that searches the folder by name or suffix may find it.
        unfinished = target.parent / f".unfinished-{uuid4().hex}"
        try:
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)
