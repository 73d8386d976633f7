"""Sweep tiny byte-level GPTs at equal compute, fit a scaling law to them, predict a ten times larger run, and run it.

    python examples/scaling_sweep.py                      # minutes on two CPU cores
    python examples/scaling_sweep.py --data my_texts/ --budgets 1e11 3e11 9e11

The text is the standard library that came with this Python. A sweep that was interrupted goes on from its table; one of
other texts or another --lr needs another --out. Every run is an ordinary LightningModule under an ordinary Trainer; a
callback adds it to a table, which `lightning-parallel scaling fit TABLE --plot` reads as well. At the end two
predictions stand beside what the larger run really reached: that of the fitted surface, and that of the valleys alone.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import json
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
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
from lightning_parallel.scaling.fit import FitOptions, LawFit, check_determined, fit_law
from lightning_parallel.scaling.isoflop import Valley, fit_isoflops
from lightning_parallel.scaling.outlook import caveat
from lightning_parallel.scaling.plot import check_image, plot_scaling
from lightning_parallel.scaling.runs import COLUMNS, Run, read_runs, why_unwritable

# Steps of few bytes, from many places of the text: short runs would have no steps to learn in otherwise.
CONTEXT, BATCH, LAYERS, HEADS = 32, 8, 2, 2
STEP_TOKENS = CONTEXT * BATCH
LR_WIDTH = 16
"""The width that ``--lr`` is meant for."""


def sizes(width: int) -> dict[str, int]:
    """Hyperparameters of the model of a width; depth stays, so that sizes are close enough together."""
    return {"layers": LAYERS, "width": width, "heads": HEADS, "context": CONTEXT}


@cache
def count(width: int) -> int:
    """Parameters of the model of a width, which is built without memory to count them."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(**sizes(width), tie_head=True).parameters())


def build(width: int, lr: float) -> GPT:
    """A model that starts to learn at once, whatever its width.

    The usual deviation of 0.02 suits a width of hundreds; narrow layers so begun add almost nothing for many steps. The
    best rate falls with the width, as it would for matrices alone (1 / width) and not at all for embeddings.
    """
    model = GPT(**sizes(width), tie_head=True, lr=lr * math.sqrt(LR_WIDTH / width))
    for matrix in (parameter for parameter in model.parameters() if parameter.dim() == 2):
        torch.nn.init.normal_(matrix, std=0.5 / math.sqrt(matrix.shape[1]))
    return model


def closest_width(params: float) -> int:
    """The width whose model is nearest to a number of parameters."""
    widths = range(2 * HEADS, 1025, HEADS)
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


def check_plan(pairs: Sequence[tuple[int, float]], table: Path, image: Path, arguments: argparse.Namespace) -> None:
    """Refuses before the first run what would be refused after the last.

    Raises:
        ValueError: the sizes cannot determine a law, the text is too short, or the table is of another sweep.
        OSError: a text cannot be read.
    """
    check_determined([Run.of(count(width), STEP_TOKENS * steps_for(width, flops), 1.0) for width, flops in pairs])
    optimal(arguments.factor * max(arguments.budgets))
    check_image(image)
    why_not = why_unwritable(table, COLUMNS)
    if why_not:
        raise ValueError(why_not)
    data = load_data(arguments)
    data.setup("fit")
    digests = [hashlib.sha256(part.text.numpy()).hexdigest() for part in (data.train, data.val)]
    check_settings(table, {"lr": arguments.lr, "train_text": digests[0], "val_text": digests[1]})


def check_settings(table: Path, settings: dict[str, float | str]) -> None:
    """Keeps beside a table what its losses depend on; runs under other settings must not be mistaken for these.

    Raises:
        ValueError: the table is there and has other settings, or none.
    """
    file = table.with_name("settings.json")
    if table.exists():
        before = json.loads(file.read_text()) if file.exists() else {}
        other = [name for name in settings if before.get(name) != settings[name]]
        if other:
            raise ValueError(f"{table} holds runs of another {', '.join(other)}; name another folder by --out")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))


def load_data(arguments: argparse.Namespace) -> ByteData:
    """The text of a run."""
    return ByteData(arguments.data, CONTEXT, BATCH, max_val_bytes=arguments.val_bytes)


def train(width: int, flops: float, table: Path, arguments: argparse.Namespace) -> Run:
    """Trains one model until the budget is spent and records it."""
    seed_everything(1234, verbose=False)
    model = build(width, arguments.lr)
    steps = steps_for(width, flops)
    recorder = ScalingLawRecorder(table)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder],
    )
    trainer.fit(model, load_data(arguments))
    assert recorder.run is not None, "the recorder writes a row when training ends"
    return recorder.run


def read_or_train(width: int, flops: float, table: Path, arguments: argparse.Namespace, console: Console) -> Run:
    """The run of a width and a budget, from the table if it is there."""
    start = time.perf_counter()
    wanted = (count(width), STEP_TOKENS * steps_for(width, flops))
    done = {(run.params, run.tokens): run for run in read_runs(table).runs} if table.exists() else {}
    try:
        run = done.get(wanted) or train(width, flops, table, arguments)
    except ValueError as error:
        sys.exit(f"{flops:.2g} FLOPs, width {width}: {error}; a lower --lr may help. Runs before it are in {table}")
    took = "from the table" if wanted in done else f"{time.perf_counter() - start:.0f} s"
    console.print(
        f"{flops:.2g} FLOPs, width {width:4d}: {run.params:9,.0f} parameters, {run.tokens:11,.0f} bytes, "
        f"val_loss {run.loss:.4f} ({took})",
        highlight=False,
        soft_wrap=True,
    )
    return run


def show_fit(fit: LawFit, law: Law, console: Console) -> None:
    """The constants, and how far the fit is from the runs it was fitted to."""
    s = fit.surface
    console.print(f"L = {s.E:.3f} + {s.A:.4g} / N^{s.alpha:.3f} + {s.B:.4g} / D^{s.beta:.3f} through {fit.runs} runs")
    band = law.exponent_interval
    around = "" if band is None else f", 80% interval {band[0]:.3f} .. {band[1]:.3f}"
    console.print(f"N_opt ~ C^{law.exponent:.3f}{around}; the fit misses the losses by {fit.deviation:.1%}")
    if not fit.has_floor:
        console.print("E is none: runs as short as these do not show how low the loss can get")


def show_valleys(valleys: Sequence[Valley], console: Console) -> None:
    """Where the loss is lowest at each budget."""
    for valley in valleys:
        best = min(valley.runs, key=lambda run: run.loss)
        place = "among" if valley.inside else "beyond"
        console.print(
            f"{valley.flops:.2g} FLOPs: best run {best.params:,.0f} parameters, bottom of the parabola "
            f"{valley.params:,.0f}, {place} the sizes run",
            highlight=False,
            soft_wrap=True,
        )


def along_bottoms(valleys: Sequence[Valley], flops: float) -> float:
    """Loss of the best model of a budget by a power law of compute through the valleys' bottoms (Kaplan et al. 2020).

    It has no floor, so it holds for a while where losses are far above theirs, and in the end promises too much.
    """
    compute, losses = ([math.log(getattr(valley, name)) for valley in valleys] for name in ("flops", "loss"))
    slope, start = statistics.linear_regression(compute, losses)
    return math.exp(start + slope * math.log(flops))


def report(predictions: dict[str, float], observed: Run, factor: float, console: Console) -> None:
    """Predictions beside the observation."""
    title = f"{observed.params:,.0f} parameters, {observed.tokens:,.0f} bytes: {factor:g} times the largest budget"
    rows = Table("", "loss", "bits per byte", "observed - predicted", title=title)
    for name, loss in predictions.items():
        difference = observed.loss - loss
        rows.add_row(
            f"predicted by {name}",
            f"{loss:.4f}",
            f"{loss / math.log(2):.4f}",
            f"{difference:+.4f} ({difference / loss:+.2%})",
        )
    rows.add_row("observed", f"{observed.loss:.4f}", f"{observed.loss / math.log(2):.4f}", "")
    console.print(rows)


def judge(observed: Run, band: tuple[float, float] | None, law: Law, console: Console) -> None:
    """Whether the surface's interval held, and what both laws say of the run."""
    lines = []
    if band is not None:
        inside = "inside" if band[0] <= observed.loss <= band[1] else "outside"
        lines.append(f"observed: {inside} of the surface's 80% bootstrap interval {band[0]:.4f} .. {band[1]:.4f}")
    lines.append(f"by this sweep: {verdict(observed.params, observed.tokens, law)}")
    lines.append(f"by the published law: {verdict(observed.params, observed.tokens)}{caveat(observed.flops)}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def positive(text: str) -> float:
    """A number above zero."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def whole(least: int) -> Callable[[str], int]:
    """Whole numbers from ``least`` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return number


def make_parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="isoFLOP sweep, fit, prediction and check")
    parser.add_argument("--data", nargs="+", default=[], help="files or folders instead of the standard library")
    parser.add_argument("--budgets", type=positive, nargs="+", default=[4e9, 1.2e10, 3.6e10], metavar="FLOPS")
    parser.add_argument("--spread", type=positive, nargs="+", default=[0.3, 0.5, 0.8, 1.3, 2.0], metavar="FACTOR")
    parser.add_argument("--factor", type=positive, default=10.0, help="how much larger the predicted run is")
    rate = f"peak at width {LR_WIDTH}; falls as 1 / sqrt(width)"
    parser.add_argument("--lr", type=positive, default=1.4e-2, help=rate)
    parser.add_argument("--threads", type=whole(1), default=1, help="of torch; models so small gain by one only")
    parser.add_argument("--val-bytes", type=whole(CONTEXT + 1), default=65_537)
    parser.add_argument("--bootstraps", type=whole(0), default=200)
    parser.add_argument("--out", type=Path, default=Path("scaling_sweep"))
    return parser


def main() -> None:
    """Sweep, fit, predict, check."""
    parser = make_parser()
    arguments = parser.parse_args()
    table, image = arguments.out / "runs.csv", arguments.out / "sweep.png"
    try:
        budgets = sorted(set(arguments.budgets))
        pairs = [(width, flops) for flops in budgets for width in widths_for(flops, arguments.spread)]
        check_plan(pairs, table, image, arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    console = Console()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    runs = [read_or_train(width, flops, table, arguments, console) for width, flops in pairs]
    try:
        fit = fit_law(runs, FitOptions(bootstraps=arguments.bootstraps))
    except ValueError as error:
        sys.exit(f"no law: {error}")
    law = fit.law("this sweep")
    show_fit(fit, law, console)
    valleys: tuple[Valley, ...] = ()
    try:
        valleys = fit_isoflops(runs).valleys
        show_valleys(valleys, console)
    except ValueError as error:
        console.print(f"no parabolas: {error}", highlight=False, soft_wrap=True)
    flops = arguments.factor * max(budgets)
    width = closest_width(law.optimal(flops).params)
    params = count(width)
    tokens = STEP_TOKENS * steps_for(width, flops)
    predictions = {"the surface": fit.surface(params, tokens)}
    if valleys:
        predictions["the valleys"] = along_bottoms(valleys, 6.0 * params * tokens)
    band = fit.interval(lambda surface: surface(params, tokens))
    observed = read_or_train(width, flops, table, arguments, console)
    report(predictions, observed, arguments.factor, console)
    judge(observed, band, law, console)
    plot_scaling(image, law, [*budgets, flops], [*runs, observed], valleys)
    console.print(f"table: {table}, figure: {image}", highlight=False)


if __name__ == "__main__":
    main()
