"""Glue: ``lightning-parallel scaling``: sizes by published laws, verdicts on runs, and fits to runs of one's own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_parallel.commands.answer import Answer, add_command, short, table
from lightning_parallel.scaling import (
    DATA_LIMITED,
    DEFAULT_LAW,
    LAW_NAMES,
    Optimum,
    budget_table,
    compute_for,
    get_law,
    lifetime_optimal,
    optimal,
    spread,
    verdict,
)
from lightning_parallel.scaling.checks import BUDGETS, check_range
from lightning_parallel.scaling.fit_options import FitOptions
from lightning_parallel.scaling.runs import drop_worst, read_runs
from lightning_parallel.scaling.sizing import BUDGETS_OF_NOTE

if TYPE_CHECKING:
    from lightning_parallel.commands.answer import Subcommands
    from lightning_parallel.scaling.fit import LawFit
    from lightning_parallel.scaling.isoflop import IsoFlopFit

__all__ = ["add_parser"]

IMAGE = "scaling.png"
COLUMNS = "CSV with columns params, loss, and tokens or flops"


def add_parser(commands: Subcommands) -> None:
    """Adds ``scaling`` with its subcommands."""
    summary = "compute-optimal sizes, by published laws or fitted ones"
    topics = commands.add_parser("scaling", help=summary, description=summary).add_subparsers(
        dest="topic", required=True, metavar="TOPIC"
    )
    best = add_command(topics, "optimal", _optimal, summary="parameters and tokens for a budget, or for a loss")
    goal = best.add_mutually_exclusive_group(required=True)
    goal.add_argument("--flops", type=float, help="training budget")
    goal.add_argument("--loss", type=float, help="the cheapest pair that reaches this loss instead")
    best.add_argument("--unique-tokens", type=float, help="also the best pair if only so many different tokens exist")
    best.add_argument("--inference-tokens", type=float, help="also the pair that is cheapest over this much use")
    _add_law(best)

    judge = add_command(topics, "verdict", _verdict, summary="is a run undertrained, near-optimal or overtrained")
    judge.add_argument("--params", type=float, required=True)
    judge.add_argument("--tokens", type=float, required=True)
    _add_law(judge)

    add_command(topics, "table", _table, summary="optima of every law for budgets of note")

    fit = add_command(topics, "fit", _reading_files(_fit), summary="fit a law to a table of finished runs")
    fit.add_argument("table", metavar="TABLE", help=COLUMNS)
    _add_fit(fit)
    fit.add_argument("--flops", type=float, help="also the optimum of the fit for this budget")
    fit.add_argument("--plot", nargs="?", const=IMAGE, metavar="IMAGE", help=f"also draw it ({IMAGE} unless named)")

    plot = add_command(topics, "plot", _reading_files(_plot), summary="draw curves of equal compute and the frontier")
    plot.add_argument("table", nargs="?", metavar="TABLE", help=f"{COLUMNS}; without it, a published law is drawn")
    _add_fit(plot)
    plot.add_argument("--out", default=IMAGE, metavar="IMAGE")
    plot.add_argument("--budgets", type=float, nargs="+", metavar="FLOPS", help="of the curves of a published law")
    plot.add_argument("--law", choices=LAW_NAMES, help=f"{DEFAULT_LAW} unless named")


def _add_law(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--law", choices=LAW_NAMES, default=DEFAULT_LAW, help="%(default)s unless named")


def _add_fit(parser: argparse.ArgumentParser) -> None:
    defaults = FitOptions()
    parser.add_argument("--drop-worst", type=int, default=0, metavar="N", help="leave out the runs of highest loss")
    parser.add_argument("--starts", type=int, default=defaults.starts)
    parser.add_argument("--bootstraps", type=int, default=defaults.bootstraps)


def _reading_files(answer: Callable[[argparse.Namespace], Answer]) -> Callable[[argparse.Namespace], Answer]:
    """Files that cannot be read and packages that are not there are the user's to mend, in one line."""

    def guarded(arguments: argparse.Namespace) -> Answer:
        try:
            return answer(arguments)
        except FileNotFoundError as error:
            raise ValueError(f"there is no file {error.filename}") from error
        except ModuleNotFoundError as error:
            # Packages of an extra are asked for with a text that names it; Python's own text is not for users.
            raise ValueError(str(error) if error.name is None else f"this needs {error.name}; install it") from error
        except OSError as error:
            raise ValueError(str(error)) from error

    return guarded


def _pair(best: Optimum) -> dict[str, Any]:
    return {
        "params": best.params,
        "tokens": best.tokens,
        "loss": best.loss,
        "law": best.law,
        "flops": best.flops,
        "tokens_per_param": best.tokens_per_param,
        "loss_law": best.loss_law,
        "params_interval": best.params_interval,
        "tokens_interval": best.tokens_interval,
    }


def _optimal(arguments: argparse.Namespace) -> Answer:
    law = get_law(arguments.law)
    best = optimal(arguments.flops, law) if arguments.loss is None else compute_for(arguments.loss, law)
    around = spread(best.flops)
    data = {**_pair(best), "source": law.source, "all_laws": around}
    figures = table(f"{best.flops:.4g} FLOPs by the law {law.name!r}", "", "params", "tokens", "per param", "loss")
    figures.add_row(*_cells("optimal", best.params, best.tokens, best.loss))
    if best.params_interval is not None and best.tokens_interval is not None:
        low, high = best.params_interval
        ends = best.tokens_interval
        figures.add_row("80% interval", f"{low:.4g} .. {high:.4g}", f"{ends[0]:.4g} .. {ends[1]:.4g}", "", "")
    lows, highs = around["params"], around["tokens"]
    figures.add_row("all laws", f"{lows[0]:.4g} .. {lows[1]:.4g}", f"{highs[0]:.4g} .. {highs[1]:.4g}", "", "")
    if arguments.unique_tokens is not None:
        limited = DATA_LIMITED.optimal(best.flops, arguments.unique_tokens)
        data["data_limited"] = asdict(limited)
        figures.add_row(*_cells(f"{limited.epochs:.3g} epochs", limited.params, limited.tokens, limited.loss))
    if arguments.inference_tokens is not None:
        cheap = lifetime_optimal(best.loss, arguments.inference_tokens, law)
        data["lifetime"] = asdict(cheap)
        figures.add_row(*_cells(f"use included ({cheap.saved:.1%} saved)", cheap.params, cheap.tokens, best.loss))
    notes = f"{law.name}: {law.source}; loss by {best.loss_law!r}, in nats per token of its own tokenizer"
    return Answer(data, (figures, notes))


def _cells(name: str, params: float, tokens: float, loss: float) -> tuple[str, ...]:
    return name, f"{params:.4g}", f"{tokens:.4g}", f"{tokens / params:.3g}", f"{loss:.4f}"


def _verdict(arguments: argparse.Namespace) -> Answer:
    found = verdict(arguments.params, arguments.tokens, arguments.law)
    data = {
        "verdict": found.verdict,
        "ratio": found.ratio,
        "params": found.params,
        "tokens": found.tokens,
        "tokens_per_param": found.tokens / found.params,
        "loss": found.loss,
        "law": found.optimal.law,
        "flops": found.optimal.flops,
        "tokens_for_params": found.tokens_for_params,
        "optimal": _pair(found.optimal),
    }
    return Answer(data, (str(found),))


def _table(arguments: argparse.Namespace) -> Answer:
    rows = budget_table()
    figures = table("parameters / tokens by FLOPs", "law", *(f"{flops:.2g}" for flops in BUDGETS_OF_NOTE))
    for column, name in enumerate(LAW_NAMES):
        figures.add_row(name, *(f"{short(row[column].params)}/{short(row[column].tokens)}" for row in rows))
    return Answer({"budgets": [[_pair(cell) for cell in row] for row in rows]}, (figures,))


def _fit(arguments: argparse.Namespace) -> Answer:
    read = read_runs(arguments.table)
    # Only fits and drawings need numpy.
    from lightning_parallel.scaling.fit import fit_law
    from lightning_parallel.scaling.isoflop import budgets_of, fit_isoflops
    from lightning_parallel.scaling.plot import check_image, plot_scaling

    # What would be refused after the fit is refused before it, which may take a minute.
    if arguments.flops is not None:
        check_range("flops", arguments.flops, BUDGETS, "1e18")
    if arguments.plot is not None:
        check_image(arguments.plot)

    runs = drop_worst(read.runs, arguments.drop_worst)
    fit = fit_law(runs, FitOptions(arguments.starts, arguments.bootstraps))
    try:
        sweep, why_not = fit_isoflops(runs), None
    except ValueError as error:
        sweep, why_not = None, str(error)
    data = {**_constants(fit), "skipped_rows": read.skipped, "dropped_rows": arguments.drop_worst}
    data["isoflop"] = {"why_not": why_not} if sweep is None else _sweep(sweep)
    text: list[Any] = [_fit_table(fit), f"the fit misses the losses by {fit.deviation:.2%} (root mean square)"]
    if not fit.has_floor:
        text.append("E is none: these runs do not show how low the loss can get, so do not predict far beyond them")
    if read.skipped:
        text.append(f"{read.skipped} rows without numbers were left out")
    if sweep is None:
        text.append(f"no parabolas: {why_not}")
    else:
        beyond = sum(not valley.inside for valley in sweep.valleys)
        text.append(
            f"parabolas through {len(sweep.valleys)} budgets: N = {sweep.coefficient:.4g} C^{sweep.exponent:.4f}"
            + (f"; {beyond} of them have their bottom beyond the sizes that were run" if beyond else "")
        )
    if arguments.flops is not None:
        best = fit.law().optimal(arguments.flops)
        data["optimal"] = _pair(best)
        text.append(
            f"{best.flops:.4g} FLOPs: {best.params:.4g} parameters, {best.tokens:.4g} tokens, loss {best.loss:.4f}"
        )
    if arguments.plot is not None:
        image = plot_scaling(arguments.plot, fit.law(), budgets_of(runs), runs, sweep.valleys if sweep else ())
        data["plot"] = str(image)
        text.append(f"drawn to {image}")
    return Answer(data, tuple(text))


def _constants(fit: LawFit) -> dict[str, Any]:
    names = ("E", "A", "B", "alpha", "beta", "exponent")
    values = {name: getattr(fit.surface, name) for name in names}
    intervals = {name: fit.interval(lambda law, name=name: float(getattr(law, name))) for name in names}  # type: ignore[misc]
    return {**values, "objective": fit.objective, "deviation": fit.deviation, "runs": fit.runs, "intervals": intervals}


def _fit_table(fit: LawFit) -> Any:
    found = _constants(fit)
    figures = table(f"L = E + A/N^alpha + B/D^beta through {fit.runs} runs", "", "value", "80% interval")
    for name, interval in found["intervals"].items():
        around = "" if interval is None else f"{interval[0]:.5g} .. {interval[1]:.5g}"
        figures.add_row("N_opt ~ C^" if name == "exponent" else name, f"{found[name]:.5g}", around)
    return figures


def _sweep(sweep: IsoFlopFit) -> dict[str, Any]:
    names = ("flops", "params", "tokens", "loss", "inside")
    valleys = [{name: getattr(valley, name) for name in names} for valley in sweep.valleys]
    return {"coefficient": sweep.coefficient, "exponent": sweep.exponent, "valleys": valleys}


def _plot(arguments: argparse.Namespace) -> Answer:
    if arguments.table is not None:
        if arguments.law is not None or arguments.budgets is not None:
            raise ValueError("with a table its fit is drawn, at the budgets of its runs; leave out --law and --budgets")
        return _fit(argparse.Namespace(**vars(arguments), flops=None, plot=arguments.out))
    if arguments.drop_worst or FitOptions(arguments.starts, arguments.bootstraps) != FitOptions():
        raise ValueError("--drop-worst, --starts and --bootstraps are for the fit to a TABLE of runs; name one")
    from lightning_parallel.scaling.plot import plot_scaling

    law = get_law(arguments.law or DEFAULT_LAW)
    image = plot_scaling(arguments.out, law, arguments.budgets or BUDGETS_OF_NOTE)
    return Answer({"plot": str(image), "law": law.name}, (f"law {law.name!r} drawn to {image}",))
