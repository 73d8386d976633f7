"""Glue: private names of Lightning's loops, beside those in `_compat`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_parallel.strategies._compat import result_owner

__all__ = [
    "agree_to_stop",
    "before_transfer",
    "ends_dataloader",
    "evaluation_position",
    "has_training_data",
    "skips_backward",
]


def before_transfer(trainer: Trainer, batch: Any) -> Any:
    """What the module's or the datamodule's `on_before_batch_transfer` makes of a batch."""
    return trainer.lightning_module._on_before_batch_transfer(batch)


def has_training_data(trainer: Trainer) -> bool:
    """Whether the run will train at all."""
    return trainer.limit_train_batches != 0


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


def ends_dataloader(trainer: Trainer, batch_idx: int, dataloader_idx: int) -> bool:
    """Whether an evaluation step is the last of its dataloader.

    Raises:
        ValueError: that cannot be told of every dataloader, because one without a length comes before another.
    """
    lengths = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
    endless = next((index for index, length in enumerate(lengths[:-1]) if length == float("inf")), None)
    if endless is not None:
        raise ValueError(
            f"evaluation dataloader {endless} of {len(lengths)} has no length, so that the replicas cannot tell when "
            "to add up what they logged for it. Give its dataset a __len__, put it last, or set limit_val_batches "
            "(limit_test_batches) to a number such as 100"
        )
    owner = result_owner(trainer)
    return batch_idx + 1 >= _limits(owner)[dataloader_idx] or bool(owner.batch_progress.is_last_batch)


def _limits(owner: Any) -> list[Any]:
    limits = owner.max_batches
    return limits if isinstance(limits, list) else [limits] * owner.num_dataloaders


# ------------------------------------------------------------------------------------------------ should_stop
def agree_to_stop(trainer: Trainer, replicas: int = 1) -> None:
    """Makes `trainer.should_stop` the same on every rank wherever the loops are about to look at it.

    Any rank may set it, in any hook. It is voted on after the hooks of every training batch, after validation, and
    around epochs, so that all ranks leave the loop where a single process would. Several replicas also tell each other
    before each training batch whether it is their last one: a replica that has more would wait for the others forever.
    """
    fit = trainer.fit_loop
    owners: list[Any] = [trainer._logger_connector, fit, fit.epoch_loop.val_loop]
    for owner, voting in zip(owners, (_VotingConnector, _VotingFitLoop, _VotingValidation), strict=True):
        if type(owner) is voting.__base__:
            owner.__class__ = voting
    if replicas > 1:
        trainer._logger_connector.__class__ = _ReplicaConnector


def _vote(trainer: Trainer) -> None:
    trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)


class _VotingConnector(_LoggerConnector):
    def on_batch_end(self) -> None:
        # Between the hooks of a batch and the first look at the flag, which decides about logging.
        if self.trainer.training:
            _vote(self.trainer)
        super().on_batch_end()


class _ReplicaConnector(_VotingConnector):
    def on_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        # Before the batch: what is the last one decides about gradients that accumulate.
        if self.trainer.training:
            ends, strategy = self.trainer.is_last_batch, self.trainer.strategy
            if strategy.reduce_boolean_decision(ends, all=False) and not strategy.reduce_boolean_decision(ends):
                number = self.trainer.fit_loop.batch_idx + 1
                raise ValueError(
                    f"the training data of some replicas ends with batch {number} of this epoch and that of others "
                    f"goes on; give every replica the same number of batches, for example limit_train_batches={number}"
                )
        return super().on_batch_start(*args, **kwargs)


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
