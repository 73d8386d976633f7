"""One scenario, run by a plain process and by every rank of a layout, and the comparison of all that it observed.

A scenario is a top-level function of a test module. It gets a `Site`, builds its Trainer and loaders through it, and
returns plain values (numbers, tensors, strings, lists, dicts) that must not depend on the layout.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_parallel import TensorPipelineStrategy
from tests.harness import Ranks

Layout = tuple[int, int, int]
"""(tensor, pipeline, data)"""

PAIRS: list[Layout] = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
LAYOUTS: list[Layout] = [*PAIRS, (1, 2, 2)]
WIDTH, CLASSES = 8, 4
PLAN = {"net.blocks.*.fc": "colwise", "net.blocks.*.out": "rowwise"}


QUIET: Mapping[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class Site:
    """Where a scenario runs: one rank of a layout, or one plain process (`layout` is None)."""

    layout: Layout | None = None
    rank: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """Number of data ranks."""
        return 1 if self.layout is None else self.layout[2]

    def trainer(self, **kwargs: Any) -> Trainer:
        """A quiet Trainer on this site; two epochs unless told otherwise."""
        where: dict[str, Any] = {"devices": 1}
        if self.layout is not None:
            tensor, pipeline, _ = self.layout
            sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
            where["devices"] = math.prod(self.layout)
            # Less to do than with the default of four per stage; uneven parts of most batches where that is cheap.
            parts = {"micro_batches": 3 if where["devices"] == 2 else 2} if pipeline > 1 else {}
            where["strategy"] = TensorPipelineStrategy(**{"plan": PLAN, **sizes, **parts, **self.options})
        return Trainer(accelerator="cpu", **where, **{**QUIET, "max_epochs": 2, **kwargs})

    def loader(self, data: Dataset[Any], batch_size: int, **kwargs: Any) -> DataLoader[Any]:
        """A loader whose global batches have `batch_size` samples on every site."""
        return DataLoader(data, batch_size=batch_size // self.replicas, **kwargs)


class PeerSite(Site):
    """A site whose ranks run a strategy of Lightning's own, on batches in the order of the reference."""

    def loader(self, data: Dataset[Any], batch_size: int, **kwargs: Any) -> DataLoader[Any]:
        """This rank's share of global batches of `batch_size` samples."""
        sampler = DistributedSampler(data, num_replicas=self.replicas, rank=self.rank, shuffle=False)
        return super().loader(data, batch_size, sampler=sampler, **kwargs)

    def trainer(self, **kwargs: Any) -> Trainer:
        """A quiet Trainer, with ddp unless told otherwise."""
        where = {"strategy": "ddp", "devices": self.replicas, "use_distributed_sampler": False}
        return Trainer(accelerator="cpu", **{**QUIET, **where, **kwargs})


class ShardingSite(PeerSite):
    """A site whose ranks run FSDP (torch's `fully_shard`) by Lightning's strategy; modules call `shard`."""

    def trainer(self, **kwargs: Any) -> Trainer:
        """A quiet Trainer that shards over all ranks."""
        sizes = {"data_parallel_size": self.replicas, "tensor_parallel_size": 1}
        strategy = ModelParallelStrategy(**sizes, save_distributed_checkpoint=False, process_group_backend="gloo")
        return super().trainer(**{"strategy": strategy, **kwargs})


def shard(module: LightningModule, blocks: Iterable[nn.Module]) -> None:
    """What `configure_model` does for FSDP; nothing under other strategies."""
    if module.device_mesh is not None:
        for part in (*blocks, module):
            fully_shard(part, mesh=module.device_mesh["data_parallel"])


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Samples by formula; each knows its number."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number = self.first + index
        x = torch.cos(torch.arange(1, WIDTH + 1) * (number + 1) * 0.37)
        return {"id": torch.tensor(number), "x": x, "y": torch.tensor(number * 7 // 3 % CLASSES)}


class Block(nn.Module):
    """A residual pair of linears."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(self.fc(x)))


class Net(nn.Module):
    """A residual network of alike blocks between two linears; weights by formula."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        set_by_formula(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def set_by_formula(module: nn.Module) -> None:
    """Start weights that depend on no random stream."""
    with torch.no_grad():
        for place, p in enumerate(module.parameters()):
            values = torch.sin(torch.arange(p.numel(), dtype=torch.float64) * 1.7 + place).view(p.shape)
            p.copy_(values / math.sqrt(p.shape[-1]) + (1.0 if p.dim() == 1 and place % 2 else 0.0))


class Classifier(LightningModule):
    """What a user would write; subclasses change the part under test."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch["x"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of a module's state."""
    state = {name: value.detach() for name, value in module.state_dict().items()}
    return {name: v.full_tensor() if isinstance(v, DTensor) else v.clone() for name, v in state.items()}


def held(trainer: Trainer, module: LightningModule) -> dict[str, nn.Parameter]:
    """The parameters that this rank itself computes with, past what hooks are shown."""
    partition = getattr(trainer.strategy, "_partition", None)
    return dict(module.named_parameters()) if partition is None else partition.local_parameters


def readable(trainer: Trainer, module: LightningModule) -> dict[str, nn.Parameter]:
    """The parameters whose values and gradients are read at the least cost.

    What hooks are shown is gathered from all ranks for every read, which takes longer than a step. Where nothing is
    sharded over replicas, what a rank holds tells as much to a test that does not ask about the reading itself.
    """
    zero = getattr(trainer.strategy, "zero_config", None)
    return held(trainer, module) if zero is None or zero.stage == 0 else dict(module.named_parameters())


# ------------------------------------------------------------------------------------------------ comparison
Scenario = Callable[[Site], Any]


def observe(rank: int, world_size: int, scenario: Scenario, layout: Layout, options: Mapping[str, Any]) -> Any:
    """Runs on a worker: what the scenario observes on one rank of a layout."""
    return scenario(Site(layout, rank, options))


@cache
def reference(scenario: Scenario) -> Any:
    """What the scenario observes in one plain process, in a folder of its own as workers have."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return scenario(Site())
        finally:
            os.chdir(before)


def check(
    ranks: Ranks, scenario: Scenario, layout: Layout, atol: float = 1e-5, timeout: float = 60, **options: Any
) -> None:
    """Fails unless every rank of a layout observed what the plain process did.

    Args:
        ranks: the fixture.
        scenario: top-level function of the test module.
        layout: (tensor, pipeline, data).
        atol: for floating point values, absolute and relative to the larger one.
        timeout: seconds.
        **options: of the strategy.
    """
    expected = reference(scenario)
    found = ranks(math.prod(layout), observe, scenario, layout, options, launch="lightning", timeout=timeout)
    for rank, value in enumerate(found):
        assert_same(value, expected, f"rank {rank} of {layout}", atol)


def assert_same(found: Any, expected: Any, where: str, atol: float = 1e-5) -> None:
    """Equal structure, keys, types, shapes and strings; floating point values within the tolerance."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{where}: {found!r} instead of a tensor"
        torch.testing.assert_close(found, expected, atol=atol, rtol=atol, equal_nan=True, msg=lambda m: f"{where}: {m}")
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), f"{where}: keys {list(found)} instead of {list(expected)}"
        for key in expected:
            assert_same(found[key], expected[key], f"{where}, {key}", atol)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{where}: {found} instead of {expected}"
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}, entry {index}", atol)
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=atol, abs_tol=atol) or (
            math.isnan(found) and math.isnan(expected)
        ), f"{where}: {found} instead of {expected}"
    else:
        assert found == expected, f"{where}: {found!r} instead of {expected!r}"
