"""Glue: the strategy that asks the planner for its layout when it knows the module and the devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import nn

from lightning_parallel import comm
from lightning_parallel.commands.answer import show_parts, standard_console
from lightning_parallel.commands.modules import ASSUMED_SEQ, shape_of_module, tells_seq
from lightning_parallel.commands.plan_text import plan_text
from lightning_parallel.layout import ParallelLayout
from lightning_parallel.mesh import Mesh, whole_world
from lightning_parallel.planner.choose import Choice, Choices, choose, last_resort
from lightning_parallel.planner.given import no_layout_text, refuse_unknown
from lightning_parallel.planner.hardware import Cluster, find_gpu
from lightning_parallel.planner.job import RECOMPUTES
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.chosen import RunnableChoices
from lightning_parallel.strategies.config import LossConfig, ZeroConfig
from lightning_parallel.strategies.lacking import what_lacks
from lightning_parallel.strategies.lacking_sharded import block_classes
from lightning_parallel.strategies.left_apart import refuse_left_apart
from lightning_parallel.strategies.planning import (
    PlannedPipeline,
    device_memory,
    device_name,
    host_memory,
    planned_gpu,
    planned_zero,
    recomputation,
    why_not,
    zero_cases,
)
from lightning_parallel.strategies.refusals import refuse_objects
from lightning_parallel.strategies.successor import simplest, succeed
from lightning_parallel.strategies.tensor_pipeline import TensorPipelineStrategy

__all__ = ["AutoStrategy"]

RUNTIMES = ("auto", "lightning_parallel")


class AutoStrategy(TensorPipelineStrategy):
    """Trains over the fastest layout of tensor, pipeline and data ranks, with the ZeRO stage, that the planner finds.

    The plan is made and printed when processes have started and the module is known, from the same facts on every
    rank. Sizes that are given are kept. Adam's states are reckoned with, whatever `configure_optimizers` will return.

    Args:
        memory_gib: memory of one device in GiB; the device is asked if None, which a CPU cannot answer.
        gpu: name of the device in the planner's catalogue; recognised if None.
        batch_size: sequences that the loader yields to a replica; that of the loader given to `fit`, `validate`, `test`
            or `predict`, or the attribute `batch_size` of module, hyperparameters or datamodule, if None.
        shape: sizes of the model; read off the module if None, which needs its layers to be built in `__init__`.
        seq: tokens per sequence; learned positions or the transformers configuration tell if 0.
        recompute: what the model itself recomputes in its backward pass: "none", "selective" or "full". If None, "full"
            for a transformers model with gradient checkpointing switched on.
        zero_stage: to fix it, and with a `ZeroConfig` also where states lie and what gradients are; of stage 3, an
            offload moves the parameters, too.
        runtime: who runs the plan. "auto" leaves it to a strategy of Lightning's own where that suffices (see
            `simplest` and `what_lacks`) and at most 5% is lost by it: DDP for replicas of the whole model, on GPUs
            FSDP for sharded ones and DeepSpeed for offload. "lightning_parallel" runs every plan itself, so that logged
            values, odd last batches and unused parameters are treated alike whatever is planned.
        **kwargs: as for `TensorPipelineStrategy`.

    Raises:
        ValueError: an option is not understood. When processes have started: the module's sizes cannot be read, a fact
            is missing, or no layout fits; the text names what would help.
    """

    def __init__(
        self,
        memory_gib: float | None = None,
        gpu: str | None = None,
        batch_size: int | None = None,
        shape: ModelShape | None = None,
        seq: int = 0,
        recompute: str | None = None,
        zero_stage: int | ZeroConfig | None = None,
        runtime: str = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(zero_stage=zero_stage or 0, **kwargs)
        if runtime not in RUNTIMES:
            raise ValueError(f"runtime={runtime!r} is unknown; use {' or '.join(map(repr, RUNTIMES))}")
        if memory_gib is not None and not (isinstance(memory_gib, int | float) and 0 < memory_gib < math.inf):
            raise ValueError(f"memory_gib={memory_gib!r} is not the memory of a device; use GiB, such as 80")
        if batch_size is not None:
            _check_count("batch_size", batch_size, least=1)
        _check_count("seq", seq, least=0)
        if not isinstance(shape, ModelShape | None):
            raise ValueError(f"shape={shape!r} is no ModelShape; use lightning_parallel.planner.model_shape.ModelShape")
        if recompute is not None and recompute not in RECOMPUTES:
            raise ValueError(f"recompute={recompute!r} is unknown; use {' or '.join(map(repr, RECOMPUTES))}")
        self.memory_gib = memory_gib
        self.gpu = None if gpu is None else find_gpu(gpu)
        self.batch_size = batch_size
        self.shape = shape
        self.seq = seq
        self.recompute = recompute
        self.runtime = runtime
        # What is asked for in these words is to be found here only.
        is_general = self.loss_config == LossConfig() and not isinstance(zero_stage, ZeroConfig)
        self._may_be_left = runtime == "auto" and is_general
        self._fixed_zero: dict[str, Any] = {} if zero_stage is None else {"zero_stage": self.zero_config.stage}
        if self.zero_config.offload is not None:
            self._fixed_zero["offload"] = self.zero_config.offload
        self.choices: RunnableChoices | None = None
        self._successor = ""

    @property
    def choice(self) -> Choice:
        """What was planned.

        Raises:
            RuntimeError: processes have not started yet.
        """
        if self.choices is None:
            raise RuntimeError(
                "the plan is made in the trainer's processes once they have started, for example in setup()"
            )
        return self.choices.best

    @staticmethod
    def plan(
        module: nn.Module,
        cluster: Cluster,
        batch_size: int,
        precision: str = "32-true",
        shape: ModelShape | None = None,
        fixed: Mapping[str, Any] | None = None,
        gradient_dtype: str = "float32",
    ) -> RunnableChoices:
        """What the strategy would choose, without a trainer, a process or a weight, and what runs it.

        States go to host memory, which the cluster may bound, where nothing fits without; give "offload" to decide.

        Args:
            module: the model, best built on the meta device; its sizes are read off it.
            cluster: the devices.
            batch_size: sequences that the loader yields to a replica.
            precision: as for the Trainer.
            shape: sizes of the model, instead of the module's.
            fixed: fields of `planner.job.Candidate` that are given.
            gradient_dtype: see `ZeroConfig`.

        Raises:
            ValueError: a field or value in ``fixed`` that no candidate has, or sizes that do not fill the devices.
        """
        _check_count("batch_size", batch_size, least=1)
        given = dict(fixed or {})
        refuse_unknown(given)
        found = shape or shape_of_module(module)
        cases = partial(zero_cases, found, cluster, batch_size, precision, gradient_dtype=gradient_dtype)
        chosen = choose(cases(given), why_not)
        if "offload" not in given and not cluster.gpu.is_host:
            moved = {**given, "offload": "cpu"}
            chosen = last_resort(chosen, cases(moved), why_not)
        if not chosen.ranked and not chosen.rejected:
            raise ValueError(no_layout_text(cluster, given))
        return RunnableChoices(**vars(chosen), units=block_classes(module))

    @property
    def mesh(self) -> Mesh:
        """Groups and place of this rank.

        Raises:
            RuntimeError: processes have not started yet, or the plan was left to a strategy of Lightning's own.
        """
        if self._successor:
            raise RuntimeError(
                f"Lightning's {self._successor} runs the plan and has no such layout; "
                "use AutoStrategy(runtime='lightning_parallel')"
            )
        return super().mesh

    def setup_environment(self) -> None:
        """Starts the process group and plans; makes the groups of the layout, or leaves the trainer to a successor."""
        if self._may_be_left and self._mesh is None:
            refuse_objects(self._trainer())
            refuse_left_apart(self._module())
            DDPStrategy.setup_environment(self)
            self.choices = self._planned({})
            left = self._left_to_lightning(self.choices)
            if left is not None:
                choice, runtime = left
                self.choices = self.choices.led_by(choice)
                order = "the simplest first, then the fastest"
                _print(self.choices, self._assumed(), order)
                self._successor = succeed(self._trainer(), self.choices, runtime)
                return
        super().setup_environment()

    def _left_to_lightning(self, choices: RunnableChoices) -> tuple[Choice, str] | None:
        """What a strategy of Lightning's own is to run, and which; None if nothing, with a word on why if one could."""
        replicas = {"tensor": 1, "pipeline": 1, "micro_batch": self._batch()}
        fixed = self._fixed(self._module())
        if not choices.ranked or any(fixed.get(name, size) != size for name, size in replicas.items()):
            return None
        precision = str(self.precision_plugin.precision)
        found = simplest(choices, self._planned(replicas), self.root_device.type, precision)
        told = "" if found is None else what_lacks(found[1], self._trainer())
        # A callback or a logger may be the first rank's alone.
        lacks = next(filter(None, comm.gather_objects(told, whole_world())), "")
        if found is not None and lacks:
            rank_zero_info(f"lightning_parallel: this package runs the plan, and not Lightning's {found[1]}: {lacks}")
        return None if lacks else found

    def _choose_layout(self) -> ParallelLayout:
        """Takes over what the planner says."""
        if self.choices is None:
            self.choices = self._planned({})
        self._adopt(self.choice)
        _print(self.choices, self._assumed())
        return super()._choose_layout()

    def _planned(self, sizes: Mapping[str, int]) -> RunnableChoices:
        """Asks the planner, with sizes beside those that the user fixed. Collective over the world."""
        module = self._module()
        memory = self._device_memory()
        facts = comm.gather_objects((device_name(self.root_device), memory, host_memory()), whole_world())
        names = dict.fromkeys(name for name, _, _ in facts)
        if len(names) > 1:
            raise ValueError(
                f"ranks have different devices ({', '.join(names)}); plan for one kind, or name it by gpu="
            )
        least, host = (min(fact[kind] for fact in facts) for kind in (1, 2))
        gpu = planned_gpu(self.root_device, least) if self.gpu is None else replace(self.gpu, memory_gib=least)
        shape = self.shape or _read_shape(module, self.seq)
        cluster = Cluster(gpu, self.num_processes, self.num_nodes, host_gib=host)
        precision = str(self.precision_plugin.precision)
        sums = self.zero_config.gradient_dtype
        fixed = {**self._fixed(module), **sizes}
        # As if the last micro-batch were as large as the others, which is what the planner knows.
        batch = -(-self._batch() // fixed.get("micro_batch", 1)) * fixed.get("micro_batch", 1)
        return self.plan(module, cluster, batch, precision, shape, fixed, sums)

    def _assumed(self) -> list[str]:
        """What neither the user nor the module tells."""
        found = []
        if self.shape is None and not self.seq and not tells_seq(self._module()):
            text = "tokens per sequence are assumed: the module does not tell; give AutoStrategy(seq=...)"
            found.append(f"{ASSUMED_SEQ} {text}")
        if self.batch_size is None and self._run() != "fit":
            text = (
                "is planned as if it trained, and is kept for a later fit; give AutoStrategy(batch_size=...) for that"
            )
            found.append(f"batches of {self._batch()} as {self._run()} reads them: the layout {text}")
        return found

    def _adopt(self, choice: Choice) -> None:
        split = choice.plan.split
        self._sizes = (split.tensor, split.pipeline)
        self.tensor_config = replace(self.tensor_config, size=split.tensor)
        self.pipeline_config = PlannedPipeline.of(self.pipeline_config, split.pipeline, split.micro_batches(choice.job))
        self.zero_config = planned_zero(self.zero_config, split)

    def _fixed(self, module: nn.Module) -> dict[str, Any]:
        tensor, pipeline = self._sizes
        sizes = {"tensor": tensor, "pipeline": pipeline}
        recompute = self.recompute or recomputation(module)
        fixed: dict[str, Any] = {
            "sequence_parallel": self.tensor_config.sequence_parallel,
            "recompute": recompute,
            **self._fixed_zero,
        }
        fixed |= {name: size for name, size in sizes.items() if size != "auto"}
        fixed["schedule"] = self.pipeline_config.schedule
        if not self._module().automatic_optimization:
            fixed |= {"pipeline": 1, "micro_batch": self._batch()}
        elif self.pipeline_config.micro_batches != "auto":
            fixed["micro_batch"] = -(-self._batch() // self.pipeline_config.micro_batches)
        return fixed

    def _batch(self) -> int:
        size = self.batch_size or _compat.batch_size_of(self._trainer(), self._run())
        if size is None:
            raise ValueError(
                "the planner needs to know how many sequences a batch has: pass batch_size=8 to AutoStrategy, or keep "
                "it as `batch_size` in the module, its hyperparameters or the datamodule"
            )
        return size

    def _run(self) -> str:
        """The trainer's method that runs: `fit`, `validate`, `test` or `predict`."""
        run = self._trainer().state.fn
        return "fit" if run is None else run.value

    def _device_memory(self) -> float:
        memory = self.memory_gib if self.memory_gib is not None else device_memory(self.root_device)
        if memory is None:
            raise ValueError(
                f"a {self.root_device.type} does not say how much memory a process may use: pass "
                "strategy=lightning_parallel.AutoStrategy(memory_gib=4)"
            )
        return memory


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} does not count anything; use a whole number of at least {least}")


def _read_shape(module: nn.Module, seq: int) -> ModelShape:
    try:
        return shape_of_module(module, seq=seq)
    except ValueError as error:
        raise ValueError(
            f"the sizes of {type(module).__name__} cannot be read off it ({error}); build its layers in __init__, or "
            "pass AutoStrategy(shape=ModelShape(...)) with those of lightning_parallel.planner.model_shape"
        ) from error


@rank_zero_only
def _print(choices: Choices, assumed: list[str], order: str = "fastest first") -> None:
    told = {"assumed": assumed, "order": order, "listing": "AutoStrategy.choices.data()"}
    show_parts(plan_text({**choices.data(), **told}), standard_console())
