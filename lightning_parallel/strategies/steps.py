"""Glue: runs the user's training, validation, test and prediction steps on one rank of a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_parallel import comm
from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.gradient_sync import GradientCompleter
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.actions import Schedule
from lightning_parallel.pipeline.batch import batch_size, merge_outputs, split_batch
from lightning_parallel.pipeline.runtime import PipelineRuntime
from lightning_parallel.pipeline.schedules import build_schedule, forward_only_schedule
from lightning_parallel.pipeline.share import TreeBroadcast
from lightning_parallel.random_streams import StepRandom
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies._compat_loops import skips_backward
from lightning_parallel.strategies.gradient_readers import watched_passes
from lightning_parallel.strategies.logs import LogCall, LogRecorder, combine_calls, share_of_epoch
from lightning_parallel.strategies.precision import loss_scale
from lightning_parallel.strategies.step_state import StepState
from lightning_parallel.strategies.unfinished import UnfinishedGradients
from lightning_parallel.strategies.weights import ReplicaCombiner, evaluation_rule, global_loss, loss_weights
from lightning_parallel.zero.sharder import ZeroSharder
from lightning_parallel.zero.unit_sharder import UnitSharder

__all__ = ["StepOptions", "StepRunner"]


@dataclass(frozen=True)
class StepOptions:
    """Options of a `StepRunner`, already resolved to numbers."""

    micro_batches: int
    evaluation_micro_batches: int
    schedule: str
    loss_weight: str | Callable[[Any], Any]
    sync_logs: bool


class _Walk:
    """What the pipeline runtime calls back while it walks a schedule."""

    def __init__(self, runner: StepRunner, parts: Sequence[Any], run: Callable[[Any], Any]) -> None:
        self.runner = runner
        self.parts = parts
        self.run = run
        self.recorder = LogRecorder()
        self.scales: list[torch.Tensor] = []
        self.number: tuple[int | str, ...] = ()

    def forward(self, micro_batch: int) -> Any:
        self.recorder.start_micro_batch(self.parts[micro_batch])
        with self.runner.random_scope(*self.number, micro_batch):
            return self.run(self.parts[micro_batch])

    def backward(self, output: Any, micro_batch: int) -> torch.Tensor:
        loss = _loss_of(output)
        if loss is None:
            raise RuntimeError(
                f"training_step returned {type(output).__name__} without a scalar loss for a micro-batch; return a "
                "loss every time: skipping a step is not possible when several processes take part in it"
            )
        loss = loss * self.scales[micro_batch].to(loss.dtype)
        self.runner.start_backward(loss)
        return loss

    def before_last_backward(self) -> None:
        if self.runner.reduces_now and self.runner.reducer is not None:
            self.runner.reducer.arm()

    def reduce(self) -> None:
        if self.runner.reduces_now:
            self.runner.finish_gradients()


class StepRunner:
    """Runs steps of the user's module; owns everything that happens between the batch and complete gradients.

    Two ways: with one stage and one micro-batch the step's graph is handed to Lightning as usual ("direct"); otherwise
    the whole schedule, forward and backward, runs inside the training step.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, mesh: Mesh, runtime: PipelineRuntime, options: StepOptions
    ) -> None:
        self.trainer = trainer
        self.module = module
        self.mesh = mesh
        self.runtime = runtime
        self.options = options
        self.random: StepRandom | None = None
        self.reducer: GradientReducer | ZeroSharder | None = None
        self.completer: GradientCompleter | None = None
        self.hooks: list[Any] = []
        self.unfinished: UnfinishedGradients | None = None
        self.accumulating = False
        self.manual_share: torch.Tensor | None = None
        self._combine = ReplicaCombiner(mesh)
        self._share = TreeBroadcast(mesh)
        self._state = StepState(module, mesh)

    # -------------------------------------------------------------- small parts
    @property
    def is_direct(self) -> bool:
        """Whether training steps are handed to Lightning with their graph."""
        return self.mesh.layout.pipeline == 1 and self.options.micro_batches == 1

    @property
    def reduces_now(self) -> bool:
        """Whether gradients are complete after this batch: an optimizer step follows, or sums are kept in shards."""
        return not self.accumulating or self.adds_up_in_shards

    @property
    def adds_up_in_shards(self) -> bool:
        """Whether each batch's gradients are summed over replicas at once."""
        return isinstance(self.reducer, UnitSharder)

    @property
    def _synced(self) -> bool:
        """Whether values that a step logs are combined over replicas."""
        return self.mesh.data is not None and self.options.sync_logs

    def random_scope(self, *number: int | str) -> AbstractContextManager[None]:
        """Random streams of one micro-batch."""
        assert self.random is not None, "random streams are set before the first step"
        return self.random.scope(*number)

    def _run(self, schedule: Schedule, walk: _Walk) -> list[Any]:
        assert self.random is not None, "random streams are set before the first step"
        with self.random.kept():
            return self.runtime.run(schedule, walk)

    def start_backward(self, loss: torch.Tensor) -> None:
        """Backward pass of one micro-batch through the hooks a user may have overridden."""
        plugin = self.trainer.precision_plugin
        self.check_graph(loss)
        with watched_passes(self.module, self.runtime.cut):
            plugin.backward(loss_scale(plugin, loss), self.module, None)

    def check_graph(self, loss: torch.Tensor) -> None:
        """Before a backward pass: refuses functions that would not find their weights any more."""
        if isinstance(self.reducer, UnitSharder):
            self.reducer.refuse_kept(loss)

    def finish_gradients(self) -> None:
        """Waits until gradients are sums over replicas, tensor ranks and owners."""
        if self.reducer is not None:
            self.reducer.finish()
        if self.completer is not None:
            self.completer.complete()

    def deliver_gradients(self) -> None:
        """Gives optimizers the gradients that `finish_gradients` completed, once Lightning has zeroed the old ones."""
        if isinstance(self.reducer, ZeroSharder):
            self.reducer.deliver(self.reduces_now)
        if self.unfinished is not None and not self.reduces_now:
            self.unfinished.note()

    def start_batch(self) -> None:
        """Before a batch adds to the gradients: those of the last one must be as they were."""
        if self.unfinished is not None:
            self.unfinished.check()

    def forget_gradients(self) -> None:
        """Drops the previous step's gradients where they are not in parameters."""
        if isinstance(self.reducer, ZeroSharder):
            self.reducer.clear()

    def close(self) -> None:
        """Removes every hook from the parameters, which are the user's again."""
        if self.reducer is not None:
            self.reducer.close()
        for handle in self.hooks:
            handle.remove()
        self.hooks = []

    # -------------------------------------------------------------- training
    def train_direct(self, call: Callable[[Any], Any], batch: Any, counts: bool, number: tuple[int, ...]) -> Any:
        """One step on the whole batch; the returned loss is that of the global batch and carries the graph."""
        if self.mesh.data is not None and not self.module.automatic_optimization:
            self.manual_share = self._replica_share(batch, counts)
        recorder = LogRecorder()
        recorder.start_micro_batch(batch)
        with (
            _compat.logged_to(self.trainer, recorder) as collection,
            self._state.step(recorder, 1, self._synced, counts),
            self.random_scope("train", *number),
        ):
            output = _as_lightning_reads(call(batch))
        loss = _loss_of(output)
        calls = recorder.micro_batches[0]
        if self.mesh.data is not None and (self.options.sync_logs or self.module.automatic_optimization):
            weight = loss_weights([batch], self.options.loss_weight, counts, self.mesh.device)[0]
            value, total, merged = self._combine(loss, weight, calls if self.options.sync_logs else [], counts)
            calls = merged if self.options.sync_logs else calls
            if loss is not None and value is not None:
                share = weight / total
                graph = self.module.automatic_optimization
                output = _with_loss(output, global_loss(loss, value, share) if graph else value.to(loss.dtype))
        self._replay(collection, calls, recorder)
        return output

    def _replica_share(self, batch: Any, counts: bool) -> torch.Tensor:
        """What the losses of manual optimization are multiplied by, so that averages over replicas are global means.

        Averaged and not summed, because the user may accumulate over several backward passes: what has been averaged
        already stays as it is when it is averaged again.
        """
        weight = loss_weights([batch], self.options.loss_weight, counts, self.mesh.device)[0]
        total = weight.clone()
        comm.all_reduce_(total, self.mesh.data)
        return weight * self.mesh.layout.data / total

    def train_schedule(self, call: Callable[[Any], Any], batch: Any, counts: bool, number: tuple[int, ...]) -> Any:
        """Forward and backward of every micro-batch; gradients are in `.grad` afterwards, the loss has no graph."""
        parts = split_batch(batch, self.options.micro_batches)
        weights = loss_weights(parts, self.options.loss_weight, counts, self.mesh.device)
        walk = _Walk(self, parts, lambda part: _as_lightning_reads(call(part)))
        walk.number = ("train", *number)
        total = torch.stack(weights).sum()
        if self.mesh.data is not None:
            total = total.clone()
            comm.all_reduce_(total, self.mesh.data)
        walk.scales = [w / total / self.trainer.accumulate_grad_batches for w in weights]
        if self.reducer is not None:
            self.reducer.prepare()
        schedule = _schedule(self.options.schedule, self.mesh.layout.pipeline, len(parts))
        if skips_backward(self.trainer):
            schedule = _forward_schedule(self.mesh.layout.pipeline, len(parts))
        with (
            _compat.logged_to(self.trainer, walk.recorder) as collection,
            self._state.step(walk.recorder, len(parts), self._synced, counts) as before,
        ):
            outputs = self._run(schedule, walk)
        merged: Any = None
        if self.mesh.is_last_stage:
            output, calls = self._merge(outputs, parts, weights, walk.recorder)
            loss, _, calls = self._over_replicas(_loss_of(output), torch.stack(weights).sum(), calls, counts)
            merged = (_with_loss(output, loss), _pack(calls), walk.recorder.resets, self._state.changes(before))
        return self._distribute(collection, merged, walk.recorder, before)

    def _over_replicas(
        self, loss: torch.Tensor | None, weight: torch.Tensor, calls: list[LogCall], counts: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor, list[LogCall]]:
        value, total, merged = self._combine(loss, weight, calls if self.options.sync_logs else [], counts)
        if value is not None and loss is not None:
            value = value.to(loss.dtype)
        return value, total, merged if self.options.sync_logs else calls

    def _merge(
        self, outputs: list[Any], parts: Sequence[Any], weights: list[torch.Tensor], recorder: LogRecorder
    ) -> tuple[Any, list[LogCall]]:
        sizes = [batch_size(part) or 1 for part in parts]
        return merge_outputs(outputs, sizes, weights), combine_calls(recorder.micro_batches, weights)

    # -------------------------------------------------------------- evaluation
    def evaluate(
        self, call: Callable[[Any], Any], batch: Any, counts: bool, where: tuple[Any, ...], lockstep: bool
    ) -> Any:
        """One validation or test step, forward only.

        Args:
            call: runs the user's step on a micro-batch.
            batch: this rank's batch without repeated samples.
            counts: False if it only repeats samples that another replica counts.
            where: (name of the step, batch index, dataloader index).
            lockstep: whether every replica is known to take equally many steps.
        """
        parts = split_batch(batch, self.options.evaluation_micro_batches)
        rule = evaluation_rule(self.options.loss_weight, parts, lockstep and self._synced)
        weights = loss_weights(parts, rule, True, self.mesh.device)
        walk = _Walk(self, parts, call)
        walk.number = where
        with (
            _compat.logged_to(self.trainer, walk.recorder) as collection,
            self._state.step(walk.recorder, len(parts), self._synced and lockstep, counts) as before,
        ):
            outputs = self._run(_forward_schedule(self.mesh.layout.pipeline, len(parts)), walk)
        merged: Any = None
        if self.mesh.is_last_stage:
            output, calls = self._merge(outputs, parts, weights, walk.recorder)
            samples = sum(batch_size(part) or 1 for part in parts)
            calls = self._step_values(calls, torch.stack(weights).sum(), counts, lockstep, samples)
            merged = (output, _pack(calls), walk.recorder.resets, self._state.changes(before))
        return self._distribute(collection, merged, walk.recorder, before)

    def _step_values(
        self, calls: list[LogCall], weight: torch.Tensor, counts: bool, lockstep: bool, samples: int
    ) -> list[LogCall]:
        """Makes values that are shown per step global at once; values shown per epoch wait for its end.

        The message is sent whether or not anything is logged per step: replicas may differ in that.
        """
        shown = [call for call in calls if call.options["on_step"]]
        if lockstep and self._synced:
            weight = weight if counts else torch.zeros_like(weight)
            size = LogCall("", "samples", weight.new_full((), samples), None, samples, {"reduce_fx": "sum"})
            _, total, (*shown, size) = self._combine(None, weight, [*shown, size], counts)
            if self.options.loss_weight != "samples":
                calls = [share_of_epoch(call, weight / total, samples, size.value) for call in calls]
        counted = counts or (lockstep and self._synced)
        following = iter(shown)
        return [
            replace(next(following), counted=counted) if call.options["on_step"] else replace(call, counted=counts)
            for call in calls
        ]

    def predict(self, call: Callable[[Any], Any], batch: Any, where: tuple[Any, ...]) -> Any:
        """One prediction step; every rank of a replica returns its result."""
        parts = split_batch(batch, self.options.evaluation_micro_batches)
        walk = _Walk(self, parts, call)
        walk.number = where
        with self._state.step(walk.recorder, len(parts), False, True) as before:
            outputs = self._run(_forward_schedule(self.mesh.layout.pipeline, len(parts)), walk)
        merged: Any = None
        if self.mesh.is_last_stage:
            weights = loss_weights(parts, "samples", True, self.mesh.device)
            output = merge_outputs(outputs, [batch_size(p) or 1 for p in parts], weights)
            merged = (output, [], [], self._state.changes(before))
        return self._distribute(None, merged, walk.recorder, before)

    # -------------------------------------------------------------- logs
    def _distribute(self, collection: Any, merged: Any, recorder: LogRecorder, before: Any) -> Any:
        """Sends output, logs and changes of the module from the last stage to all, and replays the logs."""
        output, packed, resets, changes = self._share(merged)
        if not self.mesh.is_last_stage:
            self._state.repeat(before, changes)
            recorder.resets = resets
        self._replay(collection, _unpack(packed), recorder)
        return output

    def _replay(self, collection: Any, calls: Sequence[LogCall], recorder: LogRecorder) -> None:
        if collection is None:
            return
        for reset in recorder.resets:
            collection.reset(**reset)
        # Values are those of the whole replica or global batch already. "sync_dist" without a function reduces nothing,
        # and keeps Lightning from advising it.
        for call in calls:
            options = {**call.options, "sync_dist": True}
            value: Any = call.value
            if value is None:
                value = self.module.get_submodule(options["metric_attribute"])
            with nullcontext() if call.counted else _compat.sums_kept(collection):
                collection.log(call.fx, call.name, value, batch_size=call.size, **options)
            _compat.note_log(self.trainer, call.fx)


def _pack(calls: Sequence[LogCall]) -> list[tuple[Any, ...]]:
    return [(c.fx, c.name, c.value, c.weight, c.size, _Opaque((c.options, c.counted))) for c in calls]


def _unpack(packed: Sequence[tuple[Any, ...]]) -> list[LogCall]:
    return [LogCall(*entry[:-1], *entry[-1].value) for entry in packed]


@dataclass
class _Opaque:
    """Keeps options in one piece while a message is flattened."""

    value: tuple[dict[str, Any], bool]


def _as_lightning_reads(output: Any) -> Any:
    """What a training step returned, with any mapping as a dict and a loss of one element as a scalar."""
    if isinstance(output, Mapping):
        return {**output, "loss": _as_scalar(output["loss"])} if "loss" in output else dict(output)
    return _as_scalar(output)


def _as_scalar(loss: Any) -> Any:
    return loss.reshape(()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss


def _loss_of(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _with_loss(output: Any, loss: torch.Tensor | None) -> Any:
    if loss is None:
        return output
    return {**output, "loss": loss} if isinstance(output, dict) else loss


_schedule = lru_cache(maxsize=64)(build_schedule)
_forward_schedule = lru_cache(maxsize=64)(forward_only_schedule)
