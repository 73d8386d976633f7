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


class SucceedingDeepSpeed(_Succeeding, DeepSpeedStrategy):
    """Its engine stays with the module after a run, and makes the checkpoints; a later run begins without."""

    runtime = "deepspeed"
    _guard: BetweenRuns | None = None

    def connect(self, model: LightningModule) -> None:
        """Ends the engine of an earlier run, whose hooks would also take the gradients of this one."""
        if is_engine(self.model):
            end_engine(self.model)
        if self._guard is not None:
            self._guard.end()
            self._guard = None
        refuse_left_apart(model)
        super().connect(model)

    def teardown(self) -> None:
        """From now on the module's own state, of ZeRO stage 3 that of shards, is not given out."""
        module = self.lightning_module
        if module is not None and self._guard is None and is_engine(self.model):
            self._guard = BetweenRuns(module, _left(module, "DeepSpeed"), calls=False)
        super().teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As ever, also between runs."""
        with _lifted(self._guard):
            return super().lightning_module_state_dict()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As ever, also between runs."""
        with _lifted(self._guard):
            super().save_checkpoint(*args, **kwargs)


class SucceedingFSDP(_Succeeding, FSDPStrategy):
    """Its units stay in the module after a run, of which checkpoints are made; a later run begins with a whole one."""

    runtime = "fsdp"
    _guard: BetweenRuns | None = None
    _failed = False

    def connect(self, model: LightningModule) -> None:
        """Takes units of an earlier run out. Collective over the world.

        Raises:
            RuntimeError: a run with this module ended with an exception.
        """
        if self._has_units and not self._failed:
            unwrap(self.model)
        if self._guard is not None:
            self._guard.end()
        self._guard, self._failed = None, False
        refuse_left_apart(model)
        super().connect(model)

    @property
    def _has_units(self) -> bool:
        return is_wrapped(self.model)

    def on_exception(self, exception: BaseException) -> None:
        """Nothing collective may follow."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """From now on the module holds shards, which neither compute nor are given out."""
        module = self.lightning_module
        if module is not None and self._has_units:
            if self._failed:
                mark_left_apart(module, AFTER_AN_EXCEPTION)
            elif self._guard is None:
                self._guard = BetweenRuns(module, _left(module, "FSDP"), calls=True)
        super().teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As ever, also between runs."""
        with _lifted(self._guard):
            return super().lightning_module_state_dict()


def _left(module: LightningModule, name: str) -> str:
    return (
        f"{name} left shards of the trained weights in {type(module).__name__}; go on with the same Trainer, save with "
        "Trainer.save_checkpoint or ModelCheckpoint, or train with AutoStrategy(runtime='lightning_parallel'), after "
        "which they are whole"
    )


def _lifted(guard: BetweenRuns | None) -> AbstractContextManager[None]:
    return nullcontext() if guard is None else guard.lifted()


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
