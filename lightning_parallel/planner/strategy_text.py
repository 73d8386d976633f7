"""Pure: the strategy that runs a split, as a class with arguments, as a Trainer line and as LightningCLI's YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.precisions import keeps_masters, precision_flag
from lightning_parallel.planner.runnable import FSDP_SHARDINGS, unrunnable

__all__ = [
    "alternatives",
    "peers",
    "recompute_note",
    "strategy_of",
    "trainer_arguments",
    "trainer_line",
    "yaml_text",
]

_OURS = "lightning_parallel.strategies.TensorPipelineStrategy"
_ZERO = "lightning_parallel.strategies.ZeroStrategy"
_ZERO_CONFIG = "lightning_parallel.strategies.ZeroConfig"
_DDP = "lightning.pytorch.strategies.DDPStrategy"
_FSDP = "lightning.pytorch.strategies.FSDPStrategy"
_DEEPSPEED = "lightning.pytorch.strategies.DeepSpeedStrategy"


def strategy_of(job: TrainingJob, split: Candidate) -> dict[str, Any]:
    """``class_path`` and ``init_args`` of the strategy; the path is None when nothing runs it."""
    why = unrunnable(job, split)
    if why:
        return {"class_path": None, "init_args": {}, "why": why}
    if job.narrow and job.states == "true" and keeps_masters(split):
        return {"class_path": _FSDP, "init_args": {"sharding_strategy": FSDP_SHARDINGS[split.zero_stage]}}
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
        options = _zero_options(job, split)
        if len(options) > 1:
            arguments["zero_stage"] = {"class_path": _ZERO_CONFIG, "init_args": options}
        elif split.zero_stage:
            arguments["zero_stage"] = split.zero_stage
        return {"class_path": _OURS, "init_args": arguments}
    if split.zero_stage:
        return {"class_path": _ZERO, "init_args": _zero_arguments(job, split)}
    return {"class_path": _DDP, "init_args": {}}


def _zero_options(job: TrainingJob, split: Candidate) -> dict[str, Any]:
    """Arguments of `ZeroConfig`."""
    options: dict[str, Any] = {"stage": split.zero_stage}
    if split.offload != "none":
        options |= {"offload": split.offload} | ({"offload_parameters": True} if split.zero_stage == 3 else {})
    if job.narrow and job.gradient_bytes == 2 and keeps_masters(split):
        options["gradient_dtype"] = "parameter"
    return options


def _zero_arguments(job: TrainingJob, split: Candidate) -> dict[str, Any]:
    """Arguments of `ZeroStrategy`, which takes the rarer options as a `ZeroConfig` only."""
    options = _zero_options(job, split)
    if "gradient_dtype" not in options:
        return options
    return {"stage": {"class_path": _ZERO_CONFIG, "init_args": options}}


def alternatives(job: TrainingJob, split: Candidate) -> list[str]:
    """Trainer lines of Lightning's own strategies that shard as much; none where the plan's own line is one."""
    if not split.zero_stage or (job.narrow and job.states == "true"):
        return []
    return [_line(job, split, peer["class_path"], peer["init_args"]) for peer in peers(job, split).values()]


def peers(job: TrainingJob, split: Candidate) -> dict[str, dict[str, Any]]:
    """``class_path`` and ``init_args`` of Lightning's own strategies that run a split, by their names there."""
    if split.tensor * split.pipeline * split.context > 1:
        return {}
    if not split.zero_stage:
        return {"ddp": {"class_path": _DDP, "init_args": {}}}
    if job.cluster.gpu.is_host:
        return {}  # the others need GPUs
    found: dict[str, dict[str, Any]] = {}
    keeps_copies = not (job.narrow and job.states == "true")
    # DeepSpeed keeps files only for what stage 3 shards.
    offloads = split.offload != "nvme" or split.zero_stage == 3
    if keeps_copies and offloads and (job.master_bytes or not job.narrow):
        found["deepspeed"] = {"class_path": _DEEPSPEED, "init_args": _deepspeed(split)}
    sharding = FSDP_SHARDINGS.get(split.zero_stage)
    if sharding and split.offload == "none":
        found["fsdp"] = {"class_path": _FSDP, "init_args": {"sharding_strategy": sharding}}
    return found


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


def trainer_arguments(job: TrainingJob, split: Candidate, class_path: str) -> dict[str, Any]:
    """What the Trainer is given beside the strategy of that class."""
    arguments: dict[str, Any] = {"devices": job.cluster.gpus_per_node}
    if job.cluster.nodes > 1:
        arguments["num_nodes"] = job.cluster.nodes
    arguments["precision"] = precision_flag(job, split, class_path.rpartition(".")[2])
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
    options = _keywords(trainer_arguments(job, split, class_path))
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
    path = strategy["class_path"]
    lines = ["trainer:"]
    lines += [f"  {name}: {json.dumps(value)}" for name, value in trainer_arguments(job, split, path).items()]
    lines += ["  strategy:", f"    class_path: {path}"]
    if strategy["init_args"]:
        lines.append("    init_args:")
        lines += [f"      {name}: {json.dumps(value)}" for name, value in strategy["init_args"].items()]
    return "\n".join(lines)
