"""What cannot work is refused in one line with names, numbers and a value that would work, on every rank alike."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_parallel import TensorPipelineStrategy, ZeroStrategy
from lightning_parallel.strategies import surroundings
from lightning_parallel.strategies.failures import FailureWatch
from lightning_parallel.tensor_parallel import ColumnParallelLinear
from lightning_parallel.versions import OLDEST, TESTED, installed_versions, untested_note
from lightning_parallel.watch import WatchTimes
from tests.glue.oracle import Classifier, Layout, Net, Samples, Site
from tests.glue.training import GPT, Tokens
from tests.harness import Ranks, RanksFailed
from tests.harness.process import ROOT


# ------------------------------------------------------------------------------------------------ options and sizes
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"tensor_parallel_size": True},
            "tensor_parallel_size=True is not a size; use 'auto' or an integer of at least 1",
        ),
        (
            {"pipeline_parallel_size": 0},
            "pipeline_parallel_size=0 is not a size; use 'auto' or an integer of at least 1",
        ),
        (
            {"tensor_parallel_size": 2.0},
            "tensor_parallel_size=2.0 is not a size; use 'auto' or an integer of at least 1",
        ),
        ({"micro_batches": 2.5}, "micro_batches=2.5 is not a size; use 'auto' or an integer of at least 1"),
        ({"micro_batches": "four"}, "micro_batches='four' is not a size; use 'auto' or an integer of at least 1"),
        (
            {"evaluation_micro_batches": "auto"},
            "evaluation_micro_batches='auto' is not a count; use an integer of at least 1",
        ),
        ({"bucket_bytes": 2.5e7}, "bucket_bytes=25000000.0 is not a count; use an integer of at least 1"),
        ({"schedule": "zb"}, "schedule='zb' is unknown; use one of 1f1b, gpipe, zero-bubble"),
        (
            {"zero_stage": 4},
            "stage 4 of ZeRO is not available; use 0 (nothing sharded), 1 (optimizer state), 2 (also gradients) or 3 "
            "(also parameters)",
        ),
        (
            {"zero_stage": True},
            "stage True of ZeRO is not available; use 0 (nothing sharded), 1 (optimizer state), 2 (also gradients) or "
            "3 (also parameters)",
        ),
        ({"sequence_parallel": "yes"}, "sequence_parallel='yes' is not a choice; use True or False"),
        ({"sync_logs": 1}, "sync_logs=1 is not a choice; use True or False"),
        ({"restore_weights": None}, "restore_weights=None is not a choice; use True or False"),
        (
            {"plan": "megatron"},
            "plan='megatron' is not a plan; use 'auto' or a mapping such as {'layers.*.mlp.fc': 'colwise'}",
        ),
        ({"plan": {}}, "plan={} is not a plan; use 'auto' or a mapping such as {'layers.*.mlp.fc': 'colwise'}"),
        ({"blocks": 5}, "blocks=5 names no blocks; use 'auto', a pattern such as 'layers.*' or a list of names"),
        (
            {"loss_weight": "tokens"},
            "loss_weight='tokens' is unknown; use 'samples', 'valid_labels' or a function of the batch",
        ),
        ({"non_finite": "stop"}, "non_finite='stop' is unknown; use one of ignore, raise, skip"),
        ({"timeout": 60}, "timeout=60 is not a duration; use datetime.timedelta(minutes=30)"),
        (
            {"tensor_parallel": 2},
            "TensorPipelineStrategy has no option 'tensor_parallel'; did you mean tensor_parallel_size?",
        ),
        (
            {"find_unused_parameters": True},
            "TensorPipelineStrategy has no option 'find_unused_parameters'; no module is wrapped, so leave out "
            "options for "
            "a wrapper",
        ),
    ],
)
def test_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        TensorPipelineStrategy(**options)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size", "micro_batches", "zero_stage"])
def test_sizes_that_a_zero_strategy_has_not(name: str) -> None:
    text = f"ZeroStrategy has no {name}: its ranks are all replicas; use TensorPipelineStrategy(zero_stage=2, ...)"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        ZeroStrategy(stage=2, **{name: 2})


@pytest.mark.parametrize(
    ("sizes", "machine", "text"),
    [
        (
            (3, 1),
            (4, 1),
            "tensor_parallel_size=3 does not divide the 4 devices of a node; use 1, 2 or 4, or a multiple of 3",
        ),
        ((2, 1), (1, 1), "tensor_parallel_size=2 does not divide the 1 devices of a node; use 1, or a multiple of 2"),
        (
            (8, 1),
            (4, 2),
            "tensor_parallel_size=8 does not divide the 4 devices of a node; use 1, 2 or 4, or a multiple of 8",
        ),
        (
            (2, 3),
            (4, 1),
            "tensor_parallel_size=2 x pipeline_parallel_size=3 = 6 does not divide the world size 4; with "
            "tensor_parallel_size=2 use pipeline_parallel_size 1 or 2",
        ),
        (
            ("auto", 5),
            (4, 2),
            "tensor_parallel_size=1 x pipeline_parallel_size=5 = 5 does not divide the world size 8; with "
            "tensor_parallel_size=1 use pipeline_parallel_size 1, 2, 4 or 8",
        ),
    ],
)
def test_sizes_are_checked_before_any_process_starts(sizes: Any, machine: tuple[int, int], text: str) -> None:
    devices, num_nodes = machine
    strategy = TensorPipelineStrategy(*sizes)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Trainer(accelerator="cpu", devices=devices, num_nodes=num_nodes, strategy=strategy, logger=False)


# ------------------------------------------------------------------------------------------------ models
class Chain(Classifier):
    """Four blocks; subclasses run them in ways that cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(blocks=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net.head(self.net.norm(self.run(self.net.stem(batch["x"])))), batch["y"])

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.net.blocks:
            x = block(x)
        return x


class UNet(Chain):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.net.blocks
        down = first(x)
        return fourth(third(second(down)) + down)


class ReadsValue(Chain):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x / max(1.0, x.abs().max().item()))


class CollectsHidden(Chain):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        hidden = []
        for block in self.net.blocks:
            hidden.append(x := block(x))
        return torch.stack(hidden).mean(0)


class Twice(Chain):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(super().run(x))


class NoBlocks(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())  # type: ignore[assignment]
        self.head = nn.Linear(8, 4)

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.head(self.net(batch["x"])), batch["y"])


class Odd(NoBlocks):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8))  # type: ignore[assignment]


class ByHand(Classifier):
    """Layers that a loop of one's own would use."""

    def configure_model(self) -> None:
        self.up = ColumnParallelLinear(8, 16, self.trainer.strategy.mesh.tensor, gather_output=True)  # type: ignore[attr-defined]

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + self.up(batch["x"]).mean()


class Waits(Classifier):
    """Hooks on the whole gradients of layers that are split."""

    def __init__(self) -> None:
        super().__init__()
        weights = [block.fc.weight for block in self.net.blocks]  # type: ignore[union-attr]
        self.handle = torch.autograd.graph.register_multi_grad_hook(weights, lambda gradients: None)  # type: ignore[arg-type]


class SharedColumn(GPT):
    """The first layer of two pairs is one module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].mlp.fc1 = self.layers[0].mlp.fc1  # type: ignore[union-attr]


class TiedNorm(GPT):
    """The last norm is that of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = self.layers[0].ln1  # type: ignore[assignment]


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TakesIterator(Classifier):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


class EvaluatesIterator(Classifier):
    def validation_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        self.log("val_loss", self.loss(next(dataloader_iter)[0]))


class Pruned(Classifier):
    def configure_callbacks(self) -> Any:
        return ModelPruning("l1_unstructured", parameters_to_prune=[(self.net.stem, "weight")])


class FailsOnRank1(Classifier):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.global_rank == 1:
            raise KeyError("labels")
        return batch


Case = tuple[type[LightningModule] | tuple[type[LightningModule], dict[str, Any]], dict[str, Any], str]
CUT = "this model cannot be cut into 2 pipeline stages: "
CURE = ". Use pipeline_parallel_size=1, or name other blocks with blocks=..."
READS = (
    "Python reads the value of a tensor that depends on net.stem.bias, net.stem.weight (.item(), float(), bool() or if"
)

PRUNED: Case = (Pruned, {}, "ModelPruning replaces parameters of the module while it trains, but 2 ranks share them; ")
PIPELINE: dict[str, Case] = {
    "pruning": PRUNED,
    "skip": (UNet, {}, f"{CUT}net.blocks.3 uses a value of net.blocks.0 through a skip connection{CURE}"),
    "read": (ReadsValue, {}, f"{CUT}{READS}, before the first block){CURE}"),
    "hidden": (
        CollectsHidden,
        {},
        f"{CUT}the code after the last block uses a value of net.blocks.0 (collected hidden states, router logits "
        f"or an "
        f"auxiliary loss?){CURE}",
    ),
    "twice": (
        Twice,
        {},
        f"{CUT}the 4 blocks must each run once, in order, but the step ran: "
        f"{', '.join(f'net.blocks.{i % 4}' for i in range(8))}{CURE}",
    ),
    "no blocks": (
        NoBlocks,
        {},
        "NoBlocks has no ModuleList or Sequential of alike blocks; name the blocks yourself, for example "
        "TensorPipelineStrategy(blocks=",
    ),
    "blocks": (
        Classifier,
        {"blocks": "net.block.*"},
        "blocks pattern 'net.block.*' matches no module; close names: net.blocks.*",
    ),
    "stages": (
        (GPT, {"layers": 1}),
        {},
        "1 blocks cannot be split into 2 pipeline stages, each needs at least one; use pipeline_parallel_size 1 "
        "or less",
    ),
    "manual": (
        Manual,
        {},
        "Manual uses manual optimization, which works with pipeline_parallel_size=1 only (got 2): in a pipeline "
        "one call of "
        "training_step sees one micro-batch on one stage. Use pipeline_parallel_size=1 and tensor_parallel_size=1",
    ),
    "iterator": (
        TakesIterator,
        {},
        "TakesIterator.training_step takes dataloader_iter, whose batches cannot be shared by 2 stages or split into 3 "
        "micro-batches; let it take batch and batch_idx, or use pipeline_parallel_size=1 and 1 micro-batch",
    ),
    "evaluation iterator": (
        EvaluatesIterator,
        {},
        "EvaluatesIterator.validation_step takes dataloader_iter, whose batches cannot be shared by 2 stages or "
        "split into 1 "
        "micro-batches; let it take batch and batch_idx, or use pipeline_parallel_size=1 and 1 micro-batch",
    ),
}
TENSOR: dict[str, Case] = {
    "pruning": PRUNED,
    "heads": (
        (GPT, {"heads": 3, "width": 12}),
        {"plan": "auto"},
        "layers.0.attn.qkv (colwise_qkv): attention head count 3 cannot be split evenly over tensor_parallel_size=2; "
        "use 1 or 3",
    ),
    "hidden": (
        (Odd, {}),
        {"plan": {"net.0": "colwise", "net.2": "rowwise"}},
        "net.0 (colwise): output size 9 cannot be split evenly over tensor_parallel_size=2; use 1 or 3",
    ),
    "style": (
        (NoBlocks, {}),
        {"plan": {"net.0": "colwise", "head": "rowwise_odd"}},
        "plan style 'rowwise_odd' of 'head' is not known; use one of colwise, rowwise, ",
    ),
    "parts": (
        ByHand,
        {},
        "up is a ColumnParallelLinear that holds 8 of 16 along dimension 0 already; make it a plain layer and name it "
        "in plan=..., which splits it",
    ),
    "waiting hook": (
        Waits,
        {},
        "parameter 'net.blocks.0.fc.weight' is split, but somebody holds the node of the graph that adds to its whole "
        "gradient of shape (16, 8) (torch.autograd.graph.register_multi_grad_hook, or a graph that was kept); use "
        "register_hook, ",
    ),
    "shared column": (
        SharedColumn,
        {"plan": "auto"},
        "layers.0.mlp.fc1 is also layers.1.mlp.fc1, in a module that does not share the other layers that it is split "
        "with over tensor_parallel_size=2; give each module a layer of its own, which may share the weight ",
    ),
    "tied norm": (
        TiedNorm,
        {"plan": "auto", "sequence_parallel": True},
        "'layers.0.ln1.weight' and 'ln.weight' are one parameter, but each of 2 tensor ranks would have part of its "
        "gradient from the one and all of it from the other; give 'ln.weight' a parameter of its own, or use "
        "sequence_parallel=False",
    ),
    "pattern": (Classifier, {"plan": {"net.fc": "colwise"}}, "plan pattern 'net.fc' matches no module; close names: "),
    "blocks that nothing uses": (
        Classifier,
        {"blocks": "net.block.*"},
        "blocks pattern 'net.block.*' matches no module; close names: net.blocks.*",
    ),
    "nothing": (
        NoBlocks,
        {"plan": "auto"},
        "the plan splits no layer of NoBlocks; give one such as TensorPipelineStrategy(plan={",
    ),
    "manual": (
        Manual,
        {"micro_batches": 2},
        "Manual uses manual optimization, whose steps cannot be split into micro_batches=2; use micro_batches=1 and "
        "accumulate gradients in training_step",
    ),
    "iterator": (
        TakesIterator,
        {"micro_batches": 2},
        "TakesIterator.training_step takes dataloader_iter, whose batches cannot be shared by 1 stages or split "
        "into 2 ",
    ),
}
DATA: dict[str, Case] = {
    "few": (
        Classifier,
        {},
        "the training data has 1 samples, too few for 2 data replicas; use at most 1 replicas (fewer devices, or "
        "more tensor "
        "or pipeline ranks) or more samples",
    ),
}
GROUPS: dict[Layout, dict[str, Case]] = {(1, 2, 1): PIPELINE, (2, 1, 1): TENSOR, (1, 1, 2): DATA}


def refusals_worker(rank: int, world_size: int, layout: Layout) -> dict[str, str]:
    """What each case raised; afterwards the same process must train."""
    found = {}
    for name, (module, options, _) in GROUPS[layout].items():
        kind, arguments = module if isinstance(module, tuple) else (module, {})
        data: Dataset[Any] = Tokens(8) if issubclass(kind, GPT) else Samples(1 if name == "few" else 8)
        try:
            Site(layout, rank, options).trainer().fit(kind(**arguments), DataLoader(data, batch_size=4))
            found[name] = "trained"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    site = Site(layout, rank)
    site.trainer(max_epochs=1).fit(Classifier(), site.loader(Samples(8), 4))
    return found


@pytest.mark.parametrize("layout", list(GROUPS))
def test_every_rank_refuses_alike_and_can_go_on(ranks: Ranks, layout: Layout) -> None:
    for rank, found in enumerate(ranks(2, refusals_worker, layout, launch="lightning")):
        for name, (_, _, text) in GROUPS[layout].items():
            assert found[name].startswith(f"ValueError: {text}"), f"rank {rank}, {name}: {found[name]}"
            assert "\n" not in found[name]


def one_rank_worker(rank: int, world_size: int) -> str:
    site = Site((1, 2, 1), rank)
    with pytest.raises((KeyError, RuntimeError)) as error:
        site.trainer().fit(FailsOnRank1(), site.loader(Samples(8), 4))
    return str(error.value)


def test_what_fails_in_one_ranks_set_up_is_told_by_all(ranks: Ranks) -> None:
    first, second = ranks(2, one_rank_worker, launch="lightning")
    assert first == "set-up failed on rank 1 of this run: KeyError: 'labels'"
    assert second == "'labels'"


def none_worker(rank: int, world_size: int) -> None:
    class ReturnsNone(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return None if batch_idx == 1 else loss

    site = Site((1, 2, 1), rank)
    trainer = site.trainer()
    trainer.strategy._watch = FailureWatch(WatchTimes(grace=1.0))  # type: ignore[attr-defined]
    trainer.fit(ReturnsNone(), site.loader(Samples(12), 4))


def test_a_step_without_a_loss_in_a_pipeline_ends_all_ranks(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as failure:
        ranks(2, none_worker, launch="lightning")
    text = (
        "training_step returned NoneType without a scalar loss for a micro-batch; return a loss every time: skipping a "
        "step is not possible when several processes take part in it"
    )
    assert f"RuntimeError: {text}" in str(failure.value)
    assert f"rank 1 (stage 1, tensor 0, replica 0) failed: RuntimeError: {text}" in str(failure.value)


# ------------------------------------------------------------------------------------------------ packages
def test_the_tested_versions_are_those_of_the_readme_and_the_constraints() -> None:
    readme, constraints = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "constraints.txt").read_text()
    for (package, oldest), (_, tested) in zip(OLDEST, TESTED, strict=True):
        assert f"| {package} | {oldest} | {tested} |" in readme
        assert f"{package}=={tested}" in constraints
        assert f'"{package}>={oldest}"' in (ROOT / "pyproject.toml").read_text()


def test_untested_versions_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert untested_note(installed_versions()) is None, "the suite runs with the tested versions"
    strange = {"torch": "2.7.1+cpu", "lightning": "3.0.0", "torchmetrics": "1.9.3"}
    text = (
        "torch 2.7.1+cpu and lightning 3.0.0 are outside of the tested versions (2.8 to 2.13.0) and (2.6 to 2.6.6): "
        "results may be wrong; pip install torch==2.13.0 lightning==2.6.6"
    )
    assert untested_note(strange) == text
    monkeypatch.setattr(surroundings, "installed_versions", lambda: strange)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        TensorPipelineStrategy()
        TensorPipelineStrategy()
    assert [str(warning.message) for warning in caught].count(text) == 1
