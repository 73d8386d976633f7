"""Glue: what every strategy of the package does alike: layout and groups, whose samples, reductions, the end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from lightning_parallel import comm
from lightning_parallel.layout import ParallelLayout
from lightning_parallel.mesh import Mesh, build_mesh
from lightning_parallel.strategies import _compat, metric_states
from lightning_parallel.strategies._compat_loops import agree_in_loops, stage_limit
from lightning_parallel.strategies.config import SizeOrAuto, check_flag
from lightning_parallel.strategies.even_split import even_or_planned
from lightning_parallel.strategies.failures import FailureWatch
from lightning_parallel.strategies.hooks import agree_on_epoch_end
from lightning_parallel.strategies.left_apart import AFTER_AN_EXCEPTION, AS_ASKED_FOR, refuse_left_apart
from lightning_parallel.strategies.optimizers import KnownOptimizers, refuse_step
from lightning_parallel.strategies.parted import reading_parts
from lightning_parallel.strategies.partition import Partition
from lightning_parallel.strategies.predictions import PredictionGatherer
from lightning_parallel.strategies.refusals import refuse_data, refuse_objects, refuse_options
from lightning_parallel.strategies.replica_data import ReplicaData
from lightning_parallel.strategies.report import LayoutReport
from lightning_parallel.strategies.samples import SampleCounter, refuse_unlike_shares
from lightning_parallel.strategies.sharding import ReplicaSharding
from lightning_parallel.strategies.sight import Sight
from lightning_parallel.strategies.span import ModelSpan
from lightning_parallel.strategies.steps import StepRunner
from lightning_parallel.strategies.surroundings import note_surroundings

__all__ = ["PartitionedStrategy"]


def _nothing() -> None:
    return None


class PartitionedStrategy(DDPStrategy):
    """Base of the strategies that train a part of the user's module on each rank.

    Launchers, process group, barriers and votes are those of Lightning's DDPStrategy; no module is wrapped.

    Args:
        tensor_parallel_size: ranks that share each layer, or "auto".
        pipeline_parallel_size: number of stages, or "auto".
        restore_weights: gather the trained weights into the module on every rank when the trainer is done.
        **kwargs: as for Lightning's DDPStrategy.

    Raises:
        ValueError: an option is not understood.
    """

    def __init__(
        self,
        tensor_parallel_size: SizeOrAuto,
        pipeline_parallel_size: SizeOrAuto,
        restore_weights: bool,
        **kwargs: Any,
    ) -> None:
        refuse_options(kwargs, type(self), list(inspect.signature(type(self)).parameters)[:-1])
        check_flag("restore_weights", restore_weights)
        super().__init__(**kwargs)
        note_surroundings()
        self._sizes = (tensor_parallel_size, pipeline_parallel_size)
        self.restore_weights = restore_weights
        self._mesh: Mesh | None = None
        self._partition: Partition | None = None
        self._trained: Partition | None = None  # what the optimizers were split with
        self._runner: StepRunner | None = None
        self._report = LayoutReport()
        self._span: ModelSpan | None = None
        self._sharding: ReplicaSharding | None = None
        self._sight = Sight()
        self._release_hooks: Callable[[], None] = _nothing
        self._training_samples = SampleCounter(1, 0)
        self._evaluation_samples = SampleCounter(1, 0)
        self._predictions = PredictionGatherer()
        self._seed = 0
        self._epoch = -1
        self._known_optimizers: KnownOptimizers | None = None
        self._failed = False
        self._watch = FailureWatch()

    # -------------------------------------------------------------- who and where
    @property
    def mesh(self) -> Mesh:
        """Groups and place of this rank.

        Raises:
            RuntimeError: processes have not started yet.
        """
        if self._mesh is None:
            raise RuntimeError("the mesh exists once the trainer has started its processes, for example in setup()")
        return self._mesh

    @property
    def layout(self) -> ParallelLayout:
        """Sizes of the dimensions, after "auto" was resolved."""
        return self.mesh.layout

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were left out because a gradient was not finite (with `non_finite="skip"`)."""
        return 0 if self._span is None else self._span.skipped_steps

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, each counted once; 0 before it was split."""
        return 0 if self._partition is None else sum(tag.numel for tag in self._partition.tags.values())

    @property
    def is_distributed(self) -> bool:
        """Tells Lightning to give each replica its own samples."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samples are divided among replicas: every rank of a replica sees the same ones."""
        return {"num_replicas": self.layout.data, "rank": self.mesh.data_rank}

    def _trainer(self) -> Trainer:
        return self._module().trainer

    def _module(self) -> LightningModule:
        module = self.lightning_module
        if module is None:
            raise RuntimeError("the trainer connects its module before it calls the strategy")
        return module

    def _split_module(self) -> Partition:
        if self._partition is None:
            raise RuntimeError("the module is split in setup(), before anything that needs its parts")
        return self._partition

    @property
    def _is_split(self) -> bool:
        return self._partition is not None and not self._partition.restored

    # -------------------------------------------------------------- processes and data
    def set_world_ranks(self) -> None:
        """Tells the environment who this process is.

        Raises:
            ValueError: the sizes do not fit the world, said before any process starts.
        """
        super().set_world_ranks()
        ParallelLayout.choose(self.num_nodes * self.num_processes, self.num_processes, *self._sizes)

    def setup_environment(self) -> None:
        """Starts the process group and makes the groups of the layout."""
        refuse_objects(self._trainer())
        refuse_left_apart(self._module())
        super().setup_environment()
        if self._mesh is None:
            self._mesh = build_mesh(self._choose_layout(), self.root_device, self._timeout)
            self._seed = comm.broadcast_object(torch.initial_seed() % 2**62, 0, self._mesh.world)
        self._start_watch()
        _compat.remember_loaders(self._trainer())
        self._replica_data = ReplicaData(self.mesh, self._sight)
        agree_in_loops(self._trainer(), self._replica_data if self.layout.data > 1 else None)
        self._training_samples = SampleCounter(self.layout.data, self.mesh.data_rank)
        self._evaluation_samples = SampleCounter(self.layout.data, self.mesh.data_rank)

    def _choose_layout(self) -> ParallelLayout:
        even = ParallelLayout.choose(self.world_size, self.num_processes, *self._sizes)
        return even_or_planned(self, even, self._sizes)

    def _start_watch(self) -> None:
        environment = self.cluster_environment
        if environment is None:
            raise RuntimeError("the trainer gives the strategy its cluster environment before processes start")
        single_machine = self.world_size == self.num_processes
        # Lightning's script launcher runs in the first process of a machine and kills all when a child ends first.
        is_child = self.local_rank > 0 and not environment.creates_processes_externally
        main_address = None if single_machine else environment.main_address
        self._watch.start(self._trainer(), self.mesh, main_address, is_child and self._start_method == "popen")

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for every rank of the world."""
        self._sight.meet()
        self._watch.check_collective("a barrier")
        # Lightning installs its own handler after `setup`; the barrier before the first step comes next.
        self._watch.take_sigterm()
        super().barrier(*args, **kwargs)

    def on_train_start(self) -> None:
        """From the first batch on, all ranks leave an epoch together, whichever rank's hook asks for it."""
        vote = partial(self.reduce_boolean_decision, all=False)
        self._release_hooks()  # a search for a learning rate starts the training twice
        self._release_hooks = agree_on_epoch_end(self._module(), vote)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """All ranks agree here on the batch with which they stop after SIGTERM."""
        self._watch.training_step()

    def process_dataloader(self, dataloader: object) -> object:
        """Keeps the order that a plain run would have: nothing is shuffled but what the user's loader shuffles."""
        trainer = self._trainer()
        original = _compat.take_original_loader(trainer, dataloader)
        self._replica_data.refuse_missing(dataloader, *stage_limit(trainer))
        if not isinstance(dataloader, DataLoader):
            return dataloader
        refuse_unlike_shares(dataloader, self.mesh)
        sampler = dataloader.sampler
        if original is not None and sampler is not original.sampler and not trainer.predicting:
            if self.layout.data == 1 and not isinstance(original.sampler, RandomSampler):
                dataloader = original
            elif isinstance(sampler, DistributedSampler) and not isinstance(original.sampler, RandomSampler):
                sampler.shuffle = False
        if trainer.training:
            refuse_data(dataloader, self.layout.data)
        _compat.seed_workers(dataloader, self.mesh.data_rank)
        return dataloader

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Modules are built on the CPU, or on the meta device with `empty_init`, and get their device when split."""
        place = torch.device("meta") if empty_init else nullcontext()
        with place, self.precision_plugin.tensor_init_context():
            yield

    def _apply_sync_batchnorm(self, module: LightningModule) -> None:
        if self._layer_sync is not None and self.mesh.data is not None:
            nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group=self.mesh.data)

    def on_validation_start(self) -> None:
        """A new pass over the validation data begins."""
        self._evaluation_samples.start()

    def on_test_start(self) -> None:
        """A new pass over the test data begins."""
        self._evaluation_samples.start()

    def on_predict_start(self) -> None:
        """A new pass over the prediction data begins."""
        self._predictions.start()

    def gather_predictions(self, predictions: Sequence[Any] | None) -> list[Any]:
        """What `Trainer.predict` returns in one process, on every rank. Collective over the replicas.

        To be called on every rank after `Trainer.predict`. Sample i of the data is predicted by replica i modulo the
        number of replicas; tensors and lists with one entry per sample are put in the order of the data again.

        Args:
            predictions: what `Trainer.predict` returned on this rank: one entry per batch, or a list per dataloader.

        Returns:
            The same structure with the batches of all replicas, on the CPU.

        Raises:
            ValueError: there are no predictions, or the replicas did not share out the samples among them (own
                samplers, iterable datasets).
        """
        return self._predictions.gather(predictions, self.mesh)

    # -------------------------------------------------------------- steps
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the closure and the optimizer on this rank's part."""
        reducer = None if self._runner is None else self._runner.reducer
        with self._sight.hidden():
            optimizer = args[0] if args else kwargs["optimizer"]
            if reducer is not None and self.layout.pipeline == 1:
                refuse_step(reducer, optimizer, self._module(), self.layout.data)
            if self._known_optimizers is not None:
                self._known_optimizers.check(optimizer)
            return super().optimizer_step(*args, **kwargs)

    def full_params(self) -> AbstractContextManager[None]:
        """Inside, parameters that replicas share are whole on every rank, and changes to them count.

        To be entered on every rank, which all make the same changes. Takes the memory of the whole model.
        """
        return self._sight.full()

    # -------------------------------------------------------------- reductions
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s object, on every rank of the world."""
        self._sight.meet()
        return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces over the replicas unless a group is given: what every rank of a replica holds counts once.

        This is what `self.log(sync_dist=True)` outside of steps comes to. The argument is left alone.
        """
        self._sight.meet()
        if group is not None or not isinstance(tensor, torch.Tensor):
            return super().reduce(tensor, group, reduce_op)
        if self.mesh.data is None:
            return tensor
        # The mean of whole numbers (of samples, of batches) is not one: in their own dtype it would be cut off.
        as_float = reduce_op in ("mean", "avg") and not tensor.is_floating_point()
        return super().reduce(tensor.double() if as_float else tensor.clone(), self.mesh.data, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """A vote of every rank of the world."""
        self._sight.meet()
        vote = torch.tensor(int(decision), device="cpu")
        comm.all_reduce_(vote, self.mesh.world_control, "min" if all else "max")
        return bool(vote)

    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        """Stacks the tensors of every replica, in order, unless a group other than the world is given.

        As everywhere in Lightning, a single one is returned without an additional dimension.
        """
        self._sight.meet()
        if sync_grads and self._sharding is not None:
            self._sharding.sharder.graph_communicates = True
        if group is not None and group is not self.mesh.world:
            return super().all_gather(tensor, group, sync_grads)
        return tensor if self.mesh.data is None else super().all_gather(tensor, self.mesh.data, sync_grads)

    # -------------------------------------------------------------- end
    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks, which may be anywhere: nothing collective may follow."""
        self._failed = True
        self._watch.tell(exception)
        super().on_exception(exception)

    def _close_optimizers(self) -> None:
        """The run is over, and the module whole again: what optimizers keep is not."""

    def teardown(self) -> None:
        """Puts the plain module back, with the trained weights on every rank.

        Raises:
            SIGTERMException: a rank received SIGTERM when no step was left to stop at.
        """
        self._release_hooks()
        self._release_hooks = _nothing
        self._sight.close(meets=not self._failed)
        if self._runner is not None:
            self._runner.close()
        if self._sharding is not None and self._failed:
            self._sharding.discard()
        if self._is_split:
            metric_states.release_metrics(self._split_module().module, self.mesh.data)
            reason = AFTER_AN_EXCEPTION if self._failed else "" if self.restore_weights else AS_ASKED_FOR
            self._split_module().restore(reason)
        self._runner = None
        self._epoch = -1
        with _compat.unmovable_left_alone(self), reading_parts(*self.optimizers):
            super().teardown()
        self._close_optimizers()
        late_sigterm = not self._failed and self._watch.finish()
        self._watch.close(self._failed)
        if late_sigterm:
            raise SIGTERMException
