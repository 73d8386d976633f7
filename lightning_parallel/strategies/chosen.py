"""Glue: the strategy objects that run a plan: the one here, or Lightning's own where it suffices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, Strategy
from torch import nn

from lightning_parallel.planner.choose import Choice, Choices
from lightning_parallel.planner.strategy_text import peers, trainer_arguments
from lightning_parallel.strategies.config import ZeroConfig
from lightning_parallel.strategies.planning import planned_zero
from lightning_parallel.strategies.tensor_pipeline import TensorPipelineStrategy

__all__ = ["RunnableChoices", "planned_for"]

_OURS = "lightning_parallel"
_PEERS: dict[str, type[Strategy]] = {"ddp": DDPStrategy, "fsdp": FSDPStrategy, "deepspeed": DeepSpeedStrategy}


@dataclass(frozen=True)
class RunnableChoices(Choices):
    """Layouts of a run, and what runs the fastest of them.

    A ``runtime`` is "lightning_parallel" for the strategies here, which run every plan, or "ddp", "fsdp" or "deepspeed"
    for Lightning's own.

    Attributes:
        units: classes of the model's blocks. FSDP gathers one at a time, which is what a plan reckons with.
    """

    units: frozenset[type[nn.Module]] = frozenset()

    def led_by(self, choice: Choice) -> RunnableChoices:
        """The same with a choice at first, which is the best from now on."""
        others = [other for other in self.ranked if other.plan.split != choice.plan.split]
        return replace(self, ranked=(choice, *others))

    def strategy(self, runtime: str = _OURS) -> Strategy:
        """What runs the best plan, for ``Trainer(strategy=...)``.

        Raises:
            ValueError: an unknown name, no plan, or one that this runtime does not run; the text names those that do.
            MisconfigurationException: deepspeed is asked for and not installed.
        """
        return self._ours() if runtime == _OURS else self.peer(runtime, _PEERS)

    def peer(self, runtime: str, kinds: Mapping[str, type[Strategy]], **further: Any) -> Strategy:
        """One of Lightning's own, or what is derived from it.

        Args:
            runtime: "ddp", "fsdp" or "deepspeed".
            kinds: its class.
            **further: arguments that the plan does not tell.

        Raises:
            ValueError: as for `strategy`.
        """
        arguments = self._peer(runtime)["init_args"]
        if runtime == "fsdp" and self.units:
            arguments = {**arguments, "auto_wrap_policy": set(self.units)}
        return kinds[runtime](**arguments, **further)

    def trainer_arguments(self, runtime: str = _OURS) -> dict[str, Any]:
        """All that the plan says of the Trainer: strategy, devices, nodes, precision, accumulation.

        Raises:
            ValueError: as for `strategy`.
        """
        choice, strategy = self.best, self.strategy(runtime)
        found = trainer_arguments(choice.job, choice.plan.split, type(strategy).__name__)
        if runtime == _OURS:
            found.pop("accumulate_grad_batches", None)  # the strategy itself cuts batches
        return {"strategy": strategy, **found}

    def loader_batch_size(self, runtime: str = _OURS) -> int:
        """Sequences that the DataLoader has to yield to a replica: a micro-batch, unless the strategy cuts batches.

        Raises:
            ValueError: as for `strategy`.
        """
        split = self.best.plan.split
        if runtime == _OURS:
            return split.micro_batch * split.micro_batches(self.best.job)
        self._peer(runtime)
        return split.micro_batch

    def _ours(self) -> TensorPipelineStrategy:
        job, split = self.best.job, self.best.plan.split
        return TensorPipelineStrategy(
            tensor_parallel_size=split.tensor,
            pipeline_parallel_size=split.pipeline,
            micro_batches=split.micro_batches(job),
            # One stage has no order, whatever was given.
            schedule=split.schedule if split.pipeline > 1 else "1f1b",
            sequence_parallel=split.sequence_parallel,
            zero_stage=planned_zero(ZeroConfig(), split),
        )

    def _peer(self, runtime: str) -> dict[str, Any]:
        if runtime not in _PEERS:
            raise ValueError(f"runtime={runtime!r} is unknown; use {' or '.join(map(repr, (_OURS, *_PEERS)))}")
        job, split = self.best.job, self.best.plan.split
        found = peers(job, split)
        if runtime not in found:
            raise ValueError(
                f"{runtime} does not run the best plan, tensor {split.tensor} x pipeline {split.pipeline} x data "
                f"{split.data} with ZeRO stage {split.zero_stage}; use {' or '.join(map(repr, (_OURS, *found)))}, or "
                "plan with fixed={'tensor': 1, 'pipeline': 1, 'zero_stage': ...}, of which ddp runs stage 0, fsdp "
                "stages 2 and 3, and deepspeed stages 1 to 3"
            )
        return found[runtime]


def planned_for(strategy: Strategy) -> RunnableChoices | None:
    """What was planned for the run of a strategy: by itself, or by the one in whose place it is."""
    found = getattr(strategy, "choices", None)
    return found if isinstance(found, RunnableChoices) else None
