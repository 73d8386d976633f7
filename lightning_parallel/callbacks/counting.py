"""Glue: how many tokens and samples all replicas have seen, each counted once whatever the strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.pipeline.batch import batch_size
from lightning_parallel.scaling.checks import COUNTS, check_range
from lightning_parallel.scaling.runs import why_unwritable
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.base import PartitionedStrategy

__all__ = [
    "BatchCounter",
    "CountingCallback",
    "StepTokens",
    "TokenCallback",
    "count_candidate",
    "count_parameters",
    "count_tokens",
    "last_step",
    "log_interval",
    "num_replicas",
    "refuse_unwritable",
    "sum_over_replicas",
]

FLAT_SHARDS = ("DeepSpeedStrategy", "FSDPStrategy")
TOKEN_KEYS = ("input_ids", "tokens", "labels")


def count_tokens(batch: Any) -> int:
    """Tokens of a batch: those of its ids, padding included, since padding costs the same arithmetic.

    Args:
        batch: whole numbers (B, T), a tuple that starts with them, or a mapping with "input_ids", "tokens" or "labels".

    Raises:
        ValueError: no such tensor, as with images or masks; then a function of the batch is needed.
    """
    ids = batch
    if isinstance(batch, Mapping):
        ids = next((batch[key] for key in TOKEN_KEYS if key in batch), None)
    elif isinstance(batch, Sequence) and len(batch) > 0:
        ids = batch[0]
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool or ids.dim() != 2:
        raise ValueError(
            f"cannot tell the number of tokens of a batch of type {type(batch).__name__}; pass a function of the "
            "batch, for example tokens_fn=lambda batch: batch['input_ids'].numel()"
        )
    return ids.numel()


def log_interval(trainer: Trainer) -> int:
    """Optimizer steps between logged values, at least 1."""
    return max(1, int(getattr(trainer, "log_every_n_steps", 1)))


def last_step(trainer: Trainer) -> float | None:
    """The optimizer step after which the Trainer ends a run by itself; infinite if never, None if nobody knows."""
    if trainer.max_epochs != -1 and _accumulation_changes(trainer):
        return None
    steps = trainer.estimated_stepping_batches
    return None if steps < 0 else float(steps)  # negative: epochs of data without a size


def _accumulation_changes(trainer: Trainer) -> bool:
    """The Trainer estimates its steps by the accumulation of the present epoch."""
    found = (c for c in _compat.callbacks_of(trainer) if isinstance(c, GradientAccumulationScheduler))
    return any(len(set(scheduler.scheduling.values())) > 1 for scheduler in found)


def num_replicas(trainer: Trainer) -> int:
    """Number of groups of ranks that see samples of their own."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if trainer.world_size > 1 else None
    return int(sampler["num_replicas"]) if sampler else 1


def sum_over_replicas(trainer: Trainer, *values: float) -> list[float]:
    """Adds whole numbers of every replica up; what the ranks of one replica share counts once. Collective."""
    if trainer.world_size == 1:
        return list(values)
    strategy = trainer.strategy
    numbers = torch.tensor(values, dtype=torch.float64)
    if isinstance(strategy, PartitionedStrategy):
        comm.all_reduce_(numbers, strategy.mesh.data_control)
        return numbers.tolist()
    total = strategy.reduce(numbers.to(strategy.root_device), reduce_op="sum")
    assert isinstance(total, Tensor), "a strategy reduces tensors to tensors"
    return (total / (trainer.world_size // num_replicas(trainer))).tolist()


def refuse_twins(trainer: Trainer, callback: Callback) -> None:
    """Raises ValueError if another callback of the trainer logs and saves under the same names."""
    if any(other is not callback and other.state_key == callback.state_key for other in _compat.callbacks_of(trainer)):
        raise ValueError(
            f"two {type(callback).__name__} callbacks write under the same names, of which only one would be kept; "
            "leave out one of them"
        )


def refuse_unwritable(trainer: Trainer, file: Path, columns: Sequence[str] = ()) -> None:
    """Raises ValueError on every rank if rank 0 cannot write a file, or add rows of these columns to it.

    Before the run and not after it.
    """
    reason = trainer.strategy.broadcast(why_unwritable(file, columns) if trainer.is_global_zero else "")
    if reason:
        raise ValueError(reason)


def makes_flat_shards(trainer: Trainer) -> bool:
    """Whether the strategy replaces parameters by shards without their sizes, also in a class derived from it."""
    return any(cls.__name__ in FLAT_SHARDS for cls in type(trainer.strategy).__mro__)


def whole_size(trainer: Trainer, module: LightningModule) -> int:
    """Parameters of the whole model while it trains, whatever part of it this rank holds."""
    strategy = trainer.strategy
    split = strategy.num_parameters if isinstance(strategy, PartitionedStrategy) else 0
    return split or count_parameters(module)


def count_parameters(module: LightningModule) -> int:
    """Parameters of a module that is whole.

    Raises:
        ValueError: the model has none, or its parameters are not materialized.
    """
    total = sum(p.numel() for p in module.parameters() if not isinstance(p, torch.nn.UninitializedParameter))
    if total == 0:
        raise ValueError(
            f"{type(module).__name__} has no parameters to count yet; build its layers in __init__ or configure_model, "
            "or pass params=..."
        )
    return total


def count_candidate(module: LightningModule, sizes: Mapping[str, Any]) -> int:
    """Parameters that the module would have with other hyperparameters, built without memory."""
    candidate = copy.deepcopy(module)
    candidate.hparams.update(sizes)
    with torch.device("meta"):
        candidate.configure_model()
    return count_parameters(candidate)


class BatchCounter:
    """Counts batches of this replica between calls of `take`, and knows the model's size.

    A batch is told when it begins, so that a checkpoint that another callback saves at its end holds it already.

    Args:
        params: parameters of the whole model; counted if None.
        tokens_fn: tokens of a batch; `count_tokens` if None.
    """

    def __init__(self, params: float | None = None, tokens_fn: Callable[[Any], int] | None = None) -> None:
        if params is not None:
            check_range("params", params, COUNTS, "124e6; leave it out to have them counted")
        if tokens_fn is not None and not callable(tokens_fn):
            raise ValueError(
                f"tokens_fn={tokens_fn!r} must be a function of a batch, such as lambda batch: batch.numel()"
            )
        self._given = params
        self.params = params
        self.tokens_fn = tokens_fn or count_tokens
        self._counted = [0, 0]
        self._running = [0, 0]
        self._unbuilt: LightningModule | None = None

    def forget(self) -> None:
        """Another fit begins, perhaps of another model; what an earlier one left over does not count."""
        self.params, self._unbuilt = self._given, None
        self._counted, self._running = [0, 0], [0, 0]

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Counts parameters if the user did not say how many there are."""
        if self.params is None and self._unbuilt is not None:
            self.params = self._count_unbuilt(module)
        elif self.params is None:
            self.params = whole_size(trainer, module)

    def look_ahead(self, module: LightningModule) -> None:
        """Counts a module that is still whole; of one that is not built yet it keeps a copy to build."""
        if self.params is not None:
            return
        if next(module.parameters(), None) is None:
            self._unbuilt = copy.deepcopy(module)
        else:
            self.params = count_parameters(module)

    def _count_unbuilt(self, module: LightningModule) -> int:
        """By now the hyperparameters of the module are final, whoever chose them."""
        assert self._unbuilt is not None, "asked for a copy that was kept"
        try:
            return count_candidate(self._unbuilt, module.hparams)
        except Exception as error:  # the user's code, on a device that it may not expect
            raise ValueError(
                f"the strategy keeps the parameters of {type(module).__name__} as shards that cannot be counted, and "
                f"building it on the meta device to count them fails ({error}); pass params= or flops_per_token="
            ) from error

    @property
    def size(self) -> float:
        """Parameters of the whole model."""
        if self.params is None:
            raise RuntimeError("parameters are counted when training starts")
        return self.params

    def begin(self, batch: Any) -> None:
        """A batch of this replica begins; one that began before and did not finish was skipped."""
        tokens = self.tokens_fn(batch)
        if isinstance(tokens, bool) or not isinstance(tokens, Integral) or tokens < 0:
            raise ValueError(f"tokens_fn returned {tokens!r}; it must return a whole number of tokens, such as numel()")
        self._running = [int(tokens), batch_size(batch) or 0]

    def skip(self) -> None:
        """A batch that began and did not end is not going to be trained on."""
        self._running = [0, 0]

    def finish(self) -> None:
        """The batch was trained on."""
        self._counted = [a + b for a, b in zip(self._counted, self._running, strict=True)]
        self._running = [0, 0]

    def take(self, trainer: Trainer) -> tuple[float, float]:
        """(tokens, samples) of all replicas since the last call, the present batch included. Collective."""
        self.finish()
        tokens, samples = sum_over_replicas(trainer, *self._counted)
        self._counted = [0, 0]
        return tokens, samples


class StepTokens:
    """Counts the tokens of the first optimizer step of a run, where batches show theirs.

    Args:
        tokens_fn: tokens of a batch; `count_tokens` if None, and batches without visible tokens are not counted.
    """

    def __init__(self, tokens_fn: Callable[[Any], int] | None = None) -> None:
        self._counter = BatchCounter(tokens_fn=tokens_fn)
        self._may_fail = tokens_fn is None
        self._step: int | None = None
        self._unknown = 0

    def start(self, trainer: Trainer) -> None:
        """A run begins."""
        self._counter.forget()
        self._step, self._unknown = trainer.global_step, 0

    def begin(self, batch: Any) -> None:
        """A batch of this replica begins."""
        if self._step is None:
            return
        try:
            self._counter.begin(batch)
        except ValueError:
            if not self._may_fail:
                raise
            self._unknown = 1

    def end(self, trainer: Trainer) -> float | None:
        """Tokens of all replicas when the first step is over; None before, after, and if they cannot be told."""
        self._counter.finish()
        if self._step is None or trainer.global_step == self._step:
            return None
        self._step = None
        tokens, _ = self._counter.take(trainer)
        return None if sum_over_replicas(trainer, self._unknown)[0] else tokens


class CountingCallback(Callback):
    """A callback that counts what every training batch holds.

    A run that starts at step 0 starts from nothing, also if an earlier one was counted by the same object.
    """

    _counter: BatchCounter

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begins anew, and counts parameters ahead where the strategy is going to make flat shards of them.

        Raises:
            ValueError: another callback logs and saves under the same names.
        """
        if stage != "fit":
            return
        refuse_twins(trainer, self)
        self._counter.forget()
        if makes_flat_shards(trainer):
            self._counter.look_ahead(pl_module)
        if trainer.global_step == 0:
            self.restart()

    def restart(self) -> None:
        """Forgets what an earlier run added up."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Looks at this replica's batch."""
        self._counter.begin(batch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets a batch at which the module ended its epoch, by returning -1 when it began."""
        self._counter.skip()


class TokenCallback(CountingCallback):
    """A callback that knows how many tokens all replicas have seen, also across a resume."""

    tokens: float

    def restart(self) -> None:
        """No token was seen yet."""
        self.tokens = 0.0

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Tokens of all replicas go into the checkpoint."""
        self.tokens += self._counter.take(trainer)[0]
        checkpoint["callbacks"][self.state_key] = {"tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from the tokens of the checkpoint."""
        self.tokens = state_dict["tokens"]
