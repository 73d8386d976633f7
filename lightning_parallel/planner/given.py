"""Pure: the fields of a split that a user gives, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from lightning_parallel.layout import choices_text, divisors
from lightning_parallel.planner.hardware import Cluster
from lightning_parallel.planner.job import Candidate
from lightning_parallel.planner.units import device_word, plural

__all__ = ["FIXABLE", "no_layout_text", "refuse_unknown"]

FIXABLE = (
    "tensor",
    "pipeline",
    "data",
    "context",
    "micro_batch",
    "zero_stage",
    "offload",
    "schedule",
    "virtual_stages",
    "recompute",
    "sequence_parallel",
    "balance",
)
"""Fields of a candidate that a user may fix."""

_COUNTS = ("tensor", "pipeline", "data", "context", "micro_batch", "virtual_stages")


def refuse_unknown(fixed: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that no candidate has, a value that it cannot have, or two that contradict."""
    unknown = sorted(set(fixed) - set(FIXABLE))
    if unknown:
        raise ValueError(f"{', '.join(unknown)} cannot be fixed; use {', '.join(FIXABLE)}")
    for name in _COUNTS:
        value = fixed.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name}={value!r} is not a size; use an integer of at least 1")
    if not isinstance(fixed.get("sequence_parallel", True), bool):
        raise ValueError(f"sequence_parallel={fixed['sequence_parallel']!r} is not a choice; use True or False")
    chunks = {"schedule": "interleaved"} if fixed.get("virtual_stages", 1) > 1 else {}
    Candidate(**{**chunks, **fixed})
    if fixed.get("offload", "none") != "none" and fixed.get("zero_stage") == 0:
        raise ValueError(
            f"offload {fixed['offload']} moves what is sharded, but ZeRO stage 0 shards nothing; use 2 or 3"
        )


def no_layout_text(cluster: Cluster, fixed: Mapping[str, Any]) -> str:
    """Why no layout has the sizes that are given, and sizes that would do."""
    gpus, word = cluster.gpus, device_word(cluster)
    sizes = {name: fixed[name] for name in ("tensor", "pipeline", "data", "context") if name in fixed}
    text = " x ".join(f"{name}={size}" for name, size in sizes.items())
    if not sizes:
        return "a schedule is one of a pipeline, but no layout has more than one stage; leave out --schedule"
    if prod(sizes.values()) == gpus and "pipeline" not in sizes:
        none_left = f"{text} leaves none of the {plural(gpus, word)} for a pipeline"
        return f"{none_left}, and a schedule is one of a pipeline; leave out either"
    if len(sizes) == 1:
        return f"{text} does not fill the {plural(gpus, word)}; use {choices_text(divisors(gpus)[:16])}"
    return f"{text} does not fill the {plural(gpus, word)}; use sizes whose product divides {gpus}"
