"""Pure: where a run is heading: what a law expects at its end, and how well its size and length fit together."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_parallel.scaling.laws import DEFAULT_LAW, LAWS, Law, get_law
from lightning_parallel.scaling.sizing import Verdict, verdict
from lightning_parallel.scaling.surfaces import ParametricLoss

__all__ = ["Outlook", "caveat", "loss_band", "outlook"]

FAR_BELOW = 1e17
"""FLOPs; the sweeps of Hoffmann et al. begin at 6e18. Kaplan et al. had models of a thousand weights."""


@dataclass(frozen=True)
class Outlook:
    """State of a run and its expected end.

    Attributes:
        params: parameters N.
        tokens: tokens so far.
        flops: FLOPs so far, 6ND.
        now: verdict if it stopped now.
        final: verdict at its planned end; None if it has none.
        band: lowest and highest prediction of the final loss; None without a planned end.
        seconds_left: None if speed or end are not known.
    """

    params: float
    tokens: float
    flops: float
    now: Verdict
    final: Verdict | None
    band: tuple[float, float] | None
    seconds_left: float | None

    def figures(self) -> dict[str, float]:
        """What a logger can take."""
        values = {
            "tokens": self.tokens,
            "tokens_per_param": self.tokens / self.params,
            "flops": self.flops,
            "expected_loss": self.now.loss,
            "ratio_to_optimal": self.now.ratio,
        }
        if self.final is not None and self.band is not None:
            values["final_ratio_to_optimal"] = self.final.ratio
            values["final_loss"] = self.final.loss
            values["final_loss_low"], values["final_loss_high"] = self.band
        if self.seconds_left is not None:
            values["seconds_left"] = self.seconds_left
        return values


def loss_band(params: float, tokens: float, law: str | Law = DEFAULT_LAW) -> tuple[float, float]:
    """How far apart published fits to the same runs predict a loss; the law's own prediction lies within.

    >>> low, high = loss_band(70e9, 1.4e12)
    >>> round(low, 3), round(high, 3)
    (1.921, 1.977)
    """
    own = get_law(law).surface(params, tokens)
    fits = [other.surface for other in LAWS if isinstance(other.surface, ParametricLoss)]
    losses = [own, *(surface(params, tokens) for surface in fits)] if law in (*LAWS, *(x.name for x in LAWS)) else [own]
    return min(losses), max(losses)


def caveat(flops: float, law: str | Law = DEFAULT_LAW) -> str:
    """What is to be said beside a judgement of so small a run by a published law; empty for larger runs and own laws.

    >>> caveat(1e12)
    "; 1e+12 FLOPs are far less than 'besiroglu' was fitted to: its losses mean nothing there, fit a law of your own"
    >>> caveat(1e20)
    ''
    """
    judge = get_law(law)
    if judge not in LAWS or not isinstance(judge.surface, ParametricLoss) or flops >= FAR_BELOW:
        return ""
    return (
        f"; {flops:.3g} FLOPs are far less than {judge.surface_law!r} was fitted to: its losses mean nothing there, "
        "fit a law of your own"
    )


def outlook(
    params: float,
    tokens: float,
    planned_tokens: float | None = None,
    tokens_per_second: float | None = None,
    law: str | Law = DEFAULT_LAW,
) -> Outlook:
    """Judges a run now and at its planned end.

    Args:
        params: parameters N.
        tokens: tokens so far.
        planned_tokens: tokens at its end; None if nobody knows.
        tokens_per_second: speed of the whole job.
        law: the law to judge by.
    """
    now = verdict(params, tokens, law)
    final, band, left = None, None, None
    if planned_tokens is not None:
        final = verdict(params, max(planned_tokens, tokens), law)
        band = loss_band(params, max(planned_tokens, tokens), law)
        if tokens_per_second:
            left = max(0.0, planned_tokens - tokens) / tokens_per_second
    return Outlook(params, tokens, now.optimal.flops, now, final, band, left)
