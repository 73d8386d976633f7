"""Glue: ``lightning-parallel doctor``: what is installed, what the devices can do, and what would go wrong."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from lightning_parallel.commands.agreement import is_launched, meet, own_facts, rank_problems, usual_layout
from lightning_parallel.commands.answer import Answer, add_command, table
from lightning_parallel.versions import installed_versions, untested_note

if TYPE_CHECKING:
    from lightning_parallel.commands.answer import Subcommands

__all__ = ["add_parser", "environment_problems"]

LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# NCCL hands buffers between processes of a node through shared memory; containers often come with 64 MiB.
ENOUGH_SHARED_MEMORY = 2**30
SHARED_MEMORY = Path("/dev/shm")
_SECOND = "pytorch_lightning"


def add_parser(commands: Subcommands) -> None:
    """Adds ``doctor``."""
    summary = "look at versions, names, devices and links before a run; under torchrun, also at whether ranks agree"
    parser = add_command(commands, "doctor", _answer, summary=summary)
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for the other ranks of a launch")


def environment_problems(environment: Mapping[str, str]) -> list[str]:
    """What the launch variables of a process contradict or leave out.

    >>> environment_problems(dict.fromkeys(LAUNCH_VARIABLES, "1"))
    ['RANK=1 is outside of WORLD_SIZE=1: every process needs a rank of its own from 0 to 0']
    """
    present = [name for name in LAUNCH_VARIABLES if environment.get(name)]
    missing = [name for name in LAUNCH_VARIABLES if name not in present]
    if not present:
        return []
    if missing:
        return [
            f"{', '.join(present)} set without {', '.join(missing)}: processes would wait for one another; "
            "unset them or launch with torchrun"
        ]
    rank, world = environment["RANK"], environment["WORLD_SIZE"]
    if not (rank.isdigit() and world.isdigit() and int(rank) < int(world)):
        last = int(world) - 1 if world.isdigit() else "WORLD_SIZE - 1"
        return [f"RANK={rank} is outside of WORLD_SIZE={world}: every process needs a rank of its own from 0 to {last}"]
    return []


def _answer(arguments: argparse.Namespace) -> Answer:
    for package in ("torch", "lightning"):
        if importlib.util.find_spec(package) is None:
            other = f"; {_SECOND}, which is, is another package" if importlib.util.find_spec(_SECOND) else ""
            raise ValueError(
                f"{package} is not installed{other}: nothing can be trained here, plan and explain work without"
            )
    # The other subcommands work without both.
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_parallel.strategies.registry import STRATEGY_NAMES

    names = [name for name in STRATEGY_NAMES if name in StrategyRegistry]
    missing = [name for name in STRATEGY_NAMES if name not in names]
    devices = _devices()
    problems = [*environment_problems(os.environ), *_device_problems(devices)]
    note = untested_note(installed_versions())
    problems += [note] if note else []
    problems += (
        [f"strategies {', '.join(missing)} are not registered; import lightning_parallel first"] if missing else []
    )
    ranks = _ranks(devices, arguments.wait) if is_launched(os.environ) and not problems else []
    problems += rank_problems(ranks)
    data = {"versions": installed_versions(), "strategies": names, "devices": devices, "problems": problems}
    data |= {"notes": _notes(), "ranks": ranks}
    text = (
        *_tables(devices, ranks),
        f"strategies registered: {', '.join(names)}",
        *([usual_layout(ranks)] if ranks and not problems else []),
        *(problems or ["nothing found that would go wrong"]),
        *_notes(),
    )
    quiet = bool(ranks) and os.environ["RANK"] != "0"
    return Answer(data, text, status=int(bool(problems)), quiet=quiet)


def _ranks(devices: list[dict[str, Any]], seconds: float) -> list[Mapping[str, Any]]:
    return meet(own_facts(installed_versions(), devices), seconds)


def _tables(devices: list[dict[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    versions = table("versions", "package", "installed")
    for package, installed in installed_versions().items():
        versions.add_row(package, installed)
    found = table("devices", "device", "GiB", "reaches directly")
    for device in devices:
        found.add_row(device["name"], f"{device['memory_gib']:.1f}", ", ".join(map(str, device["peers"])) or "none")
    launched = table("ranks of this launch", "rank", "host", "local rank", "device")
    for facts in ranks:
        launched.add_row(str(facts["rank"]), facts["host"], str(facts["local_rank"]), facts["device"])
    return [
        versions,
        *([found] if devices else ["devices: no GPU, processes run on CPUs"]),
        *([launched] if ranks else []),
    ]


def _devices() -> list[dict[str, Any]]:
    import torch

    count = torch.cuda.device_count()
    return [
        {
            "name": torch.cuda.get_device_name(index),
            "memory_gib": torch.cuda.get_device_properties(index).total_memory / 2**30,
            "peers": [o for o in range(count) if o != index and torch.cuda.can_device_access_peer(index, o)],
        }
        for index in range(count)
    ]


def _device_problems(devices: list[dict[str, Any]]) -> list[str]:
    found = []
    lonely = [index for index, device in enumerate(devices) if len(devices) > 1 and not device["peers"]]
    if lonely:
        found.append(
            f"devices {lonely} reach no other directly: keep tensor parallelism off them, it waits for every sum"
        )
    if devices and SHARED_MEMORY.exists() and shutil.disk_usage(SHARED_MEMORY).total < ENOUGH_SHARED_MEMORY:
        found.append(f"{SHARED_MEMORY} holds less than 1 GiB: NCCL may fail; start the container with --shm-size=8g")
    return found


def _notes() -> list[str]:
    if importlib.util.find_spec(_SECOND) is None:
        return []
    others = sorted({*_that_require(_SECOND, distributions())} - {"lightning"})
    note = (
        f"note: {_SECOND} is installed beside lightning, which brings it along but has classes of its own. Neither's "
        "Trainer takes modules, callbacks and loggers of the other, and the strategies here work with lightning's: in "
        f"your code write `import lightning.pytorch as pl` for `import {_SECOND} as pl`"
    )
    # Whose modules and callbacks are of the other kind.
    return [f"{note}. Packages here that are built on {_SECOND}: {', '.join(others)}" if others else note]


def _that_require(package: str, installed: Iterable[Distribution]) -> list[str]:
    """Names of installed packages that need another one, extras left out."""
    pattern = re.compile(package.replace("_", "[-_.]") + r"(?![\w.-])(?!.*\bextra *==)", re.IGNORECASE)
    return [each.name for each in installed if any(map(pattern.match, each.requires or ()))]
