"""Sweep tiny byte-level GPTs at equal compute, fit a scaling law to them, predict a ten times larger run, and run it.

    python examples/scaling_sweep.py                      # minutes on two CPU cores
    python examples/scaling_sweep.py --data my_texts/ --budgets 1e11 3e11 9e11

The text is the standard library that came with this Python. A sweep that was interrupted goes on from its table; remove
the folder to start again. Every run is an ordinary LightningModule under an ordinary
Trainer; a callback adds it to a table, which `lightning-parallel scaling fit TABLE --plot` reads as well. At the end
the prediction stands beside what the larger run really reached.
"""

from __future__ import annotations

import argparse
import bisect
import logging
import math
import sys
import time
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from train_gpt import GPT, ByteData

from lightning_parallel.callbacks import ScalingLawRecorder
from lightning_parallel.scaling import Law, optimal, verdict
from lightning_parallel.scaling.fit import FitOptions, LawFit, fit_law
from lightning_parallel.scaling.isoflop import fit_isoflops
from lightning_parallel.scaling.outlook import caveat
from lightning_parallel.scaling.plot import plot_scaling
from lightning_parallel.scaling.runs import Run, read_runs

CONTEXT, BATCH, LAYERS, HEAD_SIZE = 64, 16, 2, 4
STEP_TOKENS = CONTEXT * BATCH


def sizes(width: int) -> dict[str, int]:
    """Hyperparameters of the model of a width; depth stays, so that sizes are close enough together."""
    return {"layers": LAYERS, "width": width, "heads": width // HEAD_SIZE, "context": CONTEXT}


@cache
def count(width: int) -> int:
    """Parameters of the model of a width, which is built without memory to count them."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(**sizes(width), tie_head=True).parameters())


def closest_width(params: float) -> int:
    """The width whose model is nearest to a number of parameters."""
    widths = range(HEAD_SIZE, 1025, HEAD_SIZE)
    above = bisect.bisect_left(widths, params, key=count)
    around = widths[max(0, above - 1) : above + 1] or widths[-1:]
    return min(around, key=lambda width: abs(math.log(count(width) / params)))


def widths_for(flops: float, spread: Sequence[float]) -> list[int]:
    """Widths around the size that twenty tokens per parameter would give."""
    middle = optimal(flops, "twenty").params
    return sorted({closest_width(middle * factor) for factor in spread})


def steps_for(width: int, flops: float) -> int:
    """Optimizer steps that spend a budget on the model of a width."""
    return max(1, round(flops / (6 * count(width) * STEP_TOKENS)))


def train(width: int, flops: float, table: Path, arguments: argparse.Namespace) -> Run:
    """Trains one model until the budget is spent and records it."""
    seed_everything(1234, verbose=False)
    model = GPT(**sizes(width), tie_head=True, lr=arguments.lr)
    steps = steps_for(width, flops)
    recorder = ScalingLawRecorder(table)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder],
    )
    trainer.fit(model, ByteData(arguments.data, CONTEXT, BATCH, max_val_bytes=arguments.val_bytes))
    assert recorder.run is not None, "the recorder writes a row when training ends"
    return recorder.run


def sweep(arguments: argparse.Namespace, table: Path, console: Console) -> list[Run]:
    """Every size at every budget, but for those that the table has."""
    done = {(run.params, run.tokens): run for run in read_runs(table).runs} if table.exists() else {}
    runs = []
    for flops in arguments.budgets:
        for width in widths_for(flops, arguments.spread):
            start = time.perf_counter()
            run = done.get((count(width), STEP_TOKENS * steps_for(width, flops)))
            run = run or train(width, flops, table, arguments)
            seconds = time.perf_counter() - start
            runs.append(run)
            console.print(
                f"{flops:.2g} FLOPs, width {width:4d}: {run.params:9,.0f} parameters, {run.tokens:11,.0f} bytes, "
                f"val_loss {run.loss:.4f} ({seconds:.0f} s)",
                highlight=False,
                soft_wrap=True,
            )
    return runs


def show_fit(fit: LawFit, law: Law, console: Console) -> None:
    """The constants, and how far the fit is from the runs it was fitted to."""
    s = fit.surface
    console.print(f"L = {s.E:.3f} + {s.A:.4g} / N^{s.alpha:.3f} + {s.B:.4g} / D^{s.beta:.3f} through {fit.runs} runs")
    band = law.exponent_interval
    around = "" if band is None else f", 80% interval {band[0]:.3f} .. {band[1]:.3f}"
    console.print(f"N_opt ~ C^{law.exponent:.3f}{around}; the fit misses the losses by {fit.deviation:.1%}")
    if not fit.has_floor:
        console.print("E is none: runs as short as these do not show how low the loss can get")


def report(predicted: Run, band: tuple[float, float], observed: Run, law: Law, factor: float, console: Console) -> None:
    """Prediction beside observation, and what both laws say of the run."""
    title = f"{factor:g} times the largest budget of the sweep"
    rows = Table("", "parameters", "bytes", "loss", "bits per byte", title=title)
    for name, run in (("predicted", predicted), ("observed", observed)):
        rows.add_row(
            name, f"{run.params:,.0f}", f"{run.tokens:,.0f}", f"{run.loss:.4f}", f"{run.loss / math.log(2):.4f}"
        )
    console.print(rows)
    difference = observed.loss - predicted.loss
    inside = "inside" if band[0] <= observed.loss <= band[1] else "outside"
    console.print(
        f"observed - predicted: {difference:+.4f} ({difference / predicted.loss:+.2%}), {inside} of the 80% bootstrap "
        f"interval {band[0]:.4f} .. {band[1]:.4f}",
        highlight=False,
        soft_wrap=True,
    )
    published = f"{verdict(observed.params, observed.tokens)}{caveat(observed.flops)}"
    for name, text in (
        ("this sweep", str(verdict(observed.params, observed.tokens, law))),
        ("the published law", published),
    ):
        console.print(f"by {name}: {text}", highlight=False, soft_wrap=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="isoFLOP sweep, fit, prediction and check")
    parser.add_argument("--data", nargs="+", default=[], help="files or folders instead of the standard library")
    parser.add_argument("--budgets", type=float, nargs="+", default=[2e9, 6e9, 1.8e10], metavar="FLOPS")
    parser.add_argument("--spread", type=float, nargs="+", default=[0.3, 0.8, 2.0, 5.0], metavar="FACTOR")
    parser.add_argument("--factor", type=float, default=10.0, help="how much larger the predicted run is")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--val-bytes", type=int, default=32_769)
    parser.add_argument("--bootstraps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("scaling_sweep"))
    return parser.parse_args(arguments)


def main() -> None:
    """Sweep, fit, predict, check."""
    arguments = parse_arguments()
    console = Console()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    table = arguments.out / "runs.csv"
    runs = sweep(arguments, table, console)
    fit = fit_law(runs, FitOptions(bootstraps=arguments.bootstraps))
    law = fit.law("this sweep")
    show_fit(fit, law, console)
    valleys = ()
    try:
        valleys = fit_isoflops(runs).valleys
    except ValueError as error:
        console.print(f"no parabolas: {error}", highlight=False, soft_wrap=True)
    flops = arguments.factor * max(arguments.budgets)
    width = closest_width(law.optimal(flops).params)
    params = count(width)
    tokens = STEP_TOKENS * steps_for(width, flops)
    predicted = Run.of(params, tokens, fit.surface(params, tokens))
    band = fit.interval(lambda surface: surface(params, tokens)) or (predicted.loss, predicted.loss)
    observed = train(width, flops, table, arguments)
    report(predicted, band, observed, law, arguments.factor, console)
    image = plot_scaling(arguments.out / "sweep.png", law, [*arguments.budgets, flops], [*runs, observed], valleys)
    console.print(f"table: {table}, figure: {image}", highlight=False)


if __name__ == "__main__":
    main()
