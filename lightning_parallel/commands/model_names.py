"""Glue: configurations that transformers finds under a model's name."""

from __future__ import annotations

from typing import Any

__all__ = ["config_by_name"]


def config_by_name(name: str) -> dict[str, Any]:
    """The configuration that transformers finds under a model's name (in its cache or on the hub).

    Raises:
        ValueError: transformers is missing, or finds nothing under that name.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ValueError(
            f"--config {name} is no file, and a model's name needs transformers; install it or name a file"
        ) from error
    try:
        found: dict[str, Any] = AutoConfig.from_pretrained(name).to_dict()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"transformers finds no configuration named {name!r}: {' '.join(str(error).split())}"
        ) from error
    return found
