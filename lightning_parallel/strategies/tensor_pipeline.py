"""Glue: the Lightning strategy that trains an unmodified module over tensor x pipeline x data ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.gradient_sync import GradientCompleter
from lightning_parallel.mesh import gradient_group
from lightning_parallel.parameters import ParameterTag
from lightning_parallel.pipeline.batch import split_batch
from lightning_parallel.pipeline.runtime import PipelineRuntime
from lightning_parallel.random_streams import StepRandom
from lightning_parallel.strategies import _compat, metric_states
from lightning_parallel.strategies._compat_example import example_before_resuming, example_training_batch
from lightning_parallel.strategies._compat_loops import before_transfer, has_training_data
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
from lightning_parallel.strategies.gradient_readers import looks_at_gradients
from lightning_parallel.strategies.kept_streams import refuse_lost
from lightning_parallel.strategies.optimizers import (
    KnownOptimizers,
    check_steps,
    refuse_foreign_parameters,
    refuse_optimizers,
    refuse_step,
    refuse_unshardable,
)
from lightning_parallel.strategies.parted import PartedState, mark_parted, take_parts
from lightning_parallel.strategies.partition import Partition, make_partition, synchronize_start
from lightning_parallel.strategies.precision import derive_precision
from lightning_parallel.strategies.refusals import (
    refuse_callbacks,
    refuse_embeddings,
    refuse_loggers,
    refuse_module,
    refuse_shared_memory,
)
from lightning_parallel.strategies.report import layout_tables
from lightning_parallel.strategies.sharding import ReplicaSharding
from lightning_parallel.strategies.span import ModelSpan
from lightning_parallel.strategies.stepping import SteppingStrategy
from lightning_parallel.strategies.steps import StepOptions, StepRunner
from lightning_parallel.strategies.trial import StepTrial
from lightning_parallel.strategies.unfinished import UnfinishedGradients
from lightning_parallel.zero.sharder import ZeroSharder

__all__ = ["TensorPipelineStrategy"]


class TensorPipelineStrategy(SteppingStrategy):
    """Tensor x pipeline x data parallel training of an unmodified LightningModule.

    Layers are split over tensor ranks as in Megatron-LM (Shoeybi et al. 2019), blocks over pipeline stages that run
    1F1B (Narayanan et al. 2021), and what remains of the world are data replicas. Loss, gradients, logged values and
    checkpoints are those of one plain process on the same global batch.

    Args:
        tensor_parallel_size: ranks that share each layer. "auto" splits the devices of one node as evenly as possible
            between tensor and pipeline, tensor first, or takes the planner's layout (see `even_or_planned`).
        pipeline_parallel_size: number of pipeline stages.
        micro_batches: parts that each rank's batch is split into; "auto" is 4 per stage.
        schedule: "1f1b", "gpipe", or "zero-bubble" (Qi et al. 2024, ZB-H1), which computes gradients of weights where
            stages would wait.
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
        self._set_aside = []

    @property
    def micro_batches(self) -> int:
        """Parts of a training batch: as configured or planned, and once divided by a `MicroBatchSizer`, as it does."""
        if self._runner is None:
            return self.pipeline_config.micro_batches_for(self.layout.pipeline)
        return self._runner.options.micro_batches

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
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_embeddings(module, self.layout.data, micro_batches)
        zero = self.zero_config.shards_anything(self.layout.data)
        if self.layout.tensor > 1 or self.layout.pipeline > 1 or zero:
            refuse_shared_memory(module)
        sharing = self.layout.data if self.zero_config.shards_parameters(self.layout.data) else 1
        refuse_callbacks(trainer, self.layout.tensor * self.layout.pipeline * sharing)
        refuse_loggers(trainer, self.layout.tensor * self.layout.pipeline * sharing)
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
        batch, goes_on = self._look_at_data(trainer)
        if goes_on:
            refuse_lost(batch, self._look_at_data(trainer)[0])
        with self._random_state_kept():
            self._replica_data.require_batch(batch)
            batch = before_transfer(trainer, self.precision_plugin.convert_input(batch))
            return self.batch_to_device(batch)

    def _look_at_data(self, trainer: Trainer) -> tuple[Any, bool]:
        with self._random_state_kept():
            if _compat.is_resuming(trainer):
                return example_before_resuming(trainer)
            return example_training_batch(trainer), False

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

        def check(tags: Mapping[str, ParameterTag], names: Mapping[int, str]) -> None:
            optimizers = self.optimizers if step_name == "training_step" else []
            refuse_foreign_parameters(optimizers, names, self.layout.data)
            refuse_optimizers(optimizers, tags, names, self.layout.tensor * self.layout.pipeline)
            if self.zero_config.shards_anything(self.layout.data):
                refuse_unshardable(optimizers, self.layout.data)

        stays = self.zero_config.shards_parameters(self.layout.data)
        configs = (self.tensor_config, self.pipeline_config)
        partition = make_partition(module, self.mesh, *configs, step, batch, check, stays)
        self._partition = partition
        if step_name == "training_step":
            self._trained = partition
            for optimizer in self.optimizers:
                partition.adopt_optimizer(optimizer, has_parts=take_parts(optimizer, self._kind_of_parts(partition)))
            self._sharding = self._shard_replicas(trainer, partition)
            if self.mesh.model is not None:
                ranks = self.layout.tensor * self.layout.pipeline
                self._known_optimizers = KnownOptimizers(self.optimizers, partition.tags, partition.names, ranks)
        elif self.zero_config.stage == 3:
            self._shard_replicas(trainer, partition)
        self._span = self._make_span(partition)
        self.precision_plugin = derive_precision(self.precision_plugin, self._span)
        self._runner = self._make_runner(trainer, module, partition)
        partition.split_copies(_compat.module_copies(trainer))
        metric_states.confine_metrics(module, self.mesh.data)
        self._span.hidden = self._sight.hidden
        self._sight.open(trainer, partition, self.optimizers)
        self._report.show(layout_tables(self.layout, partition, self._runner.options, module, self.zero_config))

    def _kind_of_parts(self, partition: Partition) -> Hashable:
        """What has to agree for two runs to divide an optimizer's state in the same way; files are not kept for one."""
        if self.zero_config.offload == "nvme":
            return object()
        names = (*partition.local_parameters, *partition.tags)
        return self.layout, self.zero_config, self.bucket_bytes, names

    def _close_optimizers(self) -> None:
        partition = self._trained
        if partition is not None and (self._sharding is not None or not partition.shards.is_whole):
            for optimizer in self.optimizers:
                partition.release_optimizer(optimizer)
                if not isinstance(optimizer.state, PartedState):
                    mark_parted(optimizer, self.world_size, self._kind_of_parts(partition))

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
        elif partition is self._trained and (group := gradient_group(mesh)) is not None:
            average = not module.automatic_optimization
            runner.reducer = GradientReducer(local.values(), group, self.bucket_bytes, average)
        completer = GradientCompleter(local, partition.tags, mesh)
        if not completer.is_empty:
            if not module.automatic_optimization:
                runner.hooks = completer.hook_every_backward()
            elif sharding is None:
                runner.completer = completer
        if runner.reducer is not None and self.layout.data > 1:
            self._watch_gradients(runner, runner.reducer, module)
        return runner

    def _watch_gradients(
        self, runner: StepRunner, reducer: GradientReducer | ZeroSharder, module: LightningModule
    ) -> None:
        """What user code does to gradients, or takes for them, must not be one replica's."""
        if not runner.adds_up_in_shards and looks_at_gradients(module.trainer):
            runner.unfinished = UnfinishedGradients(self._split_module().local_parameters, reducer.keeps)

        def check(optimizer: torch.optim.Optimizer) -> None:
            refuse_step(reducer, optimizer, module, self.layout.data)

        if not module.automatic_optimization:
            runner.hooks += check_steps(self.optimizers, check)

    def _ready(self, step_name: str, batch: Any) -> StepRunner:
        """The runner; splits the module at the first evaluation step if that had to wait for a batch."""
        if self._runner is None:
            parts = split_batch(batch, self.pipeline_config.evaluation_micro_batches)
            self._split(self._module(), step_name, lambda: parts[0])
        return self._running()
