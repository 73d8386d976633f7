"""Plan a training run, run the plan, and hold the plan to the run.

    python examples/plan_and_run.py                          # two CPU processes, or every GPU there is
    python examples/plan_and_run.py --memory-gib 0.02        # less memory: the plan splits the model instead
    python examples/plan_and_run.py --devices 4 --layers 8 --width 256

First the plan is made from the module alone, on the meta device: no weights, no processes. Then a Trainer with an
`AutoStrategy` makes the same plan and trains with it, while two callbacks compare the planner's model states and step
time with those of every rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from lightning.pytorch import Trainer, seed_everything
from train_gpt import GPT, ByteData

from lightning_parallel import AutoStrategy
from lightning_parallel.callbacks import MemoryReport, PlanReport
from lightning_parallel.planner.choose import Choices
from lightning_parallel.planner.hardware import Cluster, cpu_process


def plan(args: argparse.Namespace) -> Choices:
    """What the strategy will choose for CPU processes, before anything is started."""
    with torch.device("meta"):
        module = GPT(args.layers, args.heads, args.width, args.context)
    cluster = Cluster(cpu_process(args.memory_gib), gpus_per_node=args.devices)
    fixed = {"recompute": "none", "sequence_parallel": False}
    return AutoStrategy.plan(module, cluster, args.batch_size, fixed=fixed)


def run(args: argparse.Namespace) -> AutoStrategy:
    """Train with the plan. On GPUs the devices say how much memory there is."""
    on_gpus = torch.cuda.is_available()
    strategy = AutoStrategy(memory_gib=None if on_gpus else args.memory_gib)
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu" if on_gpus else "cpu",
        devices=args.devices,
        max_steps=args.max_steps,
        callbacks=[MemoryReport(), PlanReport(after_steps=args.max_steps)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    trainer.fit(
        GPT(args.layers, args.heads, args.width, args.context),
        ByteData(args.data, args.context, args.batch_size, args.max_bytes),
    )
    return strategy


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--memory-gib", type=float, default=1.0, help="of one CPU process")
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--data", nargs="+", default=[], help="files or folders (default: the standard library)")
    parser.add_argument("--max-bytes", type=int, default=1_000_000, help="of text that are read at most")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    return parser.parse_args(argv)


def main() -> None:
    args = parse_arguments()
    seed_everything(1, verbose=False)
    planned = None if torch.cuda.is_available() else plan(args).best.plan.split
    strategy = run(args)
    split = strategy.choice.plan.split
    if strategy.global_rank == 0:
        print(f"ran tensor {split.tensor} x pipeline {split.pipeline} x data {split.data}, ZeRO {split.zero_stage}")
    # Of one layout the run may take another stage of ZeRO, which a strategy of Lightning's own runs about as fast.
    if planned is not None and split.layout != planned.layout:
        raise SystemExit(f"the run planned {split}, which is not {planned}")


if __name__ == "__main__":
    main()
