"""Glue: metrics of language models: tokens seen, perplexity and bits per byte, right for batches of unequal length."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.metrics.sums import SumsMetric

__all__ = ["BitsPerByte", "PerplexityFromLoss", "TokensSeen"]


def _count(name: str, value: Tensor | float) -> Tensor | float:
    """A number of tokens or bytes; on a device it is not looked at, which would wait for the device."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be a single number, got a tensor of shape {tuple(value.shape)}")
        return value.detach().reshape(())
    if isinstance(value, bool) or not value >= 0:
        raise ValueError(f"{name}={value!r} must be a number of at least 0, such as 2048")
    return value


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
            self.add("tokens", int(_count("tokens", tokens)))
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
        counted = _count("tokens", tokens)
        value = loss.detach().double() if isinstance(loss, Tensor) else loss
        self.add("nats", value * counted)
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
        counted = _count("tokens", tokens)
        value = loss.detach().double() if isinstance(loss, Tensor) else loss
        self.add("nats", value * counted)
        self.add("num_bytes", counted if num_bytes is None else _count("num_bytes", num_bytes))

    def compute(self) -> Tensor:
        """Bits per byte, float64; NaN before the first byte."""
        return self.total("nats") / self.total("num_bytes") / math.log(2)
