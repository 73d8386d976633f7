"""Glue: Lightning's own strategies as they go on with a trainer: what they would do otherwise is refused, or mended."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_parallel.strategies.deepspeed_engines import end_engine, is_engine
from lightning_parallel.strategies.fsdp_units import is_wrapped, unwrap
from lightning_parallel.strategies.lacking import refuse_monitors, what_lacks
from lightning_parallel.strategies.left_apart import (
    AFTER_AN_EXCEPTION,
    BetweenRuns,
    mark_left_apart,
    refuse_left_apart,
)

__all__ = ["SUCCEEDING", "lightning_name"]


class _Succeeding(Strategy):
    """Looks again once layers of `configure_model` are there, and at every later module of the trainer."""

    runtime: str

    def setup(self, trainer: Trainer) -> None:
        """Sets up for what it runs as a plain process would.

        Raises:
            ValueError: it would not, see `what_lacks` and `refuse_monitors`.
        """
        fits = trainer.state.fn == TrainerFn.FITTING
        lacks = what_lacks(self.runtime, trainer) if fits else ""
        if lacks:
            raise ValueError(
                f"the plan was left to Lightning's {self.runtime}, and now {lacks}; use "
                "AutoStrategy(runtime='lightning_parallel')"
            )
        super().setup(trainer)
        if fits:
            refuse_monitors(self, self.runtime)


class SucceedingDDP(_Succeeding, DDPStrategy):
    runtime = "ddp"


class _Sharding(_Succeeding):
    """Leaves weights in parts, of which it makes checkpoints between runs, too; its next run begins without them."""

    _guard: BetweenRuns | None = None
    _failed = False

    def connect(self, model: LightningModule) -> None:
        """Takes off a module what the last run left in it. Collective over the world.

        Raises:
            RuntimeError: a run with this module ended with an exception, or another trainer holds its parts.
        """
        if not self._failed:
            self._release()
        if self._guard is not None:
            self._guard.end()
        self._guard, self._failed = None, False
        refuse_left_apart(model)
        super().connect(model)

    def on_exception(self, exception: BaseException) -> None:
        """Nothing collective may follow."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """From now on the module's own state, that of shards, is not given out."""
        module = self.lightning_module
        if module is not None and self._leaves_shards():
            if self._failed:
                mark_left_apart(module, AFTER_AN_EXCEPTION)
            elif self._guard is None:
                self._guard = self._guarded(module)
        super().teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As ever, also between runs."""
        with self._lifted():
            return super().lightning_module_state_dict()

    def _leaves_shards(self) -> bool:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError

    def _guarded(self, module: LightningModule) -> BetweenRuns:
        raise NotImplementedError

    def _lifted(self) -> AbstractContextManager[None]:
        return nullcontext() if self._guard is None else self._guard.lifted()


class SucceedingDeepSpeed(_Sharding, DeepSpeedStrategy):
    """Up to ZeRO stage 2 the module is whole, and plain after a run; of stage 3 its engine computes with shards."""

    runtime = "deepspeed"

    def teardown(self) -> None:
        """Leaves a plain module, or one that its next run makes a new engine of."""
        if is_engine(self.model) and not self.zero_stage_3:
            end_engine(self.model)
        super().teardown()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As ever, also between runs."""
        with self._lifted():
            super().save_checkpoint(*args, **kwargs)

    def _leaves_shards(self) -> bool:
        return is_engine(self.model) and self.zero_stage_3

    def _release(self) -> None:
        if self._leaves_shards():
            end_engine(self.model)

    def _guarded(self, module: LightningModule) -> BetweenRuns:
        return BetweenRuns(module, _left("DeepSpeed", module), calls=False)


class SucceedingFSDP(_Sharding, FSDPStrategy):
    """Its units stay in the module after a run."""

    runtime = "fsdp"

    def _leaves_shards(self) -> bool:
        return is_wrapped(self.model)

    def _release(self) -> None:
        if self._leaves_shards():
            unwrap(self.model)

    def _guarded(self, module: LightningModule) -> BetweenRuns:
        return BetweenRuns(module, _left("FSDP", module), calls=True)


def _left(name: str, module: LightningModule) -> str:
    return (
        f"{name} left shards of the trained weights in {type(module).__name__}; go on with the same Trainer, save with "
        "Trainer.save_checkpoint or ModelCheckpoint, or train with AutoStrategy(runtime='lightning_parallel'), after "
        "which they are whole"
    )


SUCCEEDING: dict[str, type[Strategy]] = {
    "ddp": SucceedingDDP,
    "fsdp": SucceedingFSDP,
    "deepspeed": SucceedingDeepSpeed,
}


def lightning_name(strategy: Strategy) -> str:
    """Of the class of Lightning's own.

    >>> lightning_name(SucceedingDDP())
    'DDPStrategy'
    """
    return next(kind.__name__ for kind in type(strategy).__mro__ if kind.__module__.startswith("lightning.pytorch."))
