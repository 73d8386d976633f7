"""Glue: public names of lightning_parallel; importing it costs neither torch nor lightning."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
