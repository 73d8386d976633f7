"""Glue: what the ranks of one launch say of themselves, and where they do not fit together."""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from lightning_parallel.layout import ParallelLayout

__all__ = ["is_launched", "meet", "own_facts", "rank_problems", "usual_layout"]

Facts = Mapping[str, Any]


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of several."""
    return environment.get("WORLD_SIZE", "1").isdigit() and int(environment.get("WORLD_SIZE", "1")) > 1


def own_facts(versions: Mapping[str, str], devices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What this rank tells the others."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = devices[local_rank] if local_rank < len(devices) else None
    return {
        "rank": int(os.environ["RANK"]),
        "host": socket.gethostname(),
        "local_rank": local_rank,
        "devices": len(devices),
        "device": "cpu" if device is None else f"{device['name']}, {device['memory_gib']:.0f} GiB",
        "versions": {"python": platform.python_version(), **versions},
    }


def meet(facts: Facts, seconds: float) -> list[Facts]:
    """Every rank's facts, on every rank. Collective over the launch.

    Raises:
        ValueError: not all ranks came within so many seconds.
    """
    # Only a launched doctor needs torch's processes.
    from lightning_parallel.comm import gather_objects
    from lightning_parallel.mesh import launched_world

    try:
        with launched_world(timedelta(seconds=seconds)) as world:
            return gather_objects(facts, world)
    except RuntimeError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ValueError(
            f"not all {os.environ['WORLD_SIZE']} ranks met at {place} within {seconds:g} s: start every one of them, "
            f"and let the port through ({str(error).splitlines()[0]})"
        ) from error


def rank_problems(ranks: Sequence[Facts]) -> list[str]:
    """Where ranks differ that have to be alike, or cannot all work.

    >>> alike = {"host": "a", "devices": 0, "device": "cpu", "versions": {"torch": "2.13.0"}}
    >>> rank_problems([{**alike, "rank": 0, "local_rank": 0}, {**alike, "rank": 1, "local_rank": 1}])
    []
    >>> rank_problems([{**alike, "rank": 0, "local_rank": 0}, {**alike, "rank": 1, "local_rank": 0}])
    ['ranks 0 and 1 have LOCAL_RANK=0 on a: they would share a device; launch with torchrun']
    """
    found = _differing("device", {facts["rank"]: facts["device"] for facts in ranks})
    for package in dict.fromkeys(name for facts in ranks for name in facts["versions"]):
        found += _differing(package, {f["rank"]: f["versions"].get(package, "not installed") for f in ranks})
    places: dict[tuple[str, int], list[int]] = {}
    for facts in ranks:
        places.setdefault((facts["host"], facts["local_rank"]), []).append(facts["rank"])
    for (host, local_rank), sharing in places.items():
        if len(sharing) > 1:
            text = " and ".join(map(str, sharing))
            found.append(
                f"ranks {text} have LOCAL_RANK={local_rank} on {host}: they would share a device; launch with torchrun"
            )
    lacking = [facts for facts in ranks if facts["devices"] and facts["local_rank"] >= facts["devices"]]
    for facts in lacking:
        found.append(
            f"rank {facts['rank']} is number {facts['local_rank']} of {facts['host']}, which has {facts['devices']} "
            f"devices: start at most {facts['devices']} processes there"
        )
    per_host = Counter(facts["host"] for facts in ranks)
    if len(set(per_host.values())) > 1:
        counts = ", ".join(f"{host}: {count}" for host, count in per_host.items())
        found.append(
            f"nodes have different numbers of ranks ({counts}): layouts need equal nodes; start as many on each"
        )
    return found


def usual_layout(ranks: Sequence[Facts]) -> str:
    """What "tp_pp" makes of equal nodes with its sizes left alone."""
    hosts = Counter(facts["host"] for facts in ranks)
    layout = ParallelLayout.choose(len(ranks), min(hosts.values()))
    return f"tp_pp: tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"


def _differing(name: str, values: Mapping[int, str]) -> list[str]:
    holders: dict[str, list[str]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(str(rank))
    if len(holders) < 2:
        return []
    parts = "; ".join(f"{what} on rank {', '.join(who)}" for what, who in holders.items())
    return [f"ranks differ in {name} ({parts}): make them alike"]
