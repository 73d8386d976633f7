"""Jobs that a Lightning Trainer runs: one process, this package, Lightning's own strategies."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

from lightning_parallel import TensorPipelineStrategy, ZeroStrategy
from tests.benchmarks.job import Run
from tests.benchmarks.model import GPT, Sizes, batches, loss_of, optimizer_of


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Batches that are ready before the first step."""

    def __init__(self, run: Run, part: int = 0, parts: int = 1) -> None:
        self.items = list(batches(run.sizes, run.steps, part, parts))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.items[index]


class LitGPT(LightningModule):
    """The model as a user writes it; nothing in it knows of processes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.model = GPT(sizes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, target = batch
        return loss_of(self.model(ids), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


class LitRedundancyGPT(LitGPT):
    """What torch's own sharding of optimizer state asks its user to write."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        plain = optimizer_of(self)
        return ZeroRedundancyOptimizer(self.parameters(), type(plain), lr=plain.defaults["lr"])


class LitDTensorGPT(LitGPT):
    """What `ModelParallelStrategy` asks its user to write in addition."""

    split = False

    def configure_model(self) -> None:
        if self.split:
            return
        self.split = True
        plan: dict[str, Any] = {
            "embedding.tokens": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        for index in range(len(self.model.blocks)):
            for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.up_proj"):
                plan[f"blocks.{index}.{name}"] = ColwiseParallel()
            for name in ("attention.o_proj", "mlp.down_proj"):
                plan[f"blocks.{index}.{name}"] = RowwiseParallel()
        assert self.device_mesh is not None, "ModelParallelStrategy sets the mesh"
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)


class LitFullyShardedGPT(LitGPT):
    """What `ModelParallelStrategy` asks its user to write for FSDP2."""

    split = False

    def configure_model(self) -> None:
        if self.split:
            return
        self.split = True
        assert self.device_mesh is not None, "ModelParallelStrategy sets the mesh"
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class StepTimer(Callback):
    """Tells the clock where steps begin and end, and keeps the losses."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.losses: list[Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.run.clock.tick()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].detach())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run.clock.finish()


def _fit(run: Run, module: LightningModule, strategy: Strategy | str, parts: int = 1) -> list[Tensor]:
    timer = StepTimer(run)
    trainer = Trainer(
        accelerator="cpu",
        devices=run.ranks,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()] if run.ranks > 1 else None,
        max_epochs=1,
        callbacks=[timer],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Batches(run, run.rank if parts > 1 else 0, parts)
    trainer.fit(module, DataLoader(data, batch_size=None))
    return timer.losses


def one_process(run: Run) -> list[Tensor]:
    """Lightning on one process."""
    return _fit(run, LitGPT(run.sizes), "auto")


def our_tensor_parallel(run: Run) -> list[Tensor]:
    """This package, tensor parallel."""
    strategy = TensorPipelineStrategy(tensor_parallel_size=run.ranks, pipeline_parallel_size=1, micro_batches=1)
    return _fit(run, LitGPT(run.sizes), strategy)


def our_pipeline(run: Run, schedule: str = "1f1b") -> list[Tensor]:
    """This package, pipeline parallel with 1F1B."""
    strategy = TensorPipelineStrategy(
        tensor_parallel_size=1, pipeline_parallel_size=run.ranks, micro_batches=run.micro_batches, schedule=schedule
    )
    return _fit(run, LitGPT(run.sizes), strategy)


def our_zero_bubble(run: Run) -> list[Tensor]:
    """This package, pipeline parallel with split backwards."""
    return our_pipeline(run, "zero-bubble")


def our_data_parallel(run: Run) -> list[Tensor]:
    """This package, data parallel."""
    strategy = TensorPipelineStrategy(tensor_parallel_size=1, pipeline_parallel_size=1, micro_batches=1)
    return _fit(run, LitGPT(run.sizes), strategy, run.ranks)


def model_parallel_strategy(run: Run) -> list[Tensor]:
    """Lightning's `ModelParallelStrategy` with a DTensor plan."""
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=run.ranks)
    return _fit(run, LitDTensorGPT(run.sizes), strategy)


def ddp(run: Run) -> list[Tensor]:
    """Lightning's `DDPStrategy`."""
    return _fit(run, LitGPT(run.sizes), DDPStrategy(), run.ranks)


def ddp_zero_redundancy(run: Run) -> list[Tensor]:
    """Lightning's `DDPStrategy` with torch's `ZeroRedundancyOptimizer`."""
    return _fit(run, LitRedundancyGPT(run.sizes), DDPStrategy(), run.ranks)


def our_zero1(run: Run) -> list[Tensor]:
    """This package, optimizer state sharded."""
    return _fit(run, LitGPT(run.sizes), ZeroStrategy(stage=1), run.ranks)


def fully_sharded(run: Run) -> list[Tensor]:
    """Lightning's `ModelParallelStrategy` with torch's `fully_shard` (FSDP2)."""
    strategy = ModelParallelStrategy(data_parallel_size=run.ranks, tensor_parallel_size=1)
    return _fit(run, LitFullyShardedGPT(run.sizes), strategy, run.ranks)


def our_zero3(run: Run) -> list[Tensor]:
    """This package, parameters sharded too."""
    return _fit(run, LitGPT(run.sizes), ZeroStrategy(stage=3), run.ranks)


def our_zero2(run: Run) -> list[Tensor]:
    """This package, optimizer state and gradients sharded."""
    return _fit(run, LitGPT(run.sizes), ZeroStrategy(stage=2), run.ranks)


def our_zero2_offload(run: Run) -> list[Tensor]:
    """This package, gradients and optimizer state sharded and stepped in host memory."""
    return _fit(run, LitGPT(run.sizes), ZeroStrategy(stage=2, offload="cpu"), run.ranks)


def our_zero2_nvme(run: Run) -> list[Tensor]:
    """This package, gradients sharded, optimizer state in files of the temporary folder."""
    strategy = ZeroStrategy(stage=2, offload="nvme", nvme_path=tempfile.gettempdir())
    return _fit(run, LitGPT(run.sizes), strategy, run.ranks)
