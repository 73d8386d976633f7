"""Pure: the strategy that runs a split, as a class with arguments, as a Trainer line and as LightningCLI's YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightning_parallel.pipeline.schedules import SCHEDULE_NAMES
from lightning_parallel.planner.job import Candidate, TrainingJob

__all__ = ["alternatives", "precision_flag", "recompute_note", "strategy_of", "trainer_line", "unrunnable", "yaml_text"]

_OURS = "lightning_parallel.strategies.TensorPipelineStrategy"
_ZERO = "lightning_parallel.strategies.ZeroStrategy"
_ZERO_CONFIG = "lightning_parallel.strategies.ZeroConfig"
_DDP = "lightning.pytorch.strategies.DDPStrategy"
_FSDP = "lightning.pytorch.strategies.FSDPStrategy"
_DEEPSPEED = "lightning.pytorch.strategies.DeepSpeedStrategy"
_PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}


def unrunnable(split: Candidate) -> str:
    """Why no strategy of Lightning or of this package runs a split; empty when one does."""
    model_ranks = split.tensor * split.pipeline
    if split.context > 1:
        return "no strategy here splits sequences over a context group"
    if model_ranks > 1 and split.zero_stage == 3:
        return "no strategy here shards weights beside tensor or pipeline parallelism"
    if split.pipeline > 1 and split.schedule not in SCHEDULE_NAMES:
        return f"no strategy here runs the schedule {split.schedule}"
    return ""


def strategy_of(job: TrainingJob, split: Candidate) -> dict[str, Any]:
    """``class_path`` and ``init_args`` of the strategy; the path is None when nothing runs it."""
    if unrunnable(split):
        return {"class_path": None, "init_args": {}, "why": unrunnable(split)}
    if split.tensor * split.pipeline > 1:
        arguments: dict[str, Any] = {
            "tensor_parallel_size": split.tensor,
            "pipeline_parallel_size": split.pipeline,
            "micro_batches": split.micro_batches(job),
        }
        if split.pipeline > 1:
            arguments["schedule"] = split.schedule
        if split.tensor > 1 and split.sequence_parallel:
            arguments["sequence_parallel"] = True
        if split.offload != "none":
            moved = {"stage": split.zero_stage, "offload": split.offload}
            arguments["zero_stage"] = {"class_path": _ZERO_CONFIG, "init_args": moved}
        elif split.zero_stage:
            arguments["zero_stage"] = split.zero_stage
        return {"class_path": _OURS, "init_args": arguments}
    if split.zero_stage:
        options: dict[str, Any] = {"stage": split.zero_stage}
        if split.offload != "none":
            options |= {"offload": split.offload} | ({"offload_parameters": True} if split.zero_stage == 3 else {})
        return {"class_path": _ZERO, "init_args": options}
    return {"class_path": _DDP, "init_args": {}}


def alternatives(job: TrainingJob, split: Candidate) -> list[str]:
    """Trainer lines of Lightning's own strategies that shard as much."""
    if split.tensor * split.pipeline > 1 or split.context > 1 or not split.zero_stage:
        return []
    found = [(_DEEPSPEED, _deepspeed(split))]
    sharding = {2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}.get(split.zero_stage)
    if sharding and split.offload == "none":
        found.append((_FSDP, {"sharding_strategy": sharding}))
    return [_line(job, split, path, arguments) for path, arguments in found]


def recompute_note(split: Candidate) -> str:
    """How the model comes to recompute what the plan counts on: no strategy switches it on; empty if it need not."""
    if split.recompute == "none":
        return ""
    if split.recompute == "full":
        return (
            "The plan counts on blocks that are recomputed in the backward pass, which the model has to do: "
            "model.gradient_checkpointing_enable() in transformers, or in your forward "
            "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) for each block."
        )
    return (
        "The plan counts on a part of each block being recomputed, which the model has to do: in your forward "
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=...) with "
        "create_selective_checkpoint_contexts that saves every other product and attention."
    )


def _deepspeed(split: Candidate) -> dict[str, Any]:
    arguments: dict[str, Any] = {"stage": split.zero_stage}
    if split.offload != "none":
        arguments["offload_optimizer"] = True
    if split.offload != "none" and split.zero_stage == 3:
        arguments["offload_parameters"] = True
    if split.offload == "nvme":
        arguments.update(remote_device="nvme", offload_params_device="nvme", offload_optimizer_device="nvme")
    return arguments


def precision_flag(job: TrainingJob) -> str:
    """The Trainer's name of the job's precision; 8 and 4 bit run through Transformer Engine, from 16-bit weights."""
    if job.states == "true" and job.precision in ("fp16", "bf16"):
        return f"{job.precision.replace('fp', '')}-true"
    return _PRECISIONS.get(job.precision, "transformer-engine")


def _trainer_arguments(job: TrainingJob, split: Candidate) -> dict[str, Any]:
    arguments: dict[str, Any] = {"devices": job.cluster.gpus_per_node}
    if job.cluster.nodes > 1:
        arguments["num_nodes"] = job.cluster.nodes
    arguments["precision"] = precision_flag(job)
    if split.tensor * split.pipeline == 1 and split.micro_batches(job) > 1:
        arguments["accumulate_grad_batches"] = split.micro_batches(job)
    return arguments


def trainer_line(job: TrainingJob, split: Candidate) -> str:
    """One line of Python that makes the Trainer."""
    strategy = strategy_of(job, split)
    if strategy["class_path"] is None:
        return f"# {strategy['why']}"
    return _line(job, split, strategy["class_path"], strategy["init_args"])


def _line(job: TrainingJob, split: Candidate, class_path: str, arguments: dict[str, Any]) -> str:
    inner = _keywords(arguments)
    options = _keywords(_trainer_arguments(job, split))
    return f"Trainer(strategy={class_path.rpartition('.')[2]}({inner}), {options})"


def _keywords(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_python(value)}" for name, value in arguments.items())


def _python(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['class_path'].rpartition('.')[2]}({_keywords(value['init_args'])})"
    return repr(value)


def yaml_text(job: TrainingJob, split: Candidate) -> str:
    """The ``trainer`` section of a LightningCLI configuration."""
    strategy = strategy_of(job, split)
    if strategy["class_path"] is None:
        return f"# {strategy['why']}"
    lines = ["trainer:"]
    lines += [f"  {name}: {json.dumps(value)}" for name, value in _trainer_arguments(job, split).items()]
    lines += ["  strategy:", f"    class_path: {strategy['class_path']}"]
    if strategy["init_args"]:
        lines.append("    init_args:")
        lines += [f"      {name}: {json.dumps(value)}" for name, value in strategy["init_args"].items()]
    return "\n".join(lines)
