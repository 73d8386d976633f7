"""Pure: seconds of one optimizer step, term by term."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.kernels import Kernels, block_kernels, head_kernels, stream
from lightning_parallel.planner.links import Group, all_gather_seconds, all_reduce_seconds, send_seconds
from lightning_parallel.planner.stages import ROUNDING, blocks_per_stage, stage_parameters

__all__ = ["StepTime", "hop_seconds", "idle_share", "least_seconds", "pass_seconds", "step_time"]

# Part of the tensor-parallel collectives of a backward that runs beside the products for weight gradients; hand-written
# layers start them early, autograd runs them in order.
TENSOR_OVERLAP = {"fused": 0.5, "plain": 0.0}
# Part of a pass that collectives over data ranks can run beside: the rest waits for the first gradients or weights.
DATA_OVERLAP = 0.65
# What the kernels lose, per second of a collective beside them: it takes multiprocessors and memory bandwidth.
CONTENTION = 0.25
# Part of a block's attention that the ring of a context group runs beside.
CONTEXT_OVERLAP = 0.7
# Part of the sends between stages that a stage waits for in the steady state, where a schedule has other work to do
# meanwhile. Under 1F1B it waits for all of them: p micro-batches go round through 2 (p - 1) sends. Interleaved chunks
# could hide them, and bubble rates are computed as if they did, but runtimes wait for each: throughputs in table 4 of
# Qi et al. 2024 fall 6% short of the bubble rates in table 5, and v times as many sends take 5 to 9%.
SEND_EXPOSED = 0.07
# Selective recomputation beside fused attention repeats every other matrix product in torch, none in Megatron.
SELECTIVE_PRODUCTS = {"fused": 0.0, "plain": 0.6}
# Bytes per parameter and micro-batch for adding up gradients: 16-bit gradients are written, read, added to a second
# buffer and cast; Megatron's products add to the 32-bit buffer themselves.
GRADIENT_TRAFFIC = {"fused": 1.0, "plain": 16.0}
# Bytes per parameter of an Adam step: gradient, master weight and two moments in 32 bit, read and written; the norm.
OPTIMIZER_TRAFFIC = 34.0
# Idle time of a step besides sends, in passes of a stage: a part of the p - 1 of 1F1B, and from 8 stages on a constant
# for the ends. One v-th for v interleaved chunks; with split backwards in theory a third for ZB-H1, none for ZB-H2 and
# ZB-V. From the bubble rates in tables 5 and 8 of Qi et al. 2024 (8 to 32 stages, 3 micro-batches per stage and more).
IDLE_PASSES = {"interleaved": (1.0, 0.33), "zero-bubble": (0.445, 1.1), "zb-h2": (0.12, 1.8), "zb-v": (0.13, 0.95)}
# Bytes per second that a CPU's Adam moves, and those of an NVMe disk, per GPU: DeepSpeed's CPU Adam and a striped disk.
CPU_ADAM_BYTES = 12e9
NVME_BYTES = 3e9


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the slowest rank; the terms add up to ``total``.

    ``tensor``, ``data`` and ``pipeline`` are the parts of the collectives and sends that no computation hides.
    """

    compute: float
    tensor: float
    bubble: float
    data: float
    pipeline: float
    optimizer: float
    offload: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return float(sum(vars(self).values()))


def step_time(job: TrainingJob, split: Candidate) -> StepTime:
    """Seconds of one step of ``job`` split as ``split``.

    ``T = m t_max + bubble + what stays exposed of the collectives + optimizer``, with ``t_max`` the slowest stage.

    Raises:
        ValueError: the batch, the heads or the blocks cannot be split that way.
    """
    micro_batches = split.micro_batches(job)
    block, head = block_kernels(job, split), head_kernels(job, split)
    blocks = blocks_per_stage(job.shape, split)
    exposed = _exposed_seconds(job, split, block)
    held = stage_parameters(job.shape, split)
    adding = GRADIENT_TRAFFIC[job.kernels] / stream(job.cluster.gpu) if micro_batches > 1 else 0.0
    each = _block_compute(job, split, block)
    computing = [count * each + weights * adding for count, weights in zip(blocks, held, strict=True)]
    computing[-1] += head.forward.total + head.backward.total
    totals = [seconds + count * exposed for seconds, count in zip(computing, blocks, strict=True)]
    slowest = max(range(len(blocks)), key=totals.__getitem__)
    # Beside a pipeline, weights stay gathered through the step.
    gathering = _gather_seconds(job, split, block, max(blocks)) * (micro_batches if split.pipeline == 1 else 1)
    return StepTime(
        compute=micro_batches * computing[slowest],
        tensor=micro_batches * blocks[slowest] * exposed,
        bubble=_bubble(split, micro_batches, sum(totals) - totals[slowest]),
        data=gathering + _reduction_seconds(job, split, max(held), computing[slowest]),
        pipeline=_send_seconds(job, split, micro_batches),
        **_update_seconds(job, split, max(held)),
    )


def pass_seconds(job: TrainingJob, split: Candidate) -> float:
    """Seconds that the whole model takes for one micro-batch, nothing recomputed: whatever the pipeline and ZeRO."""
    block, head = block_kernels(job, split), head_kernels(job, split)
    exposed = _exposed_seconds(job, replace(split, recompute="none"), block)
    each = block.forward.total + block.backward.total + exposed
    return job.shape.layers * each + head.forward.total + head.backward.total


def least_seconds(job: TrainingJob, split: Candidate, whole: float) -> float:
    """A bound from below on `step_time` under any recomputation and balance of the stages.

    The slowest stage takes at least the mean t of all, and the bubble counts k passes of the others, so that for k <= m
    ``m t_max + k (p t - t_max) >= t (m + k (p - 1))``. Sends come on top, nothing hides them. What hides the sums over
    data ranks is less than a pass of the slowest stage, which costs more of the rest than it saves there.

    Args:
        job: what is trained.
        split: one way to split it.
        whole: what `pass_seconds` says of it.

    Raises:
        ValueError: the batch cannot be split that way.
    """
    micro_batches = split.micro_batches(job)
    passes = _idle_passes(split, micro_batches)
    mean = whole / split.pipeline
    idle = min(micro_batches, passes) * (split.pipeline - 1)
    share = job.shape.parameters / (split.tensor * split.pipeline)
    hiding = mean if micro_batches - passes >= DATA_OVERLAP else whole
    least = mean * (micro_batches + idle) + _reduction_seconds(job, split, share, hiding)
    least += sum(_update_seconds(job, split, share).values()) + _send_seconds(job, split, micro_batches)
    return least * (1 - ROUNDING)


def _exposed_seconds(job: TrainingJob, split: Candidate, block: Kernels) -> float:
    """What a block waits for in a micro-batch: tensor and context groups."""
    return _tensor_seconds(job, split) + _context_seconds(job, split, block)


def _block_compute(job: TrainingJob, split: Candidate, block: Kernels) -> float:
    selective = block.selective
    if job.attention == "flash":
        selective = SELECTIVE_PRODUCTS[job.kernels] * block.forward.gemm + block.forward.memory + block.forward.start
    repeated = {"none": 0.0, "selective": selective, "full": block.forward.total}[split.recompute]
    return block.forward.total + block.backward.total + repeated


def _tensor_seconds(job: TrainingJob, split: Candidate) -> float:
    """Two sums over the tensor group forward and two backward, for one block and micro-batch."""
    if split.tensor == 1:
        return 0.0
    size = split.micro_batch_tokens(job) * job.shape.hidden * 2.0
    group = Group.of(split.tensor, 1, job.cluster.link_domain)
    if split.sequence_parallel:
        once = 2 * all_gather_seconds(job.cluster, group, size)
    else:
        once = all_reduce_seconds(job.cluster, group, size)
    passes = 2 if split.recompute == "full" else 1
    return 2 * once * (passes + 1 - TENSOR_OVERLAP[job.kernels])


def _context_seconds(job: TrainingJob, split: Candidate, block: Kernels) -> float:
    """Keys and values pass around the context group, and with their gradients once more in the backward."""
    if split.context == 1:
        return 0.0
    group = Group.of(split.context, split.tensor, job.cluster.link_domain)
    tokens = split.micro_batch_tokens(job) * split.context
    once = all_gather_seconds(job.cluster, group, 4.0 * tokens * job.shape.key_value_width / split.tensor)
    forward = max(0.0, once - CONTEXT_OVERLAP * block.forward.attention)
    backward = max(0.0, 2 * once - CONTEXT_OVERLAP * block.backward.attention)
    return forward + backward + CONTENTION * 2 * once


def _bubble(split: Candidate, micro_batches: int, others: float) -> float:
    """Idle seconds of the slowest rank: the other stages' micro-batch, once (equal stages: (p - 1) (tF + tB))."""
    if split.pipeline == 1:
        return 0.0
    return others * _idle_passes(split, micro_batches)


def _idle_passes(split: Candidate, micro_batches: int) -> float:
    """Passes of each other stage that the slowest rank waits for."""
    part, ends = IDLE_PASSES.get(split.schedule, (1.0, 0.0))
    others = max(1, split.pipeline - 1)
    usual = part / split.virtual_stages + ends / max(7, others)
    return max(usual, _starved_passes(split, micro_batches) / others)


def _starved_passes(split: Candidate, micro_batches: int) -> float:
    """Passes that a rank waits when too few micro-batches fill a schedule: counted, with sends that take no time.

    Until a micro-batch is back, there are only the forwards of the others. Split backwards have three equal parts.
    """
    p, m, v = split.pipeline, micro_batches, split.virtual_stages
    if split.schedule == "zero-bubble":
        return (2 * p - 1 - min(m, p)) / 3
    if split.schedule == "zb-h2":
        return (2 * p - 1 - m) / 3
    if split.schedule == "zb-v":
        # The V is passed twice, forward and backward, by half stages.
        return max(2 * p - 1 - m, 4 * p - 1 - 4 * m) / 6
    if split.schedule == "interleaved":
        # Each round of chunks takes as long as one of p micro-batches.
        return (p - 1 + (v - 1) * max(0, p - m)) / v
    return 0.0


def _send_seconds(job: TrainingJob, split: Candidate, micro_batches: int) -> float:
    if split.pipeline == 1:
        return 0.0
    waits = _exposed_sends(split, micro_batches, ("1f1b", "interleaved"))
    return 2 * hop_seconds(job, split) * (split.pipeline - 1 + waits)


def hop_seconds(job: TrainingJob, split: Candidate) -> float:
    """Seconds of a send from one stage to the next, the mean of those inside a node and those across."""
    shared = split.sequence_parallel or job.scatters_sends
    size = split.micro_batch_tokens(job) * job.shape.hidden * job.residual_bytes / (split.tensor if shared else 1)
    hops = split.pipeline - 1
    stride = split.tensor * split.data * split.context
    nodes = -(-split.pipeline * stride // job.cluster.link_domain)
    crossing = min(1.0, (nodes - 1) / hops)
    return send_seconds(job.cluster, size, across=crossing)


def _exposed_sends(split: Candidate, micro_batches: int, waiting: tuple[str, ...]) -> float:
    """Sends, each way, that the slowest rank waits for beyond the first and last micro-batch.

    Args:
        split: its stages and their schedule.
        micro_batches: in one step.
        waiting: schedules that wait for every send of the steady state.
    """
    sends = micro_batches * split.virtual_stages
    return sends * (split.pipeline - 1) / split.pipeline if split.schedule in waiting else SEND_EXPOSED * sends


def idle_share(split: Candidate, micro_batches: int, send: float = 0.0) -> float:
    """Part of a step that equal stages spend waiting for each other: what papers compute as the bubble rate.

    Args:
        split: its stages and their schedule.
        micro_batches: in one step.
        send: seconds of a send between neighbours over those of a pass (forward and backward) of a stage.

    >>> f"{idle_share(Candidate(pipeline=4), 8):.3f}"
    '0.273'
    """
    passes = _bubble(split, micro_batches, split.pipeline - 1.0)
    if split.pipeline > 1:
        passes += 2 * send * (split.pipeline - 1 + _exposed_sends(split, micro_batches, ("1f1b",)))
    return passes / (micro_batches + passes)


def _data_group(job: TrainingJob, split: Candidate) -> Group:
    return Group.of(split.data * split.context, split.tensor, job.cluster.link_domain)


def _gather_seconds(job: TrainingJob, split: Candidate, block: Kernels, blocks: int) -> float:
    """ZeRO-3, per micro-batch: weights gathered before each pass of a block, gradients scattered after its backward.

    Offloaded weights come from the host first.
    """
    if split.zero_stage < 3:
        return 0.0
    size = job.shape.local_parameters("block", split.tensor) * 2.0
    group = _data_group(job, split)
    once = all_gather_seconds(job.cluster, group, size) + _fetch_seconds(job, split, size / group.size)
    forward = block.forward.total
    backward = block.backward.total + (forward if split.recompute == "full" else 0.0)
    exposed = max(0.0, once - DATA_OVERLAP * forward) + max(0.0, 2 * once - DATA_OVERLAP * backward)
    beside = min(once, forward) + min(2 * once, backward)
    return blocks * (exposed + CONTENTION * beside) + 2 * once


def _fetch_seconds(job: TrainingJob, split: Candidate, share: float) -> float:
    """Until a rank's share of weights has come from where ZeRO-3 keeps it between uses."""
    rates = {"cpu": job.cluster.gpu.host_gbps * 1e9, "nvme": NVME_BYTES}
    return share / rates[split.offload] if split.offload in rates else 0.0


def _reduction_seconds(job: TrainingJob, split: Candidate, parameters: float, pass_seconds: float) -> float:
    """Gradients summed over the data ranks once a step, beside the last backward."""
    group = _data_group(job, split)
    if group.size == 1 or split.zero_stage == 3:
        return 0.0
    gradients = parameters * min(4.0, job.gradient_bytes)
    if split.zero_stage == 0:
        seconds = all_reduce_seconds(job.cluster, group, gradients)
    else:
        seconds = all_gather_seconds(job.cluster, group, gradients)
        seconds += all_gather_seconds(job.cluster, group, parameters * job.weight_bytes)
    hidden = DATA_OVERLAP * 0.6 * pass_seconds
    return max(0.05 * seconds, seconds - hidden)


def _update_seconds(job: TrainingJob, split: Candidate, parameters: float) -> dict[str, float]:
    """The optimizer's pass over its states, on the GPU or on the host with the way there and back."""
    ranks = split.data * split.context if split.zero_stage else 1
    share = parameters * job.trainable / ranks
    if split.offload == "none":
        return {"optimizer": share * OPTIMIZER_TRAFFIC / stream(job.cluster.gpu), "offload": 0.0}
    moved = share * (job.gradient_bytes + job.weight_bytes) / (job.cluster.gpu.host_gbps * 1e9)
    if split.offload == "nvme":
        moved += share * 2 * (job.master_bytes + job.optimizer_bytes) / NVME_BYTES
    return {"optimizer": share * OPTIMIZER_TRAFFIC / CPU_ADAM_BYTES, "offload": moved}
