"""One rank of one job, in a process of its own."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.clock import StepClock
from tests.benchmarks.model import Sizes


@dataclass(frozen=True)
class Order:
    """What a process is told to do.

    Attributes:
        work: module and function of the job, such as "bare_jobs.our_layers".
        referee: path of the referee's unix socket.
        packages: folder that Megatron-Core and DeepSpeed were installed into, if not among the installed packages.
    """

    job: str
    work: str
    rank: int
    ranks: int
    sizes: Sizes
    steps: int
    micro_batches: int
    port: int
    referee: str
    packages: str | None = None


@dataclass(frozen=True)
class Run:
    """What a job's function gets."""

    rank: int
    ranks: int
    sizes: Sizes
    steps: int
    micro_batches: int
    clock: StepClock


def run_rank(order: Order, results: Any) -> None:
    """Runs one rank and sends its times and losses, or its error, through the connection `results`."""
    os.environ.update(
        RANK=str(order.rank),
        LOCAL_RANK=str(order.rank),
        WORLD_SIZE=str(order.ranks),
        LOCAL_WORLD_SIZE=str(order.ranks),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(order.port),
        TORCHELASTIC_RUN_ID="benchmark",
    )
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - tables and notices of eight processes help nobody
    if order.packages is not None:
        sys.path.append(order.packages)
        os.environ["PATH"] += f"{os.pathsep}{order.packages}/bin"  # of the compiler that DeepSpeed calls
    try:
        results.send(_measure(order))
    except BaseException as error:  # noqa: B902 - whatever it is, the table shows it
        last = traceback.extract_tb(error.__traceback__)[-1]
        results.send({"error": f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"})
    results.close()
    sys.stderr.flush()
    os._exit(0)  # peers that are ahead or behind must not make the end hang


def _measure(order: Order) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as turns:
        turns.connect(order.referee)
        turns.sendall(f"{order.job} {order.rank}\n".encode())
        clock = StepClock(turns)
        module, _, function = order.work.rpartition(".")
        work = getattr(importlib.import_module(f"tests.benchmarks.{module}"), function)
        run = Run(order.rank, order.ranks, order.sizes, order.steps, order.micro_batches, clock)
        losses = [float(value) for value in work(run)]
    return {"seconds": clock.seconds, "cpu_seconds": clock.cpu_seconds, "losses": losses}
