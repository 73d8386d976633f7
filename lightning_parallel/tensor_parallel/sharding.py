"""Pure: which slices of a full tensor each tensor rank holds.

A ``ShardSpec`` is data: for every tensor rank the ranges it holds along one dimension, in the order in which they lie
in its local tensor. Layers, checkpoints, norms and parameter counts all read the same spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_parallel.layout import choices_text, divisors

__all__ = [
    "Segment",
    "ShardSpec",
    "split_even",
    "split_heads",
    "split_kv_heads",
    "split_packed",
    "split_qkv",
    "split_uneven",
    "split_vocab",
]


@dataclass(frozen=True)
class Segment:
    """Half-open range ``start:stop`` along the split dimension of the full tensor.

    ``owner`` is the lowest tensor rank that holds the range: it counts it in norms and writes it to checkpoints.
    """

    start: int
    stop: int
    owner: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a segment needs 0 <= start < stop, got {self.start}:{self.stop}")
        if self.owner < 0:
            raise ValueError(f"the owner of a segment is a tensor rank of at least 0, got {self.owner}")

    @property
    def size(self) -> int:
        """Number of rows (or columns) in the range."""
        return self.stop - self.start


@dataclass(frozen=True)
class ShardSpec:
    """How a full tensor of ``size`` along ``dim`` lies on the ranks of a tensor group.

    ``parts[rank]`` are the segments of that rank in local order. Two segments are either the same range (held by
    several ranks) or disjoint, and together they cover ``0:size``. ``padding[rank]`` counts rows at the end of the
    local tensor that exist in no full tensor; they are left out when it is empty.

    Raises:
        ValueError: the segments leave a gap, overlap, repeat on one rank, or name a wrong owner.
    """

    dim: int
    size: int
    parts: tuple[tuple[Segment, ...], ...]
    padding: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dim < 0 or self.size < 1:
            raise ValueError(f"a shard needs dim >= 0 and size >= 1, got dim={self.dim}, size={self.size}")
        if not self.parts:
            raise ValueError("a shard needs the parts of at least 1 tensor rank, got none")
        if self.padding and (len(self.padding) != len(self.parts) or min(self.padding) < 0):
            raise ValueError(f"padding needs {len(self.parts)} counts of at least 0, got {self.padding}")
        self._check_segments()

    def _check_segments(self) -> None:
        first_holder: dict[tuple[int, int], int] = {}
        for rank, segments in enumerate(self.parts):
            ranges = [(segment.start, segment.stop) for segment in segments]
            if len(set(ranges)) != len(ranges):
                raise ValueError(f"tensor rank {rank} holds a range twice: {ranges}")
            for segment, key in zip(segments, ranges, strict=True):
                if segment.owner != first_holder.setdefault(key, rank):
                    raise ValueError(
                        f"range {segment.start}:{segment.stop} is first held by tensor rank {first_holder[key]}, "
                        f"but names {segment.owner} as its owner"
                    )
        position = 0
        for start, stop in sorted(first_holder):
            if start != position:
                problem = "is held by no tensor rank" if start > position else "is cut in two ways"
                raise ValueError(f"range {min(start, position)}:{max(start, position)} of {self.size} {problem}")
            position = stop
        if position != self.size:
            raise ValueError(f"the segments cover 0:{position}, but the full size is {self.size}")

    @property
    def ranks(self) -> int:
        """Size of the tensor group."""
        return len(self.parts)

    @property
    def replicated(self) -> bool:
        """Whether some segment is held by several ranks, so that its gradient must be summed over them."""
        return any(segment.owner != rank for rank, segments in enumerate(self.parts) for segment in segments)

    def local_size(self, rank: int) -> int:
        """Size of the local tensor of ``rank`` along ``dim``, padding included."""
        held = sum(segment.size for segment in self.parts[self._rank(rank)])
        return held + (self.padding[rank] if self.padding else 0)

    def local_shape(self, full_shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of ``rank``; raises ValueError when ``full_shape`` does not fit this spec."""
        if self.dim >= len(full_shape) or full_shape[self.dim] != self.size:
            raise ValueError(f"shape {full_shape} has no dimension {self.dim} of size {self.size}")
        return (*full_shape[: self.dim], self.local_size(rank), *full_shape[self.dim + 1 :])

    def local_slices(self, rank: int) -> Iterator[tuple[Segment, slice]]:
        """Every segment of ``rank`` with the place where it lies in the local tensor.

        >>> [(s.start, s.stop, where) for s, where in split_packed(0, 8, 2, 2).local_slices(1)]
        [(2, 4, slice(0, 2, None)), (6, 8, slice(2, 4, None))]
        """
        position = 0
        for segment in self.parts[self._rank(rank)]:
            yield segment, slice(position, position + segment.size)
            position += segment.size

    def holders(self, segment: Segment) -> tuple[int, ...]:
        """Every tensor rank that holds the range of ``segment``, ascending; empty when no rank does."""
        return tuple(
            rank
            for rank, segments in enumerate(self.parts)
            if any((s.start, s.stop) == (segment.start, segment.stop) for s in segments)
        )

    def segments(self) -> tuple[Segment, ...]:
        """Every distinct segment once, in the order of the full tensor."""
        return tuple(sorted({s for part in self.parts for s in part}, key=lambda s: s.start))

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"tensor rank {rank} is outside 0..{self.ranks - 1}")
        return rank


def split_even(dim: int, size: int, ranks: int, *, what: str = "size") -> ShardSpec:
    """Equal contiguous slices. ``what`` names the quantity in the error.

    >>> [split_even(0, 6, 3).parts[1][0].start, split_even(0, 6, 3).local_size(1)]
    [2, 2]
    >>> split_even(1, 10, 4, what="hidden size")
    Traceback (most recent call last):
    ...
    ValueError: hidden size 10 cannot be split evenly over tensor_parallel_size=4; use 1, 2 or 5

    Raises:
        ValueError: ``size`` is not a multiple of ``ranks``.
    """
    return _blocks(dim, size, size, ranks, what)


def split_uneven(dim: int, size: int, ranks: int) -> ShardSpec:
    """Contiguous slices as ``torch.chunk`` cuts them: ceil(size / ranks) each, the last shorter or empty.

    >>> [split_uneven(0, 5, 4).local_size(rank) for rank in range(4)]
    [2, 2, 1, 0]
    """
    _check_ranks(ranks)
    return ShardSpec(dim, size, _chunks(size, -(-size // ranks), ranks))


def split_heads(dim: int, heads: int, head_dim: int, ranks: int) -> ShardSpec:
    """Whole attention heads of ``head_dim`` rows each, the same number on every rank.

    Raises:
        ValueError: ``heads`` is not a multiple of ``ranks``.
    """
    return _blocks(dim, heads * head_dim, heads, ranks, "attention head count")


def split_kv_heads(dim: int, heads: int, head_dim: int, ranks: int) -> ShardSpec:
    """Whole key/value heads; with fewer heads than ranks each head is held by ``ranks / heads`` neighbours.

    The replica layout is the one in which a rank's query heads find their key/value head (grouped-query attention,
    Ainslie et al. 2023).

    >>> spec = split_kv_heads(0, heads=2, head_dim=8, ranks=4)
    >>> spec.parts[3], spec.replicated
    ((Segment(start=8, stop=16, owner=2),), True)

    Raises:
        ValueError: neither of ``heads`` and ``ranks`` is a multiple of the other.
    """
    return ShardSpec(dim, heads * head_dim, _kv_parts(heads, head_dim, ranks, 0))


def split_qkv(dim: int, heads: int, kv_heads: int, head_dim: int, ranks: int) -> ShardSpec:
    """A fused projection whose rows are the blocks [Q; K; V]: every rank gets its heads of each block.

    >>> [(s.start, s.stop) for s in split_qkv(0, heads=4, kv_heads=2, head_dim=1, ranks=2).parts[1]]
    [(2, 4), (5, 6), (7, 8)]

    Raises:
        ValueError: the heads do not split over ``ranks``, or ``heads`` is not a multiple of ``kv_heads``.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"{heads} attention heads cannot share {kv_heads} key/value heads; use {_some_divisors(heads, heads)}"
        )
    query = split_heads(dim, heads, head_dim, ranks)
    keys = _kv_parts(kv_heads, head_dim, ranks, heads * head_dim)
    values = _kv_parts(kv_heads, head_dim, ranks, (heads + kv_heads) * head_dim)
    parts = tuple(q + k + v for q, k, v in zip(query.parts, keys, values, strict=True))
    return ShardSpec(dim, (heads + 2 * kv_heads) * head_dim, parts)


def split_packed(dim: int, size: int, parts: int, ranks: int) -> ShardSpec:
    """``parts`` equal blocks behind one another (gate and up projection), each split evenly.

    Raises:
        ValueError: ``size`` is not ``parts`` equal blocks, or a block is not a multiple of ``ranks``.
    """
    if parts < 1 or size % parts:
        raise ValueError(f"size {size} is not made of {parts} equal blocks; use {_some_divisors(size, 2 * parts)}")
    block = size // parts
    one = split_even(dim, block, ranks, what="packed block size")
    shifted = tuple(
        tuple(Segment(s.start + i * block, s.stop + i * block, rank) for i in range(parts) for s in segments)
        for rank, segments in enumerate(one.parts)
    )
    return ShardSpec(dim, size, shifted)


def split_vocab(size: int, ranks: int, padded_to: int | None = None) -> ShardSpec:
    """Rows of an embedding or a head, along dimension 0.

    Without ``padded_to`` the cut is that of :func:`split_uneven`. With it every rank holds ``padded_to / ranks`` rows;
    rows from ``size`` on exist only locally and are counted in ``padding``.

    >>> spec = split_vocab(5, 2, padded_to=8)
    >>> [spec.local_size(0), spec.local_size(1)], spec.padding, spec.parts[1]
    ([4, 4], (0, 3), (Segment(start=4, stop=5, owner=1),))

    Raises:
        ValueError: ``padded_to`` is smaller than ``size`` or not a multiple of ``ranks``.
    """
    if padded_to is None:
        return split_uneven(0, size, ranks)
    _check_ranks(ranks)
    if padded_to < size or padded_to % ranks:
        raise ValueError(
            f"a vocabulary of {size} over {ranks} tensor ranks cannot be padded to {padded_to}; "
            f"use {-(-size // ranks) * ranks} or another multiple of {ranks} that is not smaller"
        )
    rows = padded_to // ranks
    parts = _chunks(size, rows, ranks)
    padding = tuple(rows - sum(segment.size for segment in part) for part in parts)
    return ShardSpec(0, size, parts, padding if any(padding) else ())


def _blocks(dim: int, size: int, units: int, ranks: int, what: str) -> ShardSpec:
    """Split ``units`` indivisible units (``size`` rows in all) evenly."""
    _check_ranks(ranks)
    if units < 1 or units % ranks:
        raise ValueError(
            f"{what} {units} cannot be split evenly over tensor_parallel_size={ranks}; "
            f"use {_some_divisors(units, 2 * ranks)}"
        )
    return ShardSpec(dim, size, _chunks(size, size // ranks, ranks))


def _chunks(size: int, step: int, ranks: int) -> tuple[tuple[Segment, ...], ...]:
    """Contiguous runs of ``step`` until ``size`` is used up; later ranks hold nothing."""
    bounds = [(min(rank * step, size), min((rank + 1) * step, size)) for rank in range(ranks)]
    return tuple((Segment(start, stop, rank),) if stop > start else () for rank, (start, stop) in enumerate(bounds))


def _kv_parts(heads: int, head_dim: int, ranks: int, offset: int) -> tuple[tuple[Segment, ...], ...]:
    """Segments of key/value heads that start at row ``offset``."""
    _check_ranks(ranks)
    if heads < 1 or (heads % ranks and ranks % heads):
        fitting = tuple(n for n in range(1, 2 * ranks + 1) if heads >= 1 and (heads % n == 0 or n % heads == 0))
        raise ValueError(
            f"{heads} key/value heads can be neither split nor repeated evenly over tensor_parallel_size={ranks}; "
            f"use {choices_text(fitting) or 'at least 1 head'}"
        )
    copies = max(1, ranks // heads)
    rows = max(1, heads // ranks) * head_dim
    starts = [offset + rank // copies * rows for rank in range(ranks)]
    return tuple((Segment(start, start + rows, rank // copies * copies),) for rank, start in enumerate(starts))


def _some_divisors(number: int, limit: int) -> str:
    """Divisors worth naming in an error: those up to ``limit``."""
    return choices_text(tuple(d for d in divisors(number) if d <= limit)) if number >= 1 else "at least 1"


def _check_ranks(ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"tensor_parallel_size must be at least 1, got {ranks}")
