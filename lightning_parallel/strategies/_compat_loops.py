"""Glue: private names of Lightning's loops, beside those in `_compat`."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop, _PredictionLoop, _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_parallel.strategies._compat import result_owner
from lightning_parallel.strategies.replica_data import Batch, Logged, ReplicaData
from lightning_parallel.strategies.samples import divides_evenly

__all__ = [
    "agree_in_loops",
    "batches_behind",
    "before_transfer",
    "evaluation_position",
    "has_training_data",
    "skips_backward",
    "stage_limit",
]


def before_transfer(trainer: Trainer, batch: Any) -> Any:
    """What the module's or the datamodule's `on_before_batch_transfer` makes of a batch."""
    return trainer.lightning_module._on_before_batch_transfer(batch)


def has_training_data(trainer: Trainer) -> bool:
    """Whether the run will train at all."""
    return trainer.limit_train_batches != 0


def stage_limit(trainer: Trainer) -> tuple[str, float]:
    """Name of the running stage in the trainer's options, and its limit of batches."""
    stage = trainer.state.stage
    prefix = "train" if stage is None or stage.dataloader_prefix is None else stage.dataloader_prefix
    return prefix, getattr(trainer, f"limit_{prefix}_batches")


def skips_backward(trainer: Trainer) -> bool:
    """Whether the epoch only runs forward: weight averaging has BatchNorm see the data once more at the end."""
    return bool(trainer.fit_loop._skip_backward)


# ------------------------------------------------------------------------------------------------ where a loop stands
def evaluation_position(trainer: Trainer, name: str, args: tuple[Any, ...]) -> tuple[int, int, Any]:
    """Where the running validation, test or prediction step stands.

    Args:
        trainer: the trainer.
        name: of the step.
        args: what the loop passes to the step: the batch, the batch index if the step takes one, and the dataloader
            index if there are several.

    Returns:
        (batch index, dataloader index, dataloader).
    """
    owner: Any = trainer.predict_loop if name == "predict_step" else result_owner(trainer)
    loaders = owner._combined_loader.flattened
    takes_batch_idx = is_param_in_hook_signature(getattr(trainer.lightning_module, name), "batch_idx", min_args=2)
    numbers = args[1:]
    if takes_batch_idx and numbers:
        batch_idx, loader_idx, *_ = (*numbers, 0)
    else:
        loader_idx = numbers[0] if numbers and isinstance(numbers[0], int) else 0
        before = _limits(owner)[:loader_idx]
        batch_idx = owner.batch_progress.current.ready - 1 - sum(before)
    return batch_idx, loader_idx, loaders[loader_idx] if loader_idx < len(loaders) else None


def _limits(owner: Any) -> list[Any]:
    limits = owner.max_batches
    return limits if isinstance(limits, list) else [limits] * owner.num_dataloaders


def batches_behind(trainer: Trainer) -> int:
    """Batches of this epoch that an interrupted run took, and that the training dataloader does not give again.

    Loaders without a state begin anew, as Lightning warns.
    """
    return trainer.fit_loop.batch_idx if isinstance(trainer.train_dataloader, _Stateful) else 0


# ------------------------------------------------------------------------------------------------ decisions
def agree_in_loops(trainer: Trainer, data: ReplicaData | None = None) -> None:
    """Makes decisions of the loops the same on every rank.

    Any rank may set `trainer.should_stop`, in any hook. It is voted on after the hooks of every training batch, after
    validation, and around epochs, so that all ranks leave the loop where a single process would. Validation after some
    time begins when the first clock says so. With one replica, values are global wherever they are logged.

    Args:
        trainer: whose loops are told.
        data: looks after replicas whose data may have different numbers of batches; None if there is one replica.
    """
    fit = trainer.fit_loop
    epoch = fit.epoch_loop
    owners: list[Any] = [trainer._logger_connector, fit, epoch, epoch.val_loop]
    kinds: list[type] = [_VotingConnector, _VotingFitLoop, _VotingEpochLoop, _VotingValidation]
    if data is not None:
        owners += [trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
        kinds = [_ReplicaConnector, _VotingFitLoop, _ReplicaEpochLoop, _ReplicaValidation]
        kinds += [_ReplicaEvaluation, _ReplicaEvaluation, _ReplicaPrediction]
    plain = (_LoggerConnector, _FitLoop, _TrainingEpochLoop, _EvaluationLoop, _PredictionLoop)
    for owner, kind in zip(owners, kinds, strict=True):
        if type(owner) in plain:
            owner.__class__ = kind
        owner.replica_data = data
    if data is None:
        for loop in (epoch, epoch.val_loop, trainer.validate_loop, trainer.test_loop):
            loop._results.__class__ = _ReplicaResults


def _vote(trainer: Trainer) -> None:
    trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)


class _ReplicaResults(_ResultCollection):
    """Of a single replica, whose ranks log the same in their hooks: nothing is to reduce, and nothing to advise."""

    def log(self, *args: Any, **options: Any) -> None:
        if not options.get("sync_dist"):
            options = {**options, "sync_dist": True, "sync_dist_fn": None}
        super().log(*args, **options)


class _VotingConnector(_LoggerConnector):
    def on_batch_end(self) -> None:
        # Between the hooks of a batch and the first look at the flag, which decides about logging.
        if self.trainer.training:
            _vote(self.trainer)
        super().on_batch_end()


class _VotingEpochLoop(_TrainingEpochLoop):
    def _broadcast_sigterm_tensor(self) -> None:
        # Lightning's makes every host wait for its device before each batch. Ranks that are watched need not ask.
        trainer: Any = self.trainer
        strategy = trainer.strategy
        if not strategy._watch.is_active and strategy.reduce_boolean_decision(trainer.received_sigterm, all=False):
            raise SIGTERMException

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        decision = super()._should_check_val_fx(data_fetcher)
        trainer: Any = self.trainer
        if trainer._val_check_time_interval is not None:  # a matter of each rank's own clock
            decision = trainer.strategy.reduce_boolean_decision(decision, all=False)
        return decision


class _VotingValidation(_EvaluationLoop):
    def run(self) -> Any:
        outputs = super().run()
        _vote(self.trainer)
        return outputs


class _VotingFitLoop(_FitLoop):
    def run(self) -> None:
        _vote(self.trainer)
        super().run()

    def on_run_start(self) -> None:
        super().on_run_start()
        _vote(self.trainer)

    def on_advance_start(self) -> None:
        super().on_advance_start()
        _vote(self.trainer)

    def on_advance_end(self) -> None:
        super().on_advance_end()
        _vote(self.trainer)


# ------------------------------------------------------------------------------------------------ batches of replicas
class _ReplicaConnector(_VotingConnector):
    replica_data: ReplicaData

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        # Before the batch: what is the last one decides about gradients that accumulate.
        trainer = self.trainer
        if trainer.training:
            state = Batch.LAST if trainer.is_last_batch else Batch.MORE_FOLLOW
            state = Batch.NOTHING if batch is None else state
            self.replica_data.agree_on_batch(state, trainer.fit_loop.batch_idx + 1)
        super().on_batch_start(batch, dataloader_idx)


class _ReplicaEpochLoop(_VotingEpochLoop):
    replica_data: ReplicaData

    def advance(self, data_fetcher: Any) -> None:
        number = self.batch_progress.current.ready
        try:
            super().advance(data_fetcher)
        except StopIteration:
            if self.batch_progress.current.ready == number:  # others may have a batch, and ask about this one
                self.replica_data.agree_on_batch(Batch.ABSENT, number + 1)
            raise


def _has_batch(fetcher: Any) -> bool:
    return bool(getattr(fetcher, "batches", ())) or not fetcher.done


class _ReplicaEvaluation(_EvaluationLoop):
    replica_data: ReplicaData
    taken: list[int]
    added_up: int

    def on_run_start(self) -> None:
        self.taken, self.added_up = [0] * (self.num_dataloaders if self._is_sequential else 1), 0
        self.replica_data.agree_to_start("test" if self.trainer.testing else "val", _has_batch(self._data_fetcher))
        super().on_run_start()

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, *args: Any) -> None:
        index = dataloader_idx if self._is_sequential else 0
        self._add_up(index)
        self.taken[index] += 1
        super()._evaluation_step(batch, batch_idx, dataloader_idx, *args)

    def _store_dataloader_outputs(self) -> None:
        results: Any = self.trainer._results
        self._add_up(1 + (results.dataloader_idx or 0))
        super()._store_dataloader_outputs()

    def on_run_end(self) -> Any:
        self._add_up(len(self.taken))
        return super().on_run_end()

    def _add_up(self, stop: int) -> None:
        """Up to a dataloader, in order and each of them once: replicas may have skipped one that is empty there."""
        strategy: Any = self.trainer.strategy
        loaders: Any = self._combined_loader
        for index in range(self.added_up, stop):
            self.added_up = index + 1
            place = index if self._is_sequential and self.num_dataloaders > 1 else None
            evenly = divides_evenly(loaders.flattened[index], strategy.layout.data)
            fx = "test_step" if self.trainer.testing else "validation_step"
            logged = Logged(self.trainer._results, fx, place, strategy.sync_logs)
            self.replica_data.add_up(index, self.taken[index], evenly, logged)


class _ReplicaValidation(_ReplicaEvaluation, _VotingValidation):
    pass


class _ReplicaPrediction(_PredictionLoop):
    replica_data: ReplicaData

    def on_run_start(self) -> None:
        self.replica_data.agree_to_start("predict", _has_batch(self._data_fetcher))
        super().on_run_start()
