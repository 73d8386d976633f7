"""Glue: ``python -m lightning_parallel`` is the command line."""

from __future__ import annotations

import sys

from lightning_parallel.cli import main

if __name__ == "__main__":
    sys.exit(main())
