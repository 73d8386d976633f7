"""Train a model whose state is several times larger than the memory it may use: what `zero3_nvme` saves and costs.

    python examples/finetune_offload.py                       # 4 processes, 38 million parameters, 180 MB each
    python examples/finetune_offload.py --checkpoint gpt.ckpt --nvme-path /local/scratch

Weights, gradients and Adam's moments take 16 bytes per parameter. Every strategy runs in processes of its own, whose
memory beyond imports and connections is limited by the system (RLIMIT_DATA; on GPUs by torch, for device memory): what
needs more dies.
The first run has no limit and is what the others are compared with. On CPUs device and host memory are one, so that
only files make room; on GPUs try --strategies zero3,zero3_offload,zero3_nvme.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from train_gpt import GPT

from lightning_parallel import ZeroConfig, ZeroStrategy

MEGABYTE = 10**6
BYTES_PER_PARAMETER = 16
STRATEGIES: dict[str, ZeroConfig] = {
    "zero2": ZeroConfig(2),
    "zero2_offload": ZeroConfig(2, "cpu"),
    "zero3": ZeroConfig(3),
    "zero3_offload": ZeroConfig(3, "cpu"),
    "zero3_nvme": ZeroConfig(3, "nvme", offload_parameters=True),
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the comparison, and of one run in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--strategies",
        default="zero3,zero3_nvme",
        help=f"of {', '.join(STRATEGIES)}: tried under the limit, one after the other",
    )
    parser.add_argument("--reference", default="zero3", help="runs without a limit first; '' for none")
    parser.add_argument("--limit", type=float, default=180, help="megabytes that each process may use")
    parser.add_argument("--devices", type=int, default=4, help="processes, or GPUs")
    parser.add_argument("--checkpoint", help="start from weights that examples/train_gpt.py left")
    parser.add_argument("--nvme-path", default=None, help="folder for files; the current one by default")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--run", help="(internal) train with this strategy, in this process and those it starts")
    parser.add_argument("--report", type=Path, help="(internal) where the run leaves its figures")
    parser.add_argument("--limited", action="store_true", help="(internal) apply the limit to the run")
    return parser.parse_args(arguments)


# ------------------------------------------------------------------------------------------------ one run
def limit_memory(megabytes: float, weights: int) -> None:
    """Whatever this process takes beyond so much fails from now on; it has the weights already."""
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, megabytes * MEGABYTE / total), device)
        return
    limit = status("VmData") - weights + int(megabytes * MEGABYTE)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def take_a_step() -> None:
    """Imports what torch imports in the first step of an optimizer, and starts its threads."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()


def status(key: str) -> int:
    """Bytes that Linux reports for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith(f"{key}:")]
    return int(found) * 1024


class Figures(Callback):
    """Limits the memory once processes are connected; losses, seconds of every step, and the most memory."""

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self.before = self.peak = 0.0
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.started = 0.0

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        take_a_step()
        weights = sum(p.numel() * p.element_size() for p in module.parameters())
        self.before = status("VmRSS") - weights
        if self.limit is not None:
            limit_memory(self.limit, weights)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))  # waits for the device, so that the clock is right
        self.seconds.append(time.perf_counter() - self.started)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if torch.cuda.is_available():
            self.peak = torch.cuda.max_memory_allocated()
        else:
            self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.before


def batches(context: int, count: int) -> TensorDataset:
    """The text of this file, in windows from its start."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    windows = torch.stack([text[start : start + context + 1] for start in range(0, 8 * count, 8)])
    return TensorDataset(windows[:, :-1], windows[:, 1:])


def train(options: argparse.Namespace) -> None:
    """One run; the first process writes its figures."""
    seed_everything(1)
    if options.checkpoint:
        model = GPT.load_from_checkpoint(options.checkpoint, map_location="cpu")
    else:
        model = GPT(layers=options.layers, width=options.width, context=options.context, lr=1e-3)
    zero = STRATEGIES[options.run]
    if zero.offload == "nvme":
        zero = replace(zero, nvme_path=options.nvme_path)
    figures = Figures(options.limit if options.limited else None)
    trainer = Trainer(
        strategy=ZeroStrategy(zero, restore_weights=False),
        devices=options.devices,
        max_steps=options.steps,
        callbacks=[figures],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(batches(options.context, options.devices * options.steps), batch_size=1))
    peaks: Tensor = trainer.strategy.all_gather(torch.tensor(figures.peak, dtype=torch.float64))
    if trainer.is_global_zero:
        seconds = sorted(figures.seconds[1:])[(len(figures.seconds) - 1) // 2]
        figures_now = {"losses": figures.losses, "seconds": seconds, "peak": float(peaks.max()) / MEGABYTE}
        options.report.write_text(json.dumps(figures_now))


# ------------------------------------------------------------------------------------------------ the comparison
def run_apart(name: str, limited: bool, arguments: Sequence[str]) -> dict[str, Any] | None:
    """Trains in new processes; None if they needed too much."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "figures.json"
        command = [sys.executable, __file__, *arguments, "--run", name, "--report", str(report)]
        # The limit counts stacks of threads in full, of which connections have many; and what was freed must be free.
        stacks = partial(resource.setrlimit, resource.RLIMIT_STACK, (2**20, resource.RLIM_INFINITY))
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
        command += ["--limited"] if limited else []
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            preexec_fn=stacks,  # noqa: PLW1509
        )
        if report.exists():
            figures: dict[str, Any] = json.loads(report.read_text())
            return figures
    if not any(text in done.stderr for text in ("allocate memory", "MemoryError", "out of memory")):
        raise RuntimeError(f"{name} failed, but not for want of memory:\n{done.stderr[-4000:]}")
    return None


def describe(name: str, figures: dict[str, Any] | None) -> str:
    """A line of the table."""
    if figures is None:
        return f"{name:<24} {'-':>8} {'-':>12}   out of memory"
    losses = figures["losses"]
    return f"{name:<24} {figures['peak']:>8.0f} {figures['seconds']:>12.2f}   loss {losses[0]:.3f} -> {losses[-1]:.3f}"


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Runs everything and says what was saved and what it cost; the exit code."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(layers=options.layers, width=options.width).parameters())
    state = parameters * BYTES_PER_PARAMETER / MEGABYTE
    print(f"{parameters / 1e6:.1f} million parameters: {state:.0f} MB of weights, gradients and Adam's moments")
    print(f"{options.devices} processes of {options.limit:.0f} MB each: {state / options.limit:.1f} times less\n")
    print(f"{'strategy':<24} {'peak MB':>8} {'s per step':>12}")
    reference = run_apart(options.reference, False, arguments) if options.reference else None
    if options.reference:
        print(describe(f"{options.reference}, no limit", reference), flush=True)
    trained = {}
    for name in options.strategies.split(","):
        trained[name] = run_apart(name, True, arguments)
        print(describe(name, trained[name]), flush=True)
    for name, figures in trained.items():
        if figures is not None and reference is not None:
            apart = max(abs(a - b) for a, b in zip(figures["losses"], reference["losses"], strict=True))
            print(
                f"\n{name} saves {reference['peak'] - figures['peak']:.0f} MB per process and costs "
                f"{figures['seconds'] - reference['seconds']:.2f} s per step; losses differ by {apart:.1e} at most"
            )
    return 0 if trained[options.strategies.split(",")[-1]] is not None else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The comparison, or one run of it."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse_arguments(given)
    if options.run is None:
        return compare(options, given)
    train(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
