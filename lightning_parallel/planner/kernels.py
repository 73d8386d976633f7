"""Pure: seconds of the computing kernels of one block on one GPU.

A matrix product takes the longer of its arithmetic and its memory traffic; how near it comes to the peak depends on how
well its sizes fill the multiprocessors. Everything between the products is memory traffic. Backwards cost twice the
arithmetic of forwards. What many small kernels lose as they start does not shrink with the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_parallel.planner.hardware import Gpu
from lightning_parallel.planner.job import Candidate, TrainingJob

__all__ = ["Kernels", "Pass", "block_kernels", "head_kernels"]

# Share of the memory bandwidth that long streams reach.
STREAM_SHARE = 0.82
# Part of the best matrix product that training keeps up for hours at the power limit.
SUSTAINED = 0.92
# A product of m x k by k x n is dealt out in tiles of 128 x 256; part of the last wave of tiles is idle.
TILE = 128 * 256
IDLE_WAVES = 0.2
# Depth k at which filling and draining a tile costs as much as its work.
SHALLOW_DEPTH = 100.0
# Part of the 16-bit share of the peak that narrower products keep.
NARROW_SHARE = {"fp8": 1.0, "nvfp4": 0.9}
# Part of the 16-bit peak that fused attention reaches forward on GPUs with and without 8-bit units (the peak grew
# faster than attention did), and what the backward keeps of it.
FLASH_SHARE = {True: 0.32, False: 0.40}
FLASH_BACKWARD = 0.8
# The same for the batched products of unfused attention; heads that are no multiple of 8 wide miss the matrix units.
BATCHED_SHARE = {True: 0.6, False: 0.04}
# Reads and writes of an element of the score matrix: product, scale and mask, softmax, dropout, product.
SCORE_TRAFFIC_FORWARD, SCORE_TRAFFIC_BACKWARD = 7.0, 10.0
# Reads and writes per element of the residual stream and of the MLP's inner width, forward; backward is twice that.
RESIDUAL_TRAFFIC = {"fused": 22.0, "plain": 40.0}
ACTIVATION_TRAFFIC = {"fused": 2.5, "plain": 5.0}
GATED_TRAFFIC = 1.4
# Seconds that the forward of a block loses where its kernels start, fill and drain: about 4 microseconds for each of
# the 40 that a block of torch's own modules launches one by one. Hand-written layers launch a third of them, early.
START_SECONDS = {"fused": 0.0, "plain": 1.5e-4}


@dataclass(frozen=True)
class Pass:
    """Seconds of one direction by kind."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    start: float = 0.0

    @property
    def total(self) -> float:
        """All of it: kernels run one after the other."""
        return self.gemm + self.attention + self.memory + self.start


@dataclass(frozen=True)
class Kernels:
    """Forward, backward, and what selective recomputation repeats in the backward."""

    forward: Pass
    backward: Pass
    selective: float = 0.0


def gemm_seconds(gpu: Gpu, precision: str, m: float, n: float, k: float) -> float:
    """Seconds of a product of m x k by k x n."""
    waves = m * n / TILE / gpu.multiprocessors
    filled = waves / (waves + IDLE_WAVES) * k / (k + SHALLOW_DEPTH)
    rate = gpu.peak(precision) * gpu.gemm_share * SUSTAINED * NARROW_SHARE.get(precision, 1.0) * filled
    width = element_bytes(precision)
    traffic = (m * k + k * n) * min(width, 2) + m * n * max(width, 2)
    return max(2 * m * n * k / rate, traffic / stream(gpu))


def element_bytes(precision: str) -> float:
    """Bytes of an element as the products read it."""
    return {"fp32": 4, "tf32": 4, "fp8": 1, "nvfp4": 0.5}.get(precision, 2)


def stream(gpu: Gpu) -> float:
    """Bytes per second of long reads and writes."""
    return gpu.hbm_gbps * 1e9 * STREAM_SHARE


def _product(gpu: Gpu, precision: str, m: float, n: float, k: float) -> tuple[float, float]:
    """Forward, and backward with its two products (gradients of input and weight)."""
    return (
        gemm_seconds(gpu, precision, m, n, k),
        gemm_seconds(gpu, precision, m, k, n) + gemm_seconds(gpu, precision, k, n, m),
    )


def block_kernels(job: TrainingJob, split: Candidate) -> Kernels:
    """Seconds of one block for one micro-batch on one rank."""
    return _block_kernels(job, split.tensor, split.context, split.micro_batch, split.sequence_parallel)


@lru_cache(maxsize=1024)
def _block_kernels(job: TrainingJob, t: int, context: int, micro_batch: int, sequence_parallel: bool) -> Kernels:
    """The fields of a split that tell how long its kernels take: a search asks for the same ones many times."""
    split = Candidate(tensor=t, context=context, micro_batch=micro_batch, sequence_parallel=sequence_parallel)
    shape, gpu, tokens = job.shape, job.cluster.gpu, split.micro_batch_tokens(job)
    inner = shape.ffn / t * (2 if shape.gated else 1)
    projections = (
        ((shape.query_width + 2 * shape.key_value_width) / t, shape.hidden),
        (shape.hidden, shape.query_width / t),
        (inner, shape.hidden),
        (shape.hidden, shape.ffn / t),
    )
    products = [_product(gpu, job.precision, tokens, n, k) for n, k in projections]
    attention = _attention(job, split)
    width = max(2.0, element_bytes(job.precision))
    residual = RESIDUAL_TRAFFIC[job.kernels] * shape.hidden / (t if split.sequence_parallel else 1)
    split_traffic = ACTIVATION_TRAFFIC[job.kernels] * shape.ffn * (GATED_TRAFFIC if shape.gated else 1.0) + 2 * (
        shape.query_width + 2 * shape.key_value_width
    )
    memory = tokens * width * (residual + split_traffic / t) / stream(gpu)
    casts, start = _cast_seconds(job, tokens, projections), START_SECONDS[job.kernels]
    return Kernels(
        Pass(sum(f for f, _ in products), attention.forward.total, memory + casts, start),
        Pass(sum(b for _, b in products), attention.backward.total, 2 * memory + casts, 2 * start),
        selective=attention.selective,
    )


def _cast_seconds(job: TrainingJob, tokens: float, projections: tuple[tuple[float, float], ...]) -> float:
    """Narrow products need inputs (forward) and output gradients (backward) cast, as they are and transposed."""
    if job.precision not in NARROW_SHARE:
        return 0.0
    return tokens * sum(4.0 * k for _, k in projections) / stream(job.cluster.gpu)


def _attention(job: TrainingJob, split: Candidate) -> Kernels:
    shape, gpu = job.shape, job.cluster.gpu
    pairs = split.micro_batch * shape.seq**2 / split.context * shape.heads / split.tensor
    precision = "bf16" if job.precision in NARROW_SHARE else job.precision
    # Two products over half of the pairs (causal), and five in a fused backward.
    flops = 2 * 2 * pairs * shape.head_size
    peak = gpu.peak(precision)
    if job.attention == "flash":
        forward = flops / 2 / (peak * FLASH_SHARE["fp8" in gpu.tflops])
        return Kernels(Pass(attention=forward), Pass(attention=2.5 * forward / FLASH_BACKWARD))
    width = max(2.0, element_bytes(job.precision))
    products = flops / (peak * gpu.gemm_share * SUSTAINED * BATCHED_SHARE[shape.head_size % 8 == 0])
    scores = pairs * width / stream(gpu)
    return Kernels(
        Pass(attention=products, memory=scores * SCORE_TRAFFIC_FORWARD),
        Pass(attention=2 * products, memory=scores * SCORE_TRAFFIC_BACKWARD),
        selective=products / 2 + scores * SCORE_TRAFFIC_FORWARD,
    )


def head_kernels(job: TrainingJob, split: Candidate) -> Kernels:
    """Seconds of the head and the loss for one micro-batch on one rank."""
    return _head_kernels(job, split.tensor, split.context, split.micro_batch)


@lru_cache(maxsize=1024)
def _head_kernels(job: TrainingJob, t: int, context: int, micro_batch: int) -> Kernels:
    split = Candidate(tensor=t, context=context, micro_batch=micro_batch)
    shape, gpu, tokens = job.shape, job.cluster.gpu, split.micro_batch_tokens(job)
    precision = "bf16" if job.precision in NARROW_SHARE else job.precision
    forward, backward = _product(gpu, precision, tokens, shape.vocab / split.tensor, shape.hidden)
    # The loss reads the logits in 32 bit for the maximum and the sum, and writes their gradients; a fused one reads the
    # logits as they are, and once more for the gradients.
    loss = tokens * shape.vocab / split.tensor / stream(gpu)
    there, back = (job.product_bytes, 2 * job.product_bytes) if job.loss == "fused" else (10.0, 8.0)
    return Kernels(Pass(gemm=forward, memory=there * loss), Pass(gemm=backward, memory=back * loss))
