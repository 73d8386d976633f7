"""Pure: which blocks every pipeline stage runs, and how many micro-batches it keeps."""

from __future__ import annotations

from functools import lru_cache

from lightning_parallel.pipeline.partition import partition_blocks
from lightning_parallel.planner.job import Candidate
from lightning_parallel.planner.model_shape import ModelShape

__all__ = ["ROUNDING", "blocks_per_stage", "live_blocks", "live_micro_batches", "mean_parameters", "stage_parameters"]

# By how much sums over stages in another order may differ.
ROUNDING = 1e-9


def blocks_per_stage(shape: ModelShape, split: Candidate) -> tuple[int, ...]:
    """Blocks of every pipeline rank.

    Raises:
        ValueError: more stages than blocks.
    """
    return _blocks_per_stage(shape, split.pipeline, split.virtual_stages, split.balance)


@lru_cache(maxsize=1024)
def _blocks_per_stage(shape: ModelShape, pipeline: int, virtual_stages: int, balance: str) -> tuple[int, ...]:
    if virtual_stages > 1 or balance == "even":
        return _even_blocks(shape.layers, pipeline, virtual_stages)
    head = shape.head_parameters + (shape.tied_parameters(1) if pipeline > 1 else 0)
    return _balanced_blocks(shape.layers, shape.block_parameters, pipeline, shape.embedding_parameters, head)


@lru_cache(maxsize=1024)
def _balanced_blocks(layers: int, block: int, pipeline: int, embedding: int, head: int) -> tuple[int, ...]:
    """Blocks per stage as strategies here cut them, whatever the length of a sequence."""
    bounds = partition_blocks([block] * layers, pipeline, first=embedding, last=head)
    return tuple(stop - start for start, stop in bounds)


def _even_blocks(layers: int, pipeline: int, virtual_stages: int) -> tuple[int, ...]:
    """Blocks per rank for ``virtual_stages`` chunks each; uneven blocks count embedding and head as one block each."""
    chunks = pipeline * virtual_stages
    ends = 1 if layers % chunks and chunks <= layers + 2 else 0
    if chunks > layers + 2 * ends:
        raise ValueError(f"{layers} blocks cannot be split into {chunks} stages; use at most {layers} stages")
    each, more = divmod(layers + 2 * ends, chunks)
    counts = [each + (chunk >= chunks - more) for chunk in range(chunks)]
    counts[0] -= ends
    counts[-1] -= ends
    return tuple(sum(counts[rank::pipeline]) for rank in range(pipeline))


def stage_parameters(shape: ModelShape, split: Candidate) -> tuple[int, ...]:
    """Parameters that tensor rank 0, which holds most, keeps on every pipeline rank; a tied head lives on both ends."""
    blocks = blocks_per_stage(shape, split)
    block = shape.local_parameters("block", split.tensor)
    held = [count * block for count in blocks]
    embedding = shape.local_parameters("embedding", split.tensor)
    held[0] += embedding
    held[-1] += shape.local_parameters("head", split.tensor)
    if shape.tied and split.pipeline > 1:
        held[-1] += shape.tied_parameters(split.tensor)
    return tuple(held)


def mean_parameters(shape: ModelShape, split: Candidate) -> float:
    """The mean of `stage_parameters`, or less for a tied head, however the blocks are spread."""
    held = shape.layers * shape.local_parameters("block", split.tensor)
    held += shape.local_parameters("embedding", split.tensor) + shape.local_parameters("head", split.tensor)
    return held / split.pipeline


def live_micro_batches(schedule: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Per stage, micro-batches between forward and backward at one time, as `peak_live_micro_batches` counts them."""
    if schedule == "gpipe":
        return (micro_batches,) * stages
    return tuple(min(micro_batches, stages - stage) for stage in range(stages))


def live_blocks(shape: ModelShape, split: Candidate, micro_batches: int) -> tuple[float, ...]:
    """Per pipeline rank, blocks times micro-batches whose activations it keeps at one time.

    Interleaved (Narayanan et al. 2021): rank r warms up with 2 (p - r - 1) + (v - 1) p passes of a chunk and keeps one
    more. Zero bubble (Qi et al. 2024): ZB-H1 keeps as many as 1F1B, beside what is put off (`fullest_moments`); ZB-H2
    keeps 2 (p - r) - 1 micro-batches and ZB-V p on every rank. Where there are too few to fill ZB-H2's bubble, every
    rank puts the second halves of its backwards off and keeps all.
    """
    p, v = split.pipeline, split.virtual_stages
    blocks = blocks_per_stage(shape, split)
    if split.schedule in ("gpipe", "1f1b", "zero-bubble") and v == 1:
        live = live_micro_batches(split.schedule, p, micro_batches)
        return tuple(float(b * n) for b, n in zip(blocks, live, strict=True))
    found = []
    for rank, held in enumerate(blocks):
        if split.schedule == "interleaved":
            passes = min(2 * (p - rank - 1) + (v - 1) * p + 1, micro_batches * v)
            found.append(held / v * passes)
        elif split.schedule == "zb-h2":
            found.append(held * _put_off(micro_batches, 2 * p - 1, 2 * (p - rank) - 1))
        else:
            found.append(float(held * min(p, micro_batches)))
    return tuple(map(float, found))


def fullest_moments(stages: int, micro_batches: int) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """Per stage of the schedule zero-bubble, micro-batches that wait for the first and the second half of a backward.

    After the forward with which most are live, and after the first half with which most are put off: stage s puts s of
    them off, or all if there are fewer micro-batches than stages.
    """
    found = []
    for stage, live in enumerate(live_micro_batches("zero-bubble", stages, micro_batches)):
        if micro_batches < stages:
            found.append(((live, micro_batches - live), (0, micro_batches)))
        else:
            found.append(((live, stage), (live - 1, stage + 1)))
    return tuple(found)


def _put_off(micro_batches: int, filling: int, kept: int) -> int:
    """All micro-batches while there are too few, then those that are kept."""
    return micro_batches if micro_batches < filling else kept
