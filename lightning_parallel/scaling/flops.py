"""Pure: FLOPs that one training token costs in a transformer, with every convention named.

Published figures of "FLOPs" and utilization differ by up to 1.6 times because they count different things; the
convention here is part of the question.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_parallel.scaling.checks import check_whole

__all__ = ["Convention", "TransformerSize"]

Attention = Literal["full", "causal", "none"]
Embeddings = Literal["all", "head", "none"]
TRAINING_PASSES = 3
"""A backward pass costs two forward passes."""


@dataclass(frozen=True)
class Convention:
    """What is counted.

    Attributes:
        attention: products of queries, keys and values: "full" counts both triangles (Chowdhery et al. 2022, appendix
            B), "causal" the half that a causal kernel computes, "none" leaves them out (the 6N of the scaling laws).
        embeddings: parameters of the input table and the head: "head" leaves out the table, whose look-up costs
            nothing; "all" counts both; "none" leaves out both, as Kaplan et al. do.
    """

    attention: Attention = "full"
    embeddings: Embeddings = "head"

    def __post_init__(self) -> None:
        if self.attention not in ("full", "causal", "none"):
            raise ValueError(f"attention={self.attention!r} is not a convention; use 'full', 'causal' or 'none'")
        if self.embeddings not in ("all", "head", "none"):
            raise ValueError(f"embeddings={self.embeddings!r} is not a convention; use 'all', 'head' or 'none'")


@dataclass(frozen=True)
class TransformerSize:
    """Sizes of a decoder whose cost is counted.

    Attributes:
        body_params: parameters without embeddings.
        embedding_params: parameters of the input table.
        head_params: parameters of the head. A tied table is counted in both places: it is used twice.
        layers: number of blocks.
        attention_width: heads times their size.
        context: tokens per sequence.
    """

    body_params: int
    embedding_params: int
    head_params: int
    layers: int
    attention_width: int
    context: int

    def __post_init__(self) -> None:
        for name, least in (("body_params", 1), ("embedding_params", 0), ("head_params", 0)):
            check_whole(name, getattr(self, name), least, "125_000_000")
        for name, example in (("layers", "12"), ("attention_width", "768"), ("context", "1024")):
            check_whole(name, getattr(self, name), 1, example)

    def flops_per_token(self, convention: Convention | None = None) -> float:
        """Training FLOPs per token, forward and backward, without recomputation.

        >>> size = TransformerSize(471_859_200, 0, 0, layers=24, attention_width=1280, context=2048)
        >>> size.flops_per_token(Convention("none")), size.flops_per_token()
        (2831155200.0, 3586129920.0)
        """
        rules = convention or Convention()
        counted = self.body_params
        if rules.embeddings != "none":
            counted += self.head_params
        if rules.embeddings == "all":
            counted += self.embedding_params
        share = {"full": 1.0, "causal": 0.5, "none": 0.0}[rules.attention]
        # Queries by keys, and weights by values: 2 products of 2 FLOPs per pair of tokens, width and layer.
        attention = TRAINING_PASSES * 4 * self.layers * self.attention_width * self.context * share
        return TRAINING_PASSES * 2 * counted + attention
