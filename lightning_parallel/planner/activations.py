"""Pure: bytes that forwards keep for their backwards.

Counted tensor by tensor as autograd saves them, which for a GPT block in 16 bit gives the ``s b h (34 + 5 a s / h)`` of
Korthikanti et al. 2022, and with tensor and sequence parallelism the forms of their table 2.
"""

from __future__ import annotations

from lightning_parallel.planner.job import Candidate, TrainingJob

__all__ = ["block_bytes", "boundary_bytes", "factor_bytes", "logit_bytes", "passing_bytes"]

# Bytes per logit: the logits, and their 32-bit copy, log-probabilities and gradient; fused kernels work in place.
LOGIT_BYTES = {"fused": 8.0, "plain": 10.0}


def block_bytes(job: TrainingJob, split: Candidate) -> float:
    """Bytes that one block keeps per micro-batch on one rank until its backward."""
    shape, tokens, t = job.shape, split.micro_batch_tokens(job), split.tensor
    if split.recompute == "full":
        return tokens * shape.hidden * job.residual_bytes / (t if split.sequence_parallel else 1)
    if split.recompute == "selective" and job.attention == "flash" and job.kernels == "plain":
        return tokens * _every_other_product(job, split) + _cast_weights(job, split)
    kept = tokens * _token_bytes(job, split) + _cast_weights(job, split)
    return kept + (_score_bytes(job, split) if split.recompute == "none" else 0.0)


def _score_bytes(job: TrainingJob, split: Candidate) -> float:
    """What unfused attention keeps of the score matrix: probabilities, and with dropout its mask and the result."""
    if job.attention != "eager":
        return 0.0
    shape, width = job.shape, job.product_bytes
    # Autocast computes the softmax in 32 bit and casts the result.
    kept = width + (4.0 if job.states == "autocast" and job.narrow else 0.0) + (1.0 + width if job.dropout else 0.0)
    return split.micro_batch * shape.heads / split.tensor * shape.seq**2 / split.context * kept


def _every_other_product(job: TrainingJob, split: Candidate) -> float:
    """Bytes per token under selective recomputation: the block's input, attention, every other product's output."""
    shape, t = job.shape, split.tensor
    whole = shape.hidden / (t if split.sequence_parallel else 1)
    query, keys, inner = shape.query_width / t, shape.key_value_width / t, shape.ffn / t
    separate = [query, keys, keys, whole, inner, inner, whole]
    outputs = separate if shape.gated else [query + 2 * keys, whole, inner, whole]
    return whole * job.residual_bytes + job.product_bytes * (query + sum(outputs[::2]))


def _token_bytes(job: TrainingJob, split: Candidate) -> float:
    """Bytes per token without the scores: inputs of norms and products, and of the MLP's nonlinearity."""
    shape, width = job.shape, job.product_bytes
    dropout_masks = 2.0 if job.dropout and not shape.gated else 0.0
    # Two norms keep their inputs, two products theirs.
    streams = 2 * job.residual_bytes + 2 * width + dropout_masks
    residual = shape.hidden * streams / (split.tensor if split.sequence_parallel else 1)
    inner = {(False, "plain"): 2, (False, "fused"): 2, (True, "plain"): 4, (True, "fused"): 3}
    attention = 2 * shape.query_width + 2 * shape.key_value_width
    return residual + width * (attention + inner[shape.gated, job.kernels] * shape.ffn) / split.tensor


def _cast_weights(job: TrainingJob, split: Candidate) -> float:
    """Bytes of the 16-bit copies of a block's matrices that autocast makes, and autograd keeps, for each forward."""
    return job.product_bytes * job.shape.matrix_parameters / split.tensor if job.states == "autocast" else 0.0


def factor_bytes(job: TrainingJob, split: Candidate) -> float:
    """Bytes of what one block keeps per micro-batch between the halves of a split backward.

    Inputs of its products, of which query, key and value (and gate and up) share theirs, and gradients of their
    outputs: ``32 s b h`` for a GPT block in 16 bit (Qi et al. 2024, table 1).
    """
    shape, t = job.shape, split.tensor
    shared = shape.hidden / (t if split.sequence_parallel else 1)
    inner = (2 if shape.gated else 1) * shape.ffn
    inputs = 2 * shared + (shape.query_width + shape.ffn) / t
    gradients = (shape.query_width + 2 * shape.key_value_width + inner) / t + 2 * shape.hidden
    return split.micro_batch_tokens(job) * job.product_bytes * (inputs + gradients)


def boundary_bytes(job: TrainingJob, split: Candidate) -> float:
    """Bytes of what a stage sent for one micro-batch, kept until its backward; what it received its block keeps."""
    if split.pipeline == 1:
        return 0.0
    sharing = split.tensor if split.sequence_parallel else 1
    return split.micro_batch_tokens(job) * job.shape.hidden * job.residual_bytes / sharing


def passing_bytes(job: TrainingJob, split: Candidate) -> float:
    """Bytes that come and go while one block runs backward: gradients of its activations, and what it repeats."""
    shape, tokens = job.shape, split.micro_batch_tokens(job)
    inner = shape.ffn * (2 if shape.gated else 1) / split.tensor
    gradients = tokens * job.product_bytes * (2 * inner + 4 * shape.hidden)
    if split.recompute == "none":
        return gradients
    whole = tokens * _token_bytes(job, split) + _score_bytes(job, split)
    return gradients + whole - min(whole, block_bytes(job, split))


def logit_bytes(job: TrainingJob, split: Candidate) -> float:
    """Bytes of logits and loss of one micro-batch on the last stage; a fused loss has logits and their gradient."""
    each = 2 * job.product_bytes if job.loss == "fused" else LOGIT_BYTES[job.kernels]
    return split.micro_batch_tokens(job) * job.shape.vocab / split.tensor * each
