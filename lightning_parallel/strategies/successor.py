"""Glue: Lightning's own strategy in the place of the one that planned for it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, FSDPPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_parallel.planner.choose import NOTABLE, Choice, Choices
from lightning_parallel.planner.strategy_text import peers
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.chosen import RunnableChoices
from lightning_parallel.strategies.fsdp_units import casts_left_alone
from lightning_parallel.strategies.succeeding import SUCCEEDING, lightning_name

__all__ = ["lightning_runtime", "simplest", "succeed", "take_over"]

# With a loss scaler FSDP and DeepSpeed have their own, and what the user set for the given one would be lost.
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def simplest(choices: Choices, whole: Choices, device: str, precision: str) -> tuple[Choice, str] | None:
    """The least sharding that Lightning's own strategies run about as fast as the best plan, and who runs it.

    Args:
        choices: what was planned.
        whole: the same for replicas of the model that take the loader's batches as they are.
        device: type of the devices.
        precision: as a Trainer names it.

    Returns:
        None if nothing of theirs is less than `NOTABLE` behind.
    """
    limit = choices.best.seconds_per_sequence / (1 - NOTABLE)
    for choice in sorted(whole.ranked, key=lambda choice: choice.plan.split.zero_stage):
        runtime = lightning_runtime(choice, device, precision)
        if runtime is not None and choice.seconds_per_sequence < limit:
            return choice, runtime
    return None


def lightning_runtime(choice: Choice, device: str, precision: str) -> str | None:
    """Which of Lightning's own strategies runs a plan with the loader's batches as they are.

    Args:
        choice: the plan.
        device: type of the devices; Lightning has FSDP and DeepSpeed for "cuda" only.
        precision: as a Trainer names it.

    Returns:
        "ddp", "fsdp" or, for offload, "deepspeed"; None if none of them does: layers or stages are split, batches are
        cut into micro-batches, DeepSpeed alone would do and is not installed, or would scale losses its own way.
    """
    job, split = choice.job, choice.plan.split
    if split.micro_batches(job) > 1:
        return None
    able = peers(job, split)
    if "ddp" in able:
        return "ddp"
    if device != "cuda" or precision not in _PRECISIONS:
        return None
    if "fsdp" in able:
        return "fsdp"
    offloads = split.offload != "none" and "deepspeed" in able
    return "deepspeed" if offloads and find_spec("deepspeed") else None


def succeed(trainer: Trainer, choices: RunnableChoices, runtime: str) -> str:
    """Lets one of Lightning's own strategies go on with a trainer whose processes have started and know each other.

    Args:
        trainer: its strategy has set nothing up yet but the process group.
        choices: what was planned, the plan to be run at first.
        runtime: see `lightning_runtime`.

    Returns:
        The name of its class.
    """
    casts = {"mixed_precision": casts_left_alone()} if runtime == "fsdp" and "mixed" in trainer.precision else {}
    strategy: Any = choices.peer(runtime, SUCCEEDING, **casts)
    strategy.choices = choices  # for reports, see `planned_for`
    take_over(trainer, strategy)
    strategy.setup_environment()
    name = lightning_name(strategy)
    rank_zero_info(
        f"lightning_parallel: Lightning's {name} suffices and runs this plan, and each rank logs its own values; with "
        "AutoStrategy(runtime='lightning_parallel') they are those of the global batch"
    )
    return name


def take_over(trainer: Trainer, successor: Strategy) -> None:
    """Puts a strategy in the place of the trainer's, with the module and the plugins that this one was given."""
    plugin, module = trainer.precision_plugin, trainer.lightning_module
    successor.precision_plugin = _precision(successor, plugin)
    _compat.hand_over(trainer, successor)
    successor.connect(module)


def _precision(strategy: Strategy, plugin: Precision) -> Precision:
    """The plugin that a strategy takes for a precision."""
    if isinstance(strategy, FSDPStrategy):
        return FSDPPrecision(plugin.precision)  # type: ignore[arg-type]
    if isinstance(strategy, DeepSpeedStrategy):
        return DeepSpeedPrecision(plugin.precision)  # type: ignore[arg-type]
    return plugin
