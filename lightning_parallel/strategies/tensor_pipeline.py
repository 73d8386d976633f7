"""Glue: the Lightning strategy that trains an unmodified module over tensor x pipeline x data ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.gradient_sync import GradientCompleter
from lightning_parallel.pipeline.batch import split_batch
from lightning_parallel.pipeline.runtime import PipelineRuntime
from lightning_parallel.random_streams import StepRandom
from lightning_parallel.strategies import _compat, metric_states
from lightning_parallel.strategies._compat_loops import (
    before_transfer,
    evaluation_position,
    has_training_data,
    skips_backward,
)
from lightning_parallel.strategies.config import (
    LossConfig,
    LossWeight,
    PipelineConfig,
    SizeOrAuto,
    TensorParallelConfig,
    ZeroConfig,
    check_count,
    check_flag,
)
from lightning_parallel.strategies.optimizers import refuse_optimizers
from lightning_parallel.strategies.partition import Partition, make_partition, synchronize_start
from lightning_parallel.strategies.precision import derive_precision
from lightning_parallel.strategies.refusals import refuse_module
from lightning_parallel.strategies.report import report_layout
from lightning_parallel.strategies.samples import divides_evenly
from lightning_parallel.strategies.sharding import ReplicaSharding
from lightning_parallel.strategies.span import ModelSpan
from lightning_parallel.strategies.steps import StepOptions, StepRunner
from lightning_parallel.strategies.trial import StepTrial
from lightning_parallel.strategies.whole_checkpoints import WholeCheckpointStrategy

__all__ = ["TensorPipelineStrategy"]


class TensorPipelineStrategy(WholeCheckpointStrategy):
    """Tensor x pipeline x data parallel training of an unmodified LightningModule.

    Layers are split over tensor ranks as in Megatron-LM (Shoeybi et al. 2019), blocks over pipeline stages that run
    1F1B (Narayanan et al. 2021), and what remains of the world are data replicas. Loss, gradients, logged values and
    checkpoints are those of one plain process on the same global batch.

    Args:
        tensor_parallel_size: ranks that share each layer. "auto" splits the devices of one node as evenly as possible
            between tensor and pipeline, tensor first; a model that cannot run or fit so gets a planned layout.
        pipeline_parallel_size: number of pipeline stages.
        micro_batches: parts that each rank's batch is split into; "auto" is 4 per stage.
        schedule: "1f1b" or "gpipe".
        zero_stage: sharding over the replicas: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 (without tensor
            and pipeline parallelism) also parameters; or a `ZeroConfig`.
        sequence_parallel: also split activations between the split layers along the sequence (Korthikanti et al. 2022).
        plan: "auto", or pattern of module names -> style.
        blocks: "auto", or names (or one pattern) of the repeated blocks that may be spread over stages.
        loss_weight: how micro-batches and replicas of unequal content are combined: "samples", "valid_labels" (labels
            other than -100), or a function of the batch.
        non_finite: "ignore", "raise" or "skip" (counted in `skipped_steps`): what all ranks do together about
            gradients that are not finite.
        evaluation_micro_batches: parts of a batch in validation, test and prediction; 1 keeps every step whole.
        sync_logs: logged values are those of the global batch on every rank. False: each replica logs its own.
        restore_weights: gather the trained weights into the module on every rank when the trainer is done.
        bucket_bytes: size of the buckets in which gradients are reduced over replicas.
        process_group_backend: "gloo", "nccl", ...; chosen by device if None.
        timeout: how long a collective may wait.
        **kwargs: accelerator, devices, plugins and start_method, as for Lightning's DDPStrategy.

    Raises:
        ValueError: an option is not understood; sizes that do not fit the world are reported when processes start.
    """

    def __init__(  # noqa: PLR0913 - the names are the public contract; each group becomes a config dataclass at once
        self,
        tensor_parallel_size: SizeOrAuto = "auto",
        pipeline_parallel_size: SizeOrAuto = "auto",
        micro_batches: SizeOrAuto = "auto",
        schedule: str = "1f1b",
        zero_stage: int | ZeroConfig = 0,
        sequence_parallel: bool = False,
        plan: Literal["auto"] | Mapping[str, str] = "auto",
        blocks: str | Sequence[str] = "auto",
        loss_weight: LossWeight = "samples",
        non_finite: str = "ignore",
        evaluation_micro_batches: int = 1,
        sync_logs: bool = True,
        restore_weights: bool = True,
        bucket_bytes: int = 25 * 2**20,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        **kwargs: Any,
    ) -> None:
        super().__init__(
            tensor_parallel_size,
            pipeline_parallel_size,
            restore_weights,
            process_group_backend=process_group_backend,
            timeout=timeout,
            **kwargs,
        )
        check_flag("sync_logs", sync_logs)
        check_count("bucket_bytes", bucket_bytes)
        if timeout is not None and not isinstance(timeout, timedelta):
            raise ValueError(f"timeout={timeout!r} is not a duration; use datetime.timedelta(minutes=30)")
        self.tensor_config = TensorParallelConfig(tensor_parallel_size, plan, sequence_parallel)
        self.pipeline_config = PipelineConfig(
            pipeline_parallel_size, micro_batches, schedule, blocks, evaluation_micro_batches
        )
        self.zero_config = ZeroConfig.of(zero_stage)
        self.loss_config = LossConfig(loss_weight, non_finite)
        self.sync_logs = sync_logs
        self.bucket_bytes = bucket_bytes
        self._set_aside: list[tuple[nn.Parameter, torch.Tensor | None]] = []

    # -------------------------------------------------------------- set-up
    def setup(self, trainer: Trainer) -> None:
        """Splits the module for this rank and builds its optimizers."""
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        self._failed, self._partition, self._runner = False, None, None
        module = self._module()
        self.zero_config.refuse_layout(self.layout.tensor, self.layout.pipeline)
        micro_batches = self.pipeline_config.micro_batches_for(self.layout.pipeline)
        refuse_module(module, self.layout, micro_batches, self.pipeline_config.evaluation_micro_batches)
        self.precision_plugin.convert_module(module)
        self._apply_sync_batchnorm(module)
        synchronize_start(module, self.mesh, leaves_meta=self.zero_config.shards_parameters(self.layout.data))
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            if self._sharding is not None:
                self._sharding.discard()
            self._trained = self._sharding = None
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        if (fitting and has_training_data(trainer)) or self.layout.pipeline == 1:
            name = "training_step" if fitting else ""
            self._split(module, name, lambda: split_batch(self._example_batch(trainer), micro_batches)[0])
        self.setup_precision_plugin()
        if self._sharding is not None:
            self._sharding.redirect_zero_grad(module)

    def _example_batch(self, trainer: Trainer) -> Any:
        """A batch as `training_step` will see it."""
        with self._random_state_kept():
            batch = _compat.example_training_batch(trainer)
            self._replica_data.require_batch(batch)
            batch = before_transfer(trainer, self.precision_plugin.convert_input(batch))
            batch = self.batch_to_device(batch)
        if _compat.is_resuming(trainer):
            _compat.forget_training_data(trainer)
        return batch

    def trial(self) -> StepTrial:
        """Tries steps on this rank alone, once the module is split."""
        trainer = self._trainer()
        return StepTrial(trainer, self._split_module(), self._running(), self._sight, self._example_batch(trainer))

    @contextmanager
    def _random_state_kept(self) -> Generator[None, None, None]:
        with StepRandom(self._seed, 0, 0, self.root_device).scope("planning"):
            yield

    def _split(self, module: LightningModule, step_name: str, batch: Callable[[], Any]) -> None:
        """Plans and applies the split, and prepares everything that a step needs."""
        trainer = self._trainer()

        def step(clone: nn.Module, micro_batch: Any) -> Any:
            clone.trainer = trainer  # type: ignore[assignment]
            clone.train(step_name == "training_step")
            _compat.set_module_device(clone, next((p.device for p in clone.parameters()), self.root_device))
            with self._random_state_kept(), self.precision_plugin.forward_context():
                method = getattr(clone, step_name)
                arguments = _compat.step_arguments(method, micro_batch)
                return _compat.run_without_logging(clone, lambda: method(*arguments))  # type: ignore[arg-type]

        stays = self.zero_config.shards_parameters(self.layout.data)
        partition = make_partition(module, self.mesh, self.tensor_config, self.pipeline_config, step, batch, stays)
        self._partition = partition
        if step_name == "training_step":
            self._trained = partition
            ranks = self.layout.tensor * self.layout.pipeline
            refuse_optimizers(self.optimizers, partition.tags, partition.names, ranks)
            for optimizer in self.optimizers:
                partition.adopt_optimizer(optimizer)
            self._sharding = self._shard_replicas(trainer, partition)
        elif self.zero_config.stage == 3:
            self._shard_replicas(trainer, partition)
        self._span = self._make_span(partition)
        self.precision_plugin = derive_precision(self.precision_plugin, self._span)
        self._runner = self._make_runner(trainer, module, partition)
        partition.split_copies(_compat.module_copies(trainer))
        metric_states.confine_metrics(module, self.mesh.data)
        self._span.hidden = self._sight.hidden
        self._sight.open(trainer, partition, self.optimizers)
        report_layout(self.layout, partition, self._runner.options, module)

    def _shard_replicas(self, trainer: Trainer, partition: Partition) -> ReplicaSharding | None:
        """ZeRO over the replicas, if it was asked for and does something."""
        if not self.zero_config.shards_anything(self.layout.data):
            return None
        one_batch = self.pipeline_config.micro_batches_for(self.layout.pipeline) == 1
        return ReplicaSharding(
            partition,
            self.optimizers if partition is self._trained else [],
            trainer,
            self.zero_config,
            self.bucket_bytes,
            is_direct=self.layout.pipeline == 1 and one_batch,
            blocks=self.pipeline_config.blocks,
        )

    def _make_span(self, partition: Partition) -> ModelSpan:
        """Norms and votes over gradients where they are."""
        non_finite = self.loss_config.non_finite
        if self._sharding is not None and partition is self._trained:
            return self._sharding.span(self.mesh, partition, non_finite)
        return ModelSpan(self.mesh, partition.tags, partition.names, non_finite)

    def _make_runner(self, trainer: Trainer, module: LightningModule, partition: Partition) -> StepRunner:
        mesh = self.mesh
        random = StepRandom(self._seed, mesh.data_rank, mesh.stage, mesh.device)
        if partition.cut is not None:
            partition.cut.on_first_block = random.enter_blocks
        options = StepOptions(
            micro_batches=self.pipeline_config.micro_batches_for(self.layout.pipeline),
            evaluation_micro_batches=self.pipeline_config.evaluation_micro_batches,
            schedule=self.pipeline_config.schedule,
            loss_weight=self.loss_config.weight,
            sync_logs=self.sync_logs,
        )
        runner = StepRunner(trainer, module, mesh, PipelineRuntime(mesh, partition.cut), options)
        runner.random = random
        local = partition.local_parameters
        sharding = self._sharding if partition is self._trained else None
        if sharding is not None:
            runner.reducer = sharding.sharder
        elif mesh.data is not None:
            average = not module.automatic_optimization
            runner.reducer = GradientReducer(local.values(), mesh.data, self.bucket_bytes, average)
        completer = GradientCompleter(local, partition.tags, mesh)
        if not completer.is_empty:
            if not module.automatic_optimization:
                runner.hooks = completer.hook_every_backward()
            elif sharding is None:
                runner.completer = completer
        return runner

    def _ready(self, step_name: str, batch: Any) -> StepRunner:
        """The runner; splits the module at the first evaluation step if that had to wait for a batch."""
        if self._runner is None:
            parts = split_batch(batch, self.pipeline_config.evaluation_micro_batches)
            self._split(self._module(), step_name, lambda: parts[0])
        return self._running()

    def _running(self) -> StepRunner:
        if self._runner is None:
            raise RuntimeError("the module is split in setup(), before its first step")
        return self._runner

    # -------------------------------------------------------------- steps
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's training step; with a pipeline or micro-batches also every backward pass."""
        with self._sight.hidden():
            return self._train(args, kwargs)

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._module()
        runner = self._ready("training_step", args[0])
        trainer = self._trainer()
        if trainer.current_epoch != self._epoch:
            self._epoch = trainer.current_epoch
            self._training_samples.start()
        batch, counts = self._training_samples.keep_real(args[0], trainer.train_dataloader)
        rest = args[1:]

        def call(part: Any) -> Any:
            with self._sight.watched("training_step"), self.precision_plugin.train_step_context():
                return module.training_step(part, *rest, **kwargs)

        number = (trainer.fit_loop.total_batch_idx,)
        if runner.is_direct:
            return runner.train_direct(call, batch, counts, number)
        first = self._starts_window(trainer, rest)
        if first:
            self._put_gradients_aside()
        output = runner.train_schedule(call, batch, counts, number)
        if first:
            self._swap_gradients()
        return output

    @staticmethod
    def _starts_window(trainer: Trainer, rest: tuple[Any, ...]) -> bool:
        """Whether Lightning zeroes gradients between this training step and its backward pass."""
        return trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0 and not skips_backward(trainer)

    def _put_gradients_aside(self) -> None:
        """The previous step's gradients are still there: `on_before_zero_grad` may look at them."""
        visible = _compat.sees_old_gradients(self._trainer())
        self._running().forget_gradients()
        self._set_aside = []
        for p in self._split_module().local_parameters.values():
            self._set_aside.append((p, p.grad.clone() if visible and p.grad is not None else None))
            p.grad = None

    def _swap_gradients(self) -> None:
        """New gradients wait outside of the parameters until Lightning has zeroed the old ones."""
        waiting = [(p, p.grad) for p, _ in self._set_aside]
        for p, old in self._set_aside:
            p.grad = old
        self._set_aside = waiting

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs the backward pass between Lightning's hooks, or hands out the gradients that the schedule computed."""
        with self._sight.hidden():
            return self._backward(closure_loss, optimizer, *args, **kwargs)

    def _backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        module, runner = self._module(), self._running()
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if runner.is_direct:
            if runner.reducer is not None:
                runner.reducer.prepare()
                if runner.reduces_now:
                    runner.reducer.arm()
            if runner.manual_share is not None:
                closure_loss = closure_loss * runner.manual_share.to(closure_loss.dtype)
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            if runner.reduces_now:
                runner.finish_gradients()
        else:
            for p, new in self._set_aside:
                if new is not None:
                    p.grad = new if p.grad is None else new.add_(p.grad)
            self._set_aside = []
        runner.deliver_gradients()
        self._sight.note_backward(complete=runner.reduces_now)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning opens this around batches that only accumulate."""
        self._running().accumulating = True
        try:
            yield
        finally:
            self._running().accumulating = False

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's validation step, forward only through the pipeline."""
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's test step, forward only through the pipeline."""
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def _evaluate(self, name: str, context: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._module()
        runner = self._ready(name, args[0])
        batch_idx, loader_idx, loader = evaluation_position(self._trainer(), name, args)
        self._watch.evaluation_step(loader_idx, batch_idx)
        batch, counts = self._evaluation_samples.keep_real(args[0], loader, loader_idx)

        def call(part: Any) -> Any:
            with self._sight.watched(name, lockstep), context():
                return getattr(module, name)(part, *args[1:], **kwargs)

        lockstep = divides_evenly(loader, self.layout.data)
        with self._sight.hidden():
            return runner.evaluate(call, batch, counts, (name, batch_idx, loader_idx), lockstep)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's prediction step; every rank of a replica returns the result."""
        module = self._module()
        batch_idx, loader_idx, loader = evaluation_position(self._trainer(), "predict_step", args)
        self._watch.evaluation_step(loader_idx, batch_idx)
        runner = self._ready("predict_step", args[0])
        self._predictions.note(args[0], loader, loader_idx, self.layout.data)

        def call(part: Any) -> Any:
            with self._sight.watched("predict_step", False), self.precision_plugin.predict_step_context():
                return module.predict_step(part, *args[1:], **kwargs)

        with self._sight.hidden():
            return runner.predict(call, args[0], ("predict_step", *args[1:]))
