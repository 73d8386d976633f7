"""Pure: the sizes of a decoder from which its parameters, FLOPs and memory follow.

A shape lists its parameters with their tensor-parallel split, and everything else counts that list: the total, what one
rank holds, what a stage weighs. The split is cut by the functions that cut the layers of a real run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

from lightning_parallel.layout import choices_text, divisors
from lightning_parallel.parameters import ParameterTag
from lightning_parallel.tensor_parallel.sharding import (
    ShardSpec,
    split_even,
    split_heads,
    split_kv_heads,
    split_vocab,
)

__all__ = ["ModelShape", "Split"]

Split = Literal["whole", "column", "row", "heads", "kv_heads", "heads_in", "vocab"]
Entry = tuple[str, tuple[int, ...], Split]


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder: ``layers`` equal blocks between an embedding and a head.

    Attributes:
        layers: number of blocks.
        hidden: width of the residual stream.
        heads: query heads.
        ffn: inner width of the MLP.
        vocab: rows of the embedding.
        seq: tokens per training sequence.
        kv_heads: key/value heads, 0 for as many as query heads (grouped-query attention, Ainslie et al. 2023).
        head_dim: width of a head, 0 for ``hidden / heads``.
        gated: three MLP matrices (SwiGLU) instead of two.
        tied: the head is the embedding.
        norm: "rms" (a weight) or "layer" (a weight and a bias).
        norms_per_layer: normalisations over the hidden width in a block; 1 for parallel attention and MLP.
        qkv_bias, output_bias, mlp_bias, head_bias: which linear layers have biases.
        query_key_norm: normalisation of queries and keys: "none", per "head", or over the "width" of the projection.
        learned_positions: rows of a learned position embedding, 0 for none.
        relative_positions: a fifth attention matrix, as in Transformer-XL and Chinchilla's models.
        embedding_norm: a normalisation right after the embedding (BLOOM).
        other_parameters: what the sizes above leave out, spread evenly over the blocks.

    Raises:
        ValueError: a size below 1, or heads that do not share the key/value heads or the width evenly.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    tied: bool = False
    norm: Literal["rms", "layer"] = "layer"
    norms_per_layer: int = 2
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    head_bias: bool = False
    query_key_norm: Literal["none", "head", "width"] = "none"
    learned_positions: int = 0
    relative_positions: bool = False
    embedding_norm: bool = False
    other_parameters: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn", "vocab", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"a model needs {name} of at least 1, got {getattr(self, name)}")
        for name in ("kv_heads", "head_dim", "learned_positions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}; 0 leaves it out")
        if self.kv_heads and self.heads % self.kv_heads:
            fitting = choices_text(divisors(self.heads))
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly; use {fitting}")
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} is not a multiple of {self.heads} heads; name the head_dim, "
                f"such as {max(1, self.hidden // self.heads)}"
            )

    @classmethod
    def gpt(cls, layers: int, hidden: int, heads: int, *, vocab: int = 50257, seq: int = 2048) -> ModelShape:
        """GPT-2's and GPT-3's block: layer norms and biases everywhere, learned positions, tied head.

        >>> ModelShape.gpt(12, 768, 12, seq=1024).parameters
        124439808
        """
        return cls(layers, hidden, heads, 4 * hidden, vocab, seq, tied=True, learned_positions=seq)

    @classmethod
    def llama(
        cls, layers: int, hidden: int, heads: int, ffn: int, *, kv_heads: int = 0, vocab: int = 32000, seq: int = 4096
    ) -> ModelShape:
        """Llama's block: RMS norms, no biases, gated MLP, untied head.

        >>> ModelShape.llama(32, 4096, 32, 11008).parameters
        6738415616
        """
        return cls(
            layers,
            hidden,
            heads,
            ffn,
            vocab,
            seq,
            kv_heads=kv_heads,
            gated=True,
            norm="rms",
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
        )

    @property
    def key_value_heads(self) -> int:
        """Number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Columns of the query projection."""
        return self.heads * self.head_size

    @property
    def key_value_width(self) -> int:
        """Columns of the key (and of the value) projection."""
        return self.key_value_heads * self.head_size

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once.

        >>> ModelShape.llama(32, 4096, 32, 14336, kv_heads=8, vocab=128256).parameters
        8030261248
        """
        return _parameters(self)

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, without its share of ``other_parameters`` if that is not a whole number."""
        return sum(prod(size) for _, size, _ in self.block_entries()) + self.other_parameters // self.layers

    @property
    def embedding_parameters(self) -> int:
        """Parameters in front of the blocks (token and position embeddings) and odd ones out."""
        return sum(prod(size) for _, size, _ in self.embedding_entries()) + self.other_parameters % self.layers

    @property
    def head_parameters(self) -> int:
        """Parameters behind the blocks: the last norm, and the head unless it is tied."""
        return sum(prod(size) for _, size, _ in self.head_entries())

    @property
    def matrix_parameters(self) -> int:
        """Elements of the matrices of one block that every token is multiplied with."""
        return sum(prod(size) for _, size, _ in self.block_entries() if len(size) == 2)

    def with_parameters(self, parameters: int) -> ModelShape:
        """The same shape with ``other_parameters`` set so that the total is exactly ``parameters``."""
        bare = replace(self, other_parameters=0)
        return replace(bare, other_parameters=parameters - bare.parameters)

    def local_parameters(self, part: Literal["block", "embedding", "head"], tensor: int, rank: int = 0) -> int:
        """Elements of one block, of the embedding or of the head that ``rank`` of ``tensor`` tensor ranks holds.

        Raises:
            ValueError: heads or widths cannot be split over that many ranks; the text names sizes that can.
        """
        return _local_parameters(self, part, tensor, rank)

    def tied_parameters(self, tensor: int) -> int:
        """Elements of a tied head that tensor rank 0 holds a second time when the head is on another stage."""
        return split_vocab(self.vocab, tensor).local_size(0) * self.hidden if self.tied else 0

    def tags(self, part: Literal["block", "embedding", "head"], tensor: int) -> tuple[ParameterTag, ...]:
        """The parameters of one part as the tags of a real run with ``tensor`` tensor ranks."""
        entries = {"block": self.block_entries, "embedding": self.embedding_entries, "head": self.head_entries}[part]()
        return tuple(ParameterTag(name, size, self._shard(size, split, tensor)) for name, size, split in entries)

    def block_entries(self) -> Iterator[Entry]:
        """Name, size and split of every parameter of one block."""
        yield from self._attention_entries()
        inner: tuple[tuple[str, Split], ...] = (
            (("gate", "column"), ("up", "column")) if self.gated else (("up", "column"),)
        )
        for name, split in inner:
            yield f"mlp.{name}", (self.ffn, self.hidden), split
            if self.mlp_bias:
                yield f"mlp.{name}.bias", (self.ffn,), split
        yield "mlp.down", (self.hidden, self.ffn), "row"
        if self.mlp_bias:
            yield "mlp.down.bias", (self.hidden,), "whole"
        for index in range(self.norms_per_layer):
            yield from self._norm(f"norm{index}")

    def embedding_entries(self) -> Iterator[Entry]:
        """Name, size and split of every parameter in front of the blocks."""
        yield "embedding", (self.vocab, self.hidden), "vocab"
        if self.learned_positions:
            yield "positions", (self.learned_positions, self.hidden), "whole"
        if self.embedding_norm:
            yield from self._norm("embedding_norm")

    def head_entries(self) -> Iterator[Entry]:
        """Name, size and split of every parameter behind the blocks."""
        yield from self._norm("norm")
        if not self.tied:
            yield "head", (self.vocab, self.hidden), "vocab"
        if self.head_bias:
            yield "head.bias", (self.vocab,), "vocab"

    def _attention_entries(self) -> Iterator[Entry]:
        query, keys = self.query_width, self.key_value_width
        projections: tuple[tuple[str, int, Split], ...] = (("q", query, "heads"), ("k", keys, "kv_heads"))
        for name, width, split in (*projections, ("v", keys, "kv_heads")):
            yield f"attention.{name}", (width, self.hidden), split
            if self.qkv_bias:
                yield f"attention.{name}.bias", (width,), split
        yield "attention.output", (self.hidden, query), "heads_in"
        if self.output_bias:
            yield "attention.output.bias", (self.hidden,), "whole"
        if self.relative_positions:
            yield "attention.relative", (query, self.hidden), "heads"
        if self.query_key_norm == "head":
            yield "attention.q_norm", (self.head_size,), "whole"
            yield "attention.k_norm", (self.head_size,), "whole"
        elif self.query_key_norm == "width":
            yield "attention.q_norm", (query,), "heads"
            yield "attention.k_norm", (keys,), "kv_heads"

    def _norm(self, name: str) -> Iterator[Entry]:
        yield name, (self.hidden,), "whole"
        if self.norm == "layer":
            yield f"{name}.bias", (self.hidden,), "whole"

    def _shard(self, size: tuple[int, ...], split: Split, ranks: int) -> ShardSpec | None:
        if split == "whole":
            return None
        if split == "heads":
            return split_heads(0, self.heads, self.head_size, ranks)
        if split == "kv_heads":
            return split_kv_heads(0, self.key_value_heads, self.head_size, ranks)
        if split == "heads_in":
            return split_heads(1, self.heads, self.head_size, ranks)
        if split == "vocab":
            return split_vocab(self.vocab, ranks)
        return split_even(int(split == "row"), self.ffn, ranks, what="MLP width")


@lru_cache(maxsize=256)
def _parameters(shape: ModelShape) -> int:
    return shape.layers * shape.block_parameters + shape.embedding_parameters + shape.head_parameters


@lru_cache(maxsize=4096)
def _local_parameters(shape: ModelShape, part: Literal["block", "embedding", "head"], tensor: int, rank: int) -> int:
    held = sum(prod(tag.local_shape(rank)) for tag in shape.tags(part, tensor))
    # What no size describes is taken to be held whole by every tensor rank.
    odd = {"block": shape.other_parameters // shape.layers, "embedding": shape.other_parameters % shape.layers}
    return held + odd.get(part, 0)
