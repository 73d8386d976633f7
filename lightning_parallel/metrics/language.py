"""Glue: metrics of language models: tokens seen, perplexity and bits per byte, right for batches of unequal length."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.metrics.sums import SumsMetric, single_number
from lightning_parallel.scaling.checks import check_whole

__all__ = ["BitsPerByte", "PerplexityFromLoss", "TokensSeen"]


def _nats(loss: Tensor | float, tokens: Tensor | float) -> Tensor | float:
    """Loss of all tokens of a batch; a batch without one adds nothing, though its mean is NaN."""
    mean = loss
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise ValueError(f"loss must be the mean over tokens, got a tensor of shape {tuple(loss.shape)}")
        mean = loss.detach().double().reshape(())
    elif isinstance(loss, bool) or not isinstance(loss, Real):
        raise ValueError(f"loss={loss!r} must be a number, such as 2.5")
    if not isinstance(tokens, Tensor):
        return mean * tokens if tokens else 0.0
    return torch.where(tokens == 0, 0.0, mean * tokens)


class TokensSeen(SumsMetric):
    """Number of tokens that all replicas have trained on.

    Args:
        ignore_index: label that does not count as a token.
        **kwargs: as for every torchmetrics object.

    >>> seen = TokensSeen()
    >>> seen.update(torch.tensor([[5, 7, -100], [1, 2, 3]]))
    >>> int(seen.compute())
    5
    """

    higher_is_better = None

    def __init__(self, ignore_index: int | None = -100, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index
        self.add_sum("tokens", torch.long)

    def update(self, tokens: Tensor | int) -> None:
        """Counts a batch.

        Args:
            tokens: token ids or labels of any shape, or a number of tokens.
        """
        if not isinstance(tokens, Tensor):
            self.add("tokens", check_whole("tokens", tokens, 0, "2048"))
        elif self.ignore_index is None:
            self.add("tokens", tokens.numel())
        else:
            self.add("tokens", (tokens != self.ignore_index).sum())

    def compute(self) -> Tensor:
        """Tokens of all replicas, int64."""
        return self.total("tokens")


class PerplexityFromLoss(SumsMetric):
    """exp of the mean loss per token over all tokens of all replicas.

    >>> perplexity = PerplexityFromLoss()
    >>> perplexity.update(math.log(8.0), 300)
    >>> perplexity.update(math.log(2.0), 100)
    >>> round(float(perplexity.compute()), 4)
    5.6569
    """

    higher_is_better = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("nats")
        self.add_sum("tokens")

    def update(self, loss: Tensor | float, tokens: Tensor | int) -> None:
        """Counts a batch.

        Args:
            loss: mean loss per token in nats.
            tokens: number of tokens that it is the mean of.
        """
        counted = single_number("tokens", tokens)
        self.add("nats", _nats(loss, counted))
        self.add("tokens", counted)

    def compute(self) -> Tensor:
        """Perplexity, float64; NaN before the first token."""
        return torch.exp(self.total("nats") / self.total("tokens"))


class BitsPerByte(SumsMetric):
    """Loss in bits per byte of text, which does not depend on the tokenizer.

    >>> bits = BitsPerByte()
    >>> bits.update(math.log(16.0), tokens=100, num_bytes=400)
    >>> round(float(bits.compute()), 6)
    1.0
    """

    higher_is_better = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("nats")
        self.add_sum("num_bytes")

    def update(self, loss: Tensor | float, tokens: Tensor | int, num_bytes: Tensor | int | None = None) -> None:
        """Counts a batch.

        Args:
            loss: mean loss per token in nats.
            tokens: number of tokens that it is the mean of.
            num_bytes: bytes of the text that these tokens stand for; as many as tokens for a model over bytes.
        """
        counted = single_number("tokens", tokens)
        size = counted if num_bytes is None else single_number("num_bytes", num_bytes)
        self.add("nats", _nats(loss, counted))
        self.add("num_bytes", size)

    def compute(self) -> Tensor:
        """Bits per byte, float64; NaN before the first byte."""
        return self.total("nats") / self.total("num_bytes") / math.log(2)
