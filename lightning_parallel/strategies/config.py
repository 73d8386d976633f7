"""Pure: the options of the strategies as checked, frozen data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_parallel.zero.offload import KINDS, Offload

__all__ = ["LossConfig", "PipelineConfig", "SizeOrAuto", "TensorParallelConfig", "ZeroConfig"]

SizeOrAuto = int | Literal["auto"]
LossWeight = Literal["samples", "valid_labels"] | Callable[[Any], Any]
SCHEDULES = ("1f1b", "gpipe", "zero-bubble")
NON_FINITE = ("ignore", "raise", "skip")
GRADIENT_DTYPES = ("float32", "parameter")
ZERO_STAGES = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3}


def check_size(name: str, value: object) -> None:
    """Raises ValueError unless a size is "auto" or an integer of at least 1."""
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}={value!r} is not a size; use 'auto' or an integer of at least 1")


def check_count(name: str, value: object) -> None:
    """Raises ValueError unless a value is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is not a count; use an integer of at least 1")


def check_flag(name: str, value: object) -> None:
    """Raises ValueError unless a value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not a choice; use True or False")


@dataclass(frozen=True)
class TensorParallelConfig:
    """How layers are split over tensor ranks.

    Attributes:
        size: ranks that share each layer; "auto" is the even split of a node, or the planner's (see `even_or_planned`).
        plan: "auto", or pattern of module names -> style ("colwise", "rowwise", "colwise_qkv", "vocab", ...).
        sequence_parallel: also split activations between the split layers along the sequence.
    """

    size: SizeOrAuto = "auto"
    plan: Literal["auto"] | Mapping[str, str] = "auto"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        check_size("tensor_parallel_size", self.size)
        check_flag("sequence_parallel", self.sequence_parallel)
        entries = [*self.plan, *self.plan.values()] if isinstance(self.plan, Mapping) else []
        if self.plan != "auto" and (not entries or not all(isinstance(entry, str) for entry in entries)):
            raise ValueError(
                f"plan={self.plan!r} is not a plan; use 'auto' or a mapping such as {{'layers.*.mlp.fc': 'colwise'}}"
            )


@dataclass(frozen=True)
class PipelineConfig:
    """How blocks are spread over stages and batches over micro-batches.

    Attributes:
        size: number of stages; "auto" is the even split of a node, or the planner's (see `even_or_planned`).
        micro_batches: parts that each rank's batch is split into; "auto" is 4 per stage (1 without a pipeline). A
            batch with fewer samples gives fewer parts.
        schedule: "1f1b", "gpipe" or "zero-bubble".
        blocks: "auto", or the names (or one pattern) of the repeated blocks that may be spread over stages.
        evaluation_micro_batches: the same in validation, test and prediction; 1 runs every step on the whole batch.
    """

    size: SizeOrAuto = "auto"
    micro_batches: SizeOrAuto = "auto"
    schedule: str = "1f1b"
    blocks: str | Sequence[str] = "auto"
    evaluation_micro_batches: int = 1

    def __post_init__(self) -> None:
        check_size("pipeline_parallel_size", self.size)
        check_size("micro_batches", self.micro_batches)
        check_count("evaluation_micro_batches", self.evaluation_micro_batches)
        if not isinstance(self.blocks, Sequence) or not all(isinstance(name, str) for name in self.blocks):
            raise ValueError(
                f"blocks={self.blocks!r} names no blocks; use 'auto', a pattern such as 'layers.*' or a list of names"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is unknown; use one of {', '.join(SCHEDULES)}")

    def micro_batches_for(self, stages: int) -> int:
        """Number of parts of a training batch: at least 4 per stage keeps the bubble below a fifth."""
        if self.micro_batches != "auto":
            return self.micro_batches
        return 1 if stages == 1 else 4 * stages


@dataclass(frozen=True)
class LossConfig:
    """How losses are combined and what happens when gradients are not finite.

    Attributes:
        weight: weight of a micro-batch or replica in the mean: its "samples", its "valid_labels" (labels other than
            -100), or a function of the batch.
        non_finite: "ignore", "raise", or "skip" the optimizer step. With a loss scaler an overflow is the scaler's to
            handle: no rank takes the step, "skip" counts it, nothing raises.
    """

    weight: LossWeight = "samples"
    non_finite: str = "ignore"

    def __post_init__(self) -> None:
        if not callable(self.weight) and self.weight not in ("samples", "valid_labels"):
            raise ValueError(
                f"loss_weight={self.weight!r} is unknown; use 'samples', 'valid_labels' or a function of the batch"
            )
        if self.non_finite not in NON_FINITE:
            raise ValueError(f"non_finite={self.non_finite!r} is unknown; use one of {', '.join(NON_FINITE)}")


@dataclass(frozen=True)
class ZeroConfig:
    """What is sharded over data replicas, and where that lies.

    Attributes:
        stage: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also parameters.
        offload: None leaves everything on the device. "cpu" steps in host memory, where gradients of shards, optimizer
            states and float32 copies are. "nvme" keeps the last two in files.
        nvme_path: folder for these files, on a local disk; the trainer's `default_root_dir` if None.
        offload_parameters: of stage 3: shares of parameters lie where `offload` puts the optimizer's states, too.
        prefetch: blocks whose parameters stage 3 gathers ahead of their use; each takes the memory of a block.
        gradient_dtype: of half-precision parameters: "float32" keeps and sums gradients in it over micro-batches and
            ranks; "parameter" keeps them as they come, in half the memory, for runs that accumulate little.
    """

    stage: int = 0
    offload: str | None = None
    nvme_path: str | None = None
    offload_parameters: bool = False
    prefetch: int = 1
    gradient_dtype: str = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in (0, 1, 2, 3):
            raise ValueError(
                f"stage {self.stage!r} of ZeRO is not available; use 0 (nothing sharded), 1 (optimizer state), 2 (also "
                "gradients) or 3 (also parameters)"
            )
        check_flag("offload_parameters", self.offload_parameters)
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ValueError(f"prefetch={self.prefetch!r} is not a number of blocks; use 0 or more")
        if self.gradient_dtype not in GRADIENT_DTYPES:
            raise ValueError(f"gradient_dtype={self.gradient_dtype!r} is unknown; use 'float32' or 'parameter'")
        if self.offload_parameters and self.stage != 3:
            raise ValueError(
                f"offload_parameters=True moves shares of parameters, but stage {self.stage} has whole ones on every "
                "rank; use stage=3, or leave it out"
            )
        if self.offload_parameters and self.offload is None:
            raise ValueError("offload_parameters=True needs a place; add offload='cpu' or offload='nvme'")
        if self.offload not in (None, *KINDS):
            raise ValueError(f"offload={self.offload!r} is unknown; use None, 'cpu' or 'nvme'")
        if self.offload != "nvme" and self.nvme_path is not None:
            raise ValueError(f"nvme_path={self.nvme_path!r} goes with offload='nvme'; add that, or leave it out")
        if self.offload is not None and self.stage == 0:
            raise ValueError(f"offload={self.offload!r} moves what is sharded, but stage 0 shards nothing; use stage=2")

    def shards_anything(self, replicas: int) -> bool:
        """Whether so many replicas share something, or move it away from the device."""
        return self.stage > 0 and (replicas > 1 or self.offload is not None)

    def shards_parameters(self, replicas: int) -> bool:
        """Whether that includes parameters."""
        return self.stage == 3 and self.shards_anything(replicas)

    def refuse_layout(self, tensor: int, pipeline: int) -> None:
        """Raises ValueError if ranks of this layout cannot share parameters in this way."""
        if self.stage == 3 and tensor * pipeline > 1:
            raise ValueError(
                f"stage 3 of ZeRO needs tensor_parallel_size=1 and pipeline_parallel_size=1, got {tensor} and "
                f"{pipeline}: their ranks hold parts of parameters already; use stage 1 or 2 with them"
            )

    def host_side(self, default_path: str) -> Offload | None:
        """What lies beside the device, if anything.

        Args:
            default_path: for the files without a `nvme_path`.

        Raises:
            ValueError: files would have to be on another machine.
        """
        path = str(self.nvme_path or default_path) if self.offload == "nvme" else None
        if path is not None and "://" in path:
            raise ValueError(f"offload='nvme' needs a folder on a local disk, not {path!r}; give one as nvme_path")
        return None if self.offload is None else Offload(self.offload, path, self.offload_parameters)

    @classmethod
    def of(cls, stage: int | str | ZeroConfig, **options: Any) -> ZeroConfig:
        """From a number, from the name that FSDP has for it, or from one that is complete."""
        if isinstance(stage, ZeroConfig):
            given = next((name for name, value in options.items() if value), None)
            if given is not None:
                raise ValueError(f"{given}={options[given]!r} is given beside a ZeroConfig; set it there")
            return stage
        number: Any = ZERO_STAGES.get(stage, stage) if isinstance(stage, str) else stage
        return cls(number, **options)
