"""Pure: what is to be trained and how it could be split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_parallel.layout import ParallelLayout, choices_text, divisors
from lightning_parallel.planner.hardware import PRECISIONS, Cluster
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.planner.units import plural

__all__ = [
    "ATTENTIONS",
    "KERNELS",
    "LOSSES",
    "OFFLOADS",
    "OPTIMIZERS",
    "RECOMPUTES",
    "SCHEDULES",
    "STATES",
    "Candidate",
    "TrainingJob",
]

Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "cpu", "nvme"]

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOADS = ("none", "cpu", "nvme")
ATTENTIONS = ("flash", "eager")
LOSSES = ("plain", "fused")
KERNELS = ("plain", "fused")
STATES = ("mixed", "flat-gradients", "fp32-gradients", "both-gradients", "autocast", "true")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zb-h2", "zb-v")
# With tensor ranks, split backwards wait for sums of gradients that whole ones hide; costs here do not count that.
ON_REQUEST = ("zero-bubble",)
# Bytes of optimizer state per parameter in 32 bit.
OPTIMIZERS = {"adam": 8, "adamw": 8, "adam-8bit": 2, "sgd": 0, "sgd-momentum": 4, "lion": 4}


@dataclass(frozen=True)
class TrainingJob:
    """A model, the machines, and everything about the training that no layout changes.

    Attributes:
        shape: the model; its ``seq`` is the length of a sequence.
        cluster: the machines.
        global_batch: sequences per optimizer step.
        precision: of the matrix products.
        optimizer: a name of OPTIMIZERS.
        attention: "flash" never stores the scores, "eager" does.
        kernels: "plain" for modules of torch, "fused" for hand-written layers such as those of Megatron and NeMo, which
            read and write the activations less often.
        states: with 16 bit or less, "mixed" keeps 16-bit weights and gradients beside 32-bit master weights (the ZeRO
            paper), "flat-gradients" lays the shard's gradients end to end for each step, in 16 and then in 32 bit
            (DeepSpeed, whose own estimator counts 16 bytes over the ranks instead of 12), "fp32-gradients" sums
            gradients in 32 bit (Megatron; ZeRO here with Lightning's "bf16-true"), "both-gradients" keeps the 16-bit
            ones beside that sum (DeepSpeed's optimizer for bf16), "autocast" keeps everything in 32 bit and casts for
            products (Lightning's "bf16-mixed"), "true" has no master weights.
        dropout: whether a plain (not gated) block drops parts of the residual stream, so that it keeps two masks.
        loss: "plain" takes logits to 32 bit and keeps their probabilities, "fused" is a kernel that keeps the logits as
            they are and makes their gradient at once (flash-attn's cross-entropy, Liger's).
        trainable: the part of the parameters that is trained (below 1 for adapters such as LoRA).
        scatters_sends: whether each tensor rank sends its part of what passes between stages, and the next stage
            gathers it (Megatron's scatter and gather, DeepSpeed's partitioned pipes). The strategies here send the
            whole from every tensor rank, except with sequence parallelism, where each has a part only.

    Raises:
        ValueError: an unknown name, or a number out of range.
    """

    shape: ModelShape
    cluster: Cluster
    global_batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    attention: str = "flash"
    kernels: str = "plain"
    states: str = "mixed"
    trainable: float = 1.0
    dropout: bool = True
    loss: str = "plain"
    scatters_sends: bool = False

    def __post_init__(self) -> None:
        known = {"precision": PRECISIONS, "optimizer": tuple(OPTIMIZERS), "attention": ATTENTIONS, "states": STATES}
        known |= {"kernels": KERNELS, "loss": LOSSES}
        for name, names in known.items():
            if getattr(self, name) not in names:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use {' or '.join(names)}")
        if self.global_batch < 1:
            raise ValueError(f"global_batch counts the sequences of a step, at least 1, got {self.global_batch}")
        if not 0 < self.trainable <= 1:
            raise ValueError(f"trainable is a part above 0 and up to 1, got {self.trainable}; use 1.0")
        self.cluster.gpu.peak(self.precision)

    @property
    def narrow(self) -> bool:
        """Whether weights are kept in 16 bit."""
        return self.precision not in ("fp32", "tf32")

    @property
    def product_bytes(self) -> float:
        """Bytes of an element that the products read and write."""
        return 2.0 if self.narrow else 4.0

    @property
    def residual_bytes(self) -> float:
        """Bytes of an element between the blocks: under autocast, sums with 32-bit weights stay in 32 bit."""
        return self.weight_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight as the model holds it."""
        return 2.0 if self.narrow and self.states != "autocast" else 4.0

    @property
    def gradient_bytes(self) -> float:
        """Bytes of a gradient."""
        if not self.narrow:
            return 4.0
        return {"fp32-gradients": 4.0, "autocast": 4.0, "both-gradients": 6.0}.get(self.states, 2.0)

    @property
    def master_bytes(self) -> float:
        """Bytes of the 32-bit copy of a weight that the optimizer updates."""
        return 4.0 if self.narrow and self.states not in ("true", "autocast") else 0.0

    @property
    def step_bytes(self) -> float:
        """Bytes per parameter that an optimizer step makes anew: too large for what activations leave behind."""
        return 6.0 if self.narrow and self.states == "flat-gradients" else 0.0

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of optimizer state per parameter; without master weights it is as wide as the weights."""
        wide = OPTIMIZERS[self.optimizer]
        return wide / 2 if self.states == "true" and self.narrow else float(wide)

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch * self.shape.seq


_NAMES = (
    ("zero_stage", (0, 1, 2, 3)),
    ("offload", OFFLOADS),
    ("schedule", SCHEDULES),
    ("recompute", RECOMPUTES),
    ("balance", ("parameters", "even")),
)


@dataclass(frozen=True)
class Candidate:
    """One way to split a job.

    ``context`` splits sequences over ranks; ``zero_stage`` 0 to 3 shards optimizer, gradients and weights over the data
    ranks; ``virtual_stages`` is the number of model chunks per pipeline rank. ``balance`` spreads the blocks by
    "parameters", embedding and head included, as the strategies here do, or "even", as Megatron does.

    Raises:
        ValueError: an unknown name, a size below 1, or model chunks for a schedule that has none.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    micro_batch: int = 1
    zero_stage: int = 0
    offload: Offload = "none"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    balance: str = "parameters"

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "context", "micro_batch", "virtual_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', ' ')} needs a size of at least 1, got {getattr(self, name)}")
        for name, names in _NAMES:
            if getattr(self, name) not in names:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use {' or '.join(map(str, names))}")
        if self.virtual_stages > 1 and self.schedule != "interleaved":
            raise ValueError(
                f"schedule {self.schedule} has one model chunk per rank, got virtual stages {self.virtual_stages}; "
                "use the schedule interleaved"
            )

    @property
    def layout(self) -> ParallelLayout:
        """Ranks as the strategies arrange them; context ranks count as data ranks there."""
        return ParallelLayout(pipeline=self.pipeline, data=self.data * self.context, tensor=self.tensor)

    @property
    def world_size(self) -> int:
        """GPUs that the split uses."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def model_chunks(self) -> int:
        """Stages of the pipeline, virtual ones included."""
        return self.pipeline * self.virtual_stages

    def micro_batches(self, job: TrainingJob) -> int:
        """Micro-batches of each pipeline in one step.

        Raises:
            ValueError: the batch does not split evenly; the text names micro-batches that would do.
        """
        per_replica, rest = divmod(job.global_batch, self.data)
        if rest or per_replica % self.micro_batch:
            fitting = "data ranks that divide the batch"
            if not rest and per_replica:
                fitting = choices_text(divisors(per_replica))
            raise ValueError(
                f"a batch of {plural(job.global_batch, 'sequence')} over {plural(self.data, 'data rank')} does not "
                f"split into micro-batches of {self.micro_batch}; use {fitting}"
            )
        return per_replica // self.micro_batch

    def micro_batch_tokens(self, job: TrainingJob) -> int:
        """Tokens of one micro-batch on one rank.

        Raises:
            ValueError: context ranks, or tensor ranks with sequence parallelism, cannot share a sequence evenly.
        """
        seq = job.shape.seq
        if seq % self.context:
            raise ValueError(f"a sequence of {seq} tokens does not split over {self.context} context ranks")
        if self.sequence_parallel and seq // self.context % self.tensor:
            raise ValueError(
                f"sequence parallelism cannot split {seq // self.context} tokens over {self.tensor} tensor ranks; "
                "leave it out, or use a length that is a multiple"
            )
        return self.micro_batch * job.shape.seq // self.context
