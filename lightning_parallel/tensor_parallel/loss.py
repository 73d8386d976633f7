"""Mechanism: cross entropy of logits whose vocabulary is split over a group (Shoeybi et al. 2019, section 3).

Only a few numbers per token travel: each rank's maximum, its sum of exponentials and its part of the target's logit.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup

__all__ = ["vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: ProcessGroup | None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Cross entropy over the whole vocabulary, with the numbers of ``torch.nn.functional.cross_entropy``.

    Args:
        logits: ``(..., local vocabulary)``, this rank's columns; the ranks' columns in rank order are the vocabulary.
        target: ``(...)`` ids of the whole vocabulary, equal on every rank.
        group: tensor group.
        ignore_index: target of tokens that count neither in the sum nor in the mean.
        label_smoothing: weight of the uniform distribution, in 0..1 (Szegedy et al. 2016).
        vocab_size: true size of the vocabulary when the columns from there on are padding; None when there are none.
        z_loss: coefficient of the squared log of the softmax's normalizer, averaged like the loss (PaLM, Chowdhery et
            al. 2022, section 5).
        reduction: mean over tokens that are not ignored (nan when all are), sum, or one loss per token.

    Returns:
        The loss, equal on every rank; float32 for half precision logits.

    Raises:
        ValueError: shapes do not fit, or an option is out of range.
    """
    if logits.dim() == 0 or logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need a target of their shape without the last "
            f"dimension, got {tuple(target.shape)}"
        )
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie in 0..1, got {label_smoothing}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
    flat = target.reshape(-1)
    ignored = flat == ignore_index
    rows = logits.reshape(flat.numel(), logits.shape[-1])
    losses = _TokenLosses.apply(rows, flat, ignored, group, label_smoothing, vocab_size, z_loss)
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (flat.numel() - ignored.sum())


class _Columns:
    """Where this rank's columns lie in the vocabulary, as tensors on the device: asking the host would wait for it."""

    def __init__(self, logits: Tensor, group: ProcessGroup | None, vocab_size: int | None) -> None:
        self.rank, self.ranks = comm.group_rank(group), comm.group_size(group)
        self.local, self.vocab_size = logits.shape[-1], vocab_size
        mine = torch.full((1,), self.local, dtype=torch.int64, device=logits.device)
        self.sizes = mine.new_empty(self.ranks)
        self._work = comm.all_gather_into(self.sizes, mine, group, async_op=True)

    def wait(self) -> None:
        """Make the sizes of the other ranks known."""
        if self._work is not None:
            self._work.wait()
        stops = self.sizes.cumsum(0)
        self.start = stops[self.rank] - self.local
        self.total = stops[-1] if self.vocab_size is None else stops.new_full((), self.vocab_size)
        # Columns of each rank that are no padding.
        self.counts = self.sizes if self.vocab_size is None else self.sizes - (stops - self.total).clamp_min(0)
        self.counts = self.counts.clamp_min(0)
        self.padding = None
        if self.vocab_size is not None:
            self.padding = torch.arange(self.local, device=self.sizes.device) >= self.counts[self.rank]

    def pick(self, values: Tensor, target: Tensor, ignored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The target's value, its column (0 where another rank holds it) and whether this rank holds it.

        The first rank does not mask negative targets and the last not those past its columns, so that a target outside
        the vocabulary fails there as it does in ``torch.nn.functional.cross_entropy``.
        """
        column = target - self.start
        here = ~ignored
        if self.rank > 0:
            here &= column >= 0
        if self.rank < self.ranks - 1 or self.local == 0:
            here &= column < self.local
        column = column.masked_fill(~here, 0)
        if self.local == 0:
            return values.new_zeros(target.shape), column, here
        return values.gather(1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0), column, here


class _TokenLosses(torch.autograd.Function):
    """Loss of each token; zero, also in its gradient, for ignored ones."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        ignored: Tensor,
        group: ProcessGroup | None,
        smoothing: float,
        vocab_size: int | None,
        z_loss: float,
    ) -> Tensor:
        columns = _Columns(logits, group, vocab_size)
        values = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        columns.wait()
        if columns.padding is not None:
            values = values.masked_fill(columns.padding, -torch.inf)
        lowest = torch.finfo(values.dtype).min  # instead of -inf, which has no differences
        maximum = values.amax(-1).clamp_min(lowest) if columns.local else values.new_full(target.shape, lowest)
        picked, column, here = columns.pick(values, target, ignored)
        exponentials = values - maximum.unsqueeze(-1)
        local = [maximum, picked]
        if smoothing:
            kept = exponentials if columns.padding is None else exponentials.masked_fill(columns.padding, 0)
            local.append(kept.sum(-1))
        exponentials.exp_()
        local.append(exponentials.sum(-1))
        every = comm.all_gather_dim(torch.stack(local).unsqueeze(0), group, 0)  # (ranks, 3 or 4, tokens)
        highest = every[:, 0].amax(0)
        below = (every[:, 0] - highest).clamp_min(lowest)
        normalizer = (every[:, -1] * below.exp()).sum(0)
        log_normalizer = normalizer.log()
        losses = log_normalizer - (1 - smoothing) * (every[:, 1].sum(0) - highest)
        total = columns.total.to(losses.dtype)
        if smoothing:
            sums = every[:, 2] + columns.counts.to(below.dtype).unsqueeze(-1) * below
            losses -= smoothing / total * sums.sum(0)
        # Gradient of a logit: exponential * slope - smoothing / total, and - (1 - smoothing) at the target.
        slope = (maximum - highest).exp_() / normalizer
        if z_loss:
            log_normalizer = log_normalizer + highest
            losses += z_loss * log_normalizer.square()
            slope *= 1 + 2 * z_loss * log_normalizer
        ctx.save_for_backward(exponentials, slope, column, here, ignored, columns.padding, total)
        ctx.smoothing, ctx.dtype = smoothing, logits.dtype
        return losses.masked_fill_(ignored, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        exponentials, slope, column, here, ignored, padding, total = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0)
        scale = (grad * slope).unsqueeze(-1)
        if ctx.smoothing:
            logits_grad = torch.addcmul((grad * (-ctx.smoothing / total)).unsqueeze(-1), exponentials, scale)
            if padding is not None:
                logits_grad.masked_fill_(padding, 0)
        else:
            logits_grad = exponentials * scale
        if exponentials.shape[-1]:
            at_target = (grad * (ctx.smoothing - 1)).masked_fill_(~here, 0)
            logits_grad.scatter_add_(1, column.unsqueeze(-1), at_target.unsqueeze(-1))
        return logits_grad.to(ctx.dtype), None, None, None, None, None, None
