"""The strategy that plans for itself: its layout follows from memory, is that of every rank, and trains alike."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

from lightning_parallel import AutoStrategy, TensorPipelineStrategy, ZeroConfig
from lightning_parallel.callbacks import MemoryReport, MicroBatchSizer
from lightning_parallel.callbacks.expected import running_split
from lightning_parallel.commands.answer import show_parts, standard_console
from lightning_parallel.commands.plan_text import plan_text
from lightning_parallel.layout import ParallelLayout
from lightning_parallel.planner.advice import advice
from lightning_parallel.planner.choose import NOTABLE, Choices
from lightning_parallel.planner.hardware import GIB, Cluster, cpu_process, find_gpu, recognise
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.planner.search import USABLE_MEMORY, search
from lightning_parallel.planner.strategy_text import peers, strategy_of, trainer_line, yaml_text
from lightning_parallel.planner.typical import typical_shape
from lightning_parallel.strategies import _compat, even_split
from lightning_parallel.strategies.chosen import RunnableChoices
from lightning_parallel.strategies.fsdp_units import unwrap
from lightning_parallel.strategies.planning import host_memory
from lightning_parallel.strategies.succeeding import SUCCEEDING, lightning_name
from lightning_parallel.strategies.successor import lightning_runtime, simplest, take_over
from tests.glue.oracle import QUIET, PeerSite, Site, assert_same
from tests.glue.training import GPT, Tokens, weights
from tests.harness import Ranks

AMPLE = 1.0


class LateGPT(GPT):
    """Its layers do not exist before `configure_model`."""

    def __init__(self, **sizes: int) -> None:
        LightningModule.__init__(self)
        self.sizes = sizes

    def configure_model(self) -> None:
        for name, child in GPT(**self.sizes).named_children():
            self.add_module(name, child)


def trained(
    strategy: Any, devices: int, batch_size: int, heads: int = 2, callbacks: Any = (), kind: type[GPT] = GPT
) -> Any:
    """Where two steps of a run led; what it printed is left in its place."""
    module = kind(layers=4, width=4 * heads, heads=heads)
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=2, callbacks=[*callbacks], **QUIET
    )
    trainer.fit(module, Site().loader(Tokens(16), batch_size))
    return weights(module)


def unwrapped(rank: int) -> tuple[Any, Any, bool]:
    """A step in FSDP's units and one in the module that they leave, the same with a plain one, and who is who."""
    modules = [GPT(layers=2), GPT(layers=2)]
    before = [*modules[0].parameters()]
    for module in modules:
        module.log = lambda *_: None  # type: ignore[assignment]
    policy = ModuleWrapPolicy({type(modules[0].layers[0])})
    wrapped = FullyShardedDataParallel(
        modules[0], device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=policy
    )
    batch = torch.stack([Tokens(4)[index] for index in range(4)])
    for nets in ((wrapped, modules[1]), modules):
        for net, module in zip(nets, modules, strict=True):
            optimizer = module.configure_optimizers()
            torch.nn.functional.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if nets[0] is wrapped:
            unwrap(wrapped)
    same = all(one is other for one, other in zip(modules[0].parameters(), before, strict=True))
    return weights(modules[0]), weights(modules[1]), same


class Expected(Callback):
    """What a report expects of each micro-batch."""

    micro_batch = 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.micro_batch = running_split(trainer, 4).micro_batch


def told(strategy: TensorPipelineStrategy, devices: int, batch_size: int, heads: int) -> Any:
    """The layout, where it led, and what was said about it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        after = trained(strategy, devices, batch_size, heads)
    finally:
        logger.removeHandler(handler)
    layout = strategy.layout
    said = [line for line in lines if "even split" in line]
    return (layout.tensor, layout.pipeline, layout.data), after, said


def runs(rank: int, world_size: int, tight: float) -> Any:
    """With room for a replica on every rank; with less; by name."""
    found = []
    for memory, batch in ((AMPLE, 4), (tight, 8)):
        strategy = AutoStrategy(memory_gib=memory, runtime="lightning_parallel")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            after = trained(strategy, world_size, batch)
        split = strategy.choice.plan.split
        sizes = (strategy.layout.tensor, strategy.layout.pipeline, strategy.layout.data)
        assert sizes == (split.tensor, split.pipeline, split.data)
        assert strategy.zero_config.stage == split.zero_stage
        found.append((sizes, after, printed.getvalue()))
    with pytest.raises(ValueError, match="no layout of 2 devices with 1.0 KiB each"):
        trained(AutoStrategy(memory_gib=1e-6), world_size, 4)
    with pytest.raises(ValueError, match="a cpu does not say how much memory a process may use"):
        trained("auto_parallel", world_size, 4)
    sizer, expected = MicroBatchSizer(limit=2), Expected()
    strategy = AutoStrategy(memory_gib=AMPLE)
    measured = trained(strategy, world_size, 4, callbacks=[sizer, expected])
    assert sizer.micro_batch == 2, "what was planned may still be measured"
    assert strategy.choice.plan.split.micro_batch == 4
    assert expected.micro_batch == 2, "and reports expect what was measured"
    with pytest.raises(ValueError, match="attention head count 3 cannot be split"):
        trained("tp", world_size, 4, heads=3)  # not what was asked for: refused and not replaced
    cluster = Cluster(cpu_process(AMPLE), gpus_per_node=world_size)
    choices = AutoStrategy.plan(GPT(layers=4), cluster, 4, fixed={"zero_stage": 0, "recompute": "none"})
    chosen = [trained(choices.strategy(), world_size, 4)]
    module, site = GPT(layers=4, width=8), PeerSite((1, 1, world_size), rank)  # ddp's own sampler would shuffle
    planned = AutoStrategy(memory_gib=AMPLE, batch_size=4, zero_stage=0)
    seen = MemoryReport()
    trainer = site.trainer(strategy=planned, devices=world_size, max_steps=2, callbacks=[seen])
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(module, site.loader(Tokens(16), 8))
    assert isinstance(trainer.strategy, DDPStrategy)
    assert not isinstance(trainer.strategy, TensorPipelineStrategy)
    with pytest.raises(RuntimeError, match="Lightning's DDPStrategy runs the plan and has no such layout"):
        planned.layout  # noqa: B018
    with pytest.raises(
        ValueError, match="left to Lightning's ddp, and now parameters are frozen, .*; use AutoStrategy"
    ):
        trainer.fit(GPT(layers=4, width=8).requires_grad_(False), site.loader(Tokens(16), 8))
    assert seen.shape is planned.choice.job.shape, "reports know what was planned for a successor, too"
    assert planned.choice.plan.split.data == world_size
    chosen.append(weights(module))
    after, plain, same = unwrapped(rank)
    assert_same(after, plain, "what FSDP wrapped")
    assert same, "optimizers and ties know parameters by identity"
    split = AutoStrategy(memory_gib=AMPLE, tensor_parallel_size=2)
    with contextlib.redirect_stdout(io.StringIO()):
        chosen.append(trained(split, world_size, 8))
    assert split.layout.tensor == 2, "who splits layers stays"
    shape, report = choices.best.job.shape, MemoryReport()
    with pytest.raises(ValueError, match="sizes of LateGPT cannot be read off it .*pass AutoStrategy\\(shape="):
        trained(AutoStrategy(memory_gib=AMPLE), world_size, 8, kind=LateGPT)
    with pytest.raises(ValueError, match="sizes of LateGPT cannot be read off it .*pass MemoryReport\\(shape="):
        trained(TensorPipelineStrategy(2, 1), world_size, 8, callbacks=[report], kind=LateGPT)
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        late = AutoStrategy(memory_gib=AMPLE, shape=shape, **sizes)
        with contextlib.redirect_stdout(io.StringIO()):
            chosen.append(trained(late, world_size, 8, callbacks=[report], kind=LateGPT))
    planned, held = report.ranks[0]["weights"]  # the rank that holds most
    assert held == pytest.approx(planned, rel=0.01), "reports know the shape that was planned with"
    even = [told(TensorPipelineStrategy(), world_size, 8, heads) for heads in (2, 3)]
    with patch.object(even_split, "planned_gpu", lambda *_: find_gpu("rtx-4090")):  # as if these processes had such
        even.append(told(TensorPipelineStrategy(), world_size, 8, 2))
    return found, measured, chosen, even


def test_it_becomes_the_layout_that_memory_allows(ranks: Ranks) -> None:
    expected = trained("auto", 1, 8)
    three_heads = trained("auto", 1, 8, 3)
    both = ranks(2, runs, tight_memory(), launch="lightning")
    for rank, (found, measured, chosen, (even, uneven, faster)) in enumerate(both):
        assert_same(measured, expected, "with measured micro-batches")
        for after in chosen:
            assert_same(after, expected, "the strategies of a plan made before, and layers made late")
        assert even[0] == (2, 1, 1)
        assert_same(even[1], expected, "the even split")
        assert even[2] == []
        assert_same(uneven[1], three_heads, "three heads")
        assert uneven[0] == (1, 2, 1), "two ranks cannot share three heads, and one replica keeps the global batch"
        assert len(uneven[2]) == (rank == 0)
        for line in uneven[2]:
            assert "attention head count 3 cannot be split" in line
            assert "planned instead: tensor 1 x pipeline 2 x data 1" in line
        assert_same(faster[1], expected, "faster than the even split")
        assert faster[0] == (1, 2, 1)
        assert len(faster[2]) == (rank == 0)
        for line in faster[2]:
            assert re.search(r"takes \d\.\d\d times as long; planned instead: tensor 1 x pipeline 2 x data 1", line)
        for sizes, after, printed in found:
            assert_same(after, expected, str(sizes))
            assert ("layouts that fit, fastest first" in printed) == (rank == 0), "one rank tells"
            assert ("CPU-hours per billion tokens" in printed) == (rank == 0)
            assert ("│ 2x1x1  │ 1, 2, 3 │" in printed) == (rank == 0), "stages that are refused alike share a row"
            assert "tokens per sequence are assumed" not in printed, "the model has positions"
    layouts = [[sizes for sizes, _, _ in found] for found, *_ in both]
    assert layouts[0] == layouts[1], "ranks agree"
    ample, tight = layouts[0]
    assert ample == (1, 1, 2)
    assert tight in ((2, 1, 1), (1, 2, 1))


def tight_memory() -> float:
    """GiB in which the module trains only when two ranks share it."""
    cluster = Cluster(cpu_process(AMPLE), gpus_per_node=2)
    fixed = {"sequence_parallel": False, "recompute": "none", "micro_batch": 1}
    choices = AutoStrategy.plan(GPT(layers=4), cluster, 8, fixed=fixed)
    whole = min(c.plan.worst.total for c in choices.ranked if c.plan.split.data == 2)
    shared = min(c.plan.worst.total for c in choices.ranked if c.plan.split.data == 1)
    assert shared < 0.9 * whole
    return (shared + whole) / 2 / USABLE_MEMORY / GIB


def test_a_plan_needs_no_trainer_and_keeps_what_is_given() -> None:
    shape = ModelShape.llama(32, 4096, 32, 14336, kv_heads=8, vocab=128256, seq=8192)
    cluster = Cluster(find_gpu("h100-80gb"), nodes=2)
    fixed = {"tensor": 4, "recompute": "none"}
    choices = AutoStrategy.plan(torch.nn.Identity(), cluster, 2, "bf16-mixed", shape, fixed)
    assert {choice.plan.split.tensor for choice in choices.ranked} == {4}
    assert all(choice.job.global_batch == 2 * choice.plan.split.data for choice in choices.ranked)
    assert all(choice.plan.worst.master_weights == 0 for choice in choices.ranked), "autocast has no master weights"
    assert choices.ranked == tuple(sorted(choices.ranked, key=lambda choice: choice.seconds_per_sequence))
    with pytest.raises(ValueError, match="the module has no embedding or no list of equal blocks"):
        AutoStrategy.plan(torch.nn.Identity(), cluster, 2)
    with pytest.raises(ValueError, match="precision='64-true' is not planned"):
        AutoStrategy.plan(torch.nn.Identity(), cluster, 2, "64-true", shape)


def choices_of(**fixed: Any) -> RunnableChoices:
    shape = ModelShape.llama(16, 2048, 16, 5632, seq=2048)
    cluster = Cluster(find_gpu("h100-80gb"), nodes=2)
    return AutoStrategy.plan(torch.nn.Identity(), cluster, 8, "bf16-mixed", shape, {"recompute": "none", **fixed})


def test_a_plan_makes_the_strategy_that_runs_it() -> None:
    ours = choices_of(tensor=2, pipeline=2, zero_stage=2, micro_batch=2).trainer_arguments()
    strategy = ours.pop("strategy")
    assert (strategy.tensor_config.size, strategy.pipeline_config.size) == (2, 2)
    assert (strategy.pipeline_config.micro_batches, strategy.zero_config.stage) == (4, 2)
    assert ours == {"devices": 8, "num_nodes": 2, "precision": "bf16-mixed"}
    sharded = choices_of(tensor=1, pipeline=1, zero_stage=3, micro_batch=2)
    assert (sharded.loader_batch_size(), sharded.loader_batch_size("fsdp")) == (8, 2)
    theirs = sharded.trainer_arguments("fsdp")
    assert isinstance(theirs["strategy"], FSDPStrategy)
    assert theirs["strategy"].sharding_strategy.name == "FULL_SHARD"
    assert theirs["accumulate_grad_batches"] == 4
    whole = choices_of(tensor=1, pipeline=1, zero_stage=0)
    assert type(whole.strategy("ddp")) is DDPStrategy


@pytest.mark.parametrize(
    ("fixed", "text"),
    [
        ({"tenser": 2}, "tenser cannot be fixed; use tensor"),
        ({"zero_stage": 5}, "zero_stage=5 is unknown; use 0 or"),
        ({"tensor": 3}, "tensor=3 does not fill the 16 GPUs; use 1, 2, 4, 8 or 16"),
        ({"offload": "cpu", "zero_stage": 0}, "ZeRO stage 0 shards nothing"),
    ],
)
def test_what_cannot_be_fixed_is_refused_in_a_plan_for_a_loader(fixed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        choices_of(**fixed)


def test_an_offload_that_is_given_is_planned_with_what_can_be_moved_and_told() -> None:
    choices = choices_of(offload="cpu")
    assert {choice.plan.split.zero_stage for choice in choices.ranked} == {1, 2, 3}
    assert "Offloading as given takes" in choices.data()["advice"][0]
    assert choices.strategy().zero_config.offload == "cpu"


def offloads(rank: int, world_size: int, given: ZeroConfig) -> tuple[ZeroConfig, str]:
    strategy = AutoStrategy(memory_gib=AMPLE, zero_stage=given)
    trained(strategy, world_size, 8)
    return strategy.zero_config, strategy.choice.plan.split.offload


def test_options_of_zero_are_kept(ranks: Ranks) -> None:
    given = ZeroConfig(stage=2, offload="cpu", gradient_dtype="parameter")
    assert ranks(1, offloads, given, launch="lightning") == [(given, "cpu")]
    arguments = (torch.nn.Identity(), Cluster(find_gpu("h100-80gb")), 8, "bf16-true", typical_shape(1e9))
    wide, narrow = (AutoStrategy.plan(*arguments, {"zero_stage": 2}, dtype) for dtype in ("float32", "parameter"))
    assert wide.best.plan.worst.gradients == 2 * narrow.best.plan.worst.gradients


def test_a_schedule_that_is_given_leaves_runs_without_stages_alone() -> None:
    choices = choices_of(schedule="zb-v")
    assert choices.best.plan.split.pipeline == 1
    assert choices.strategy().pipeline_config.schedule == "1f1b"


def test_deepspeed_has_no_files_below_stage_3() -> None:
    job = TrainingJob(typical_shape(7e9), Cluster(find_gpu("h100-80gb")), 8)
    assert "deepspeed" not in peers(job, Candidate(data=8, zero_stage=2, offload="nvme"))
    assert "deepspeed" in peers(job, Candidate(data=8, zero_stage=2, offload="cpu"))


@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_deepspeed_is_given_what_it_takes(offload: str) -> None:
    job = TrainingJob(typical_shape(7e9), Cluster(find_gpu("h100-80gb")), 8)
    named = peers(job, Candidate(data=8, zero_stage=3, offload=offload))["deepspeed"]
    assert named["class_path"] == f"{DeepSpeedStrategy.__module__.rpartition('.')[0]}.{DeepSpeedStrategy.__name__}"
    bound = inspect.signature(DeepSpeedStrategy).bind(**named["init_args"]).arguments
    assert bound["stage"] == 3
    assert bound.get("offload_parameters", False) == (offload != "none")
    assert bound.get("remote_device", "cpu") == ("nvme" if offload == "nvme" else "cpu")


@pytest.mark.parametrize(
    ("fixed", "runtime", "text"),
    [
        ({"tensor": 2}, "ddp", "ddp does not run the best plan, tensor 2 x .*; use 'lightning_parallel'"),
        ({"tensor": 1, "pipeline": 1, "zero_stage": 1}, "fsdp", "ZeRO stage 1; use 'lightning_parallel', or plan with"),
        ({}, "megatron", "runtime='megatron' is unknown; use 'lightning_parallel' or 'ddp' or 'fsdp' or 'deepspeed'"),
    ],
)
def test_a_runtime_that_does_not_run_the_plan_is_refused(fixed: dict[str, int], runtime: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        choices_of(**fixed).trainer_arguments(runtime)


def test_what_no_strategy_runs_is_told_where_it_gains_notably() -> None:
    shape = replace(ModelShape.llama(32, 4096, 32, 11008, seq=32768), kv_heads=8)
    fixed = {"sequence_parallel": False, "recompute": "none", "schedule": "1f1b", "data": 1, "tensor": 8}
    choices = AutoStrategy.plan(
        torch.nn.Identity(), Cluster(find_gpu("h100-80gb"), nodes=2), 2, "bf16-mixed", shape, fixed
    )
    entries = choices.data()["not_run_here"]
    assert entries, "two micro-batches leave two stages half idle"
    for (job, entry), told in zip(choices.beyond, entries, strict=True):
        per_second = job.global_batch / entry.plan.time.total
        assert told["faster_percent"] == pytest.approx(100 * (per_second * choices.best.seconds_per_sequence - 1))
        assert told["faster_percent"] >= 5
    assert "faster, but nothing here runs them" in shown(choices)


def test_a_length_that_is_assumed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = AutoStrategy(memory_gib=1.0)
    monkeypatch.setattr(strategy, "_module", lambda: torch.nn.Embedding(10, 8))
    monkeypatch.setattr(strategy, "_run", lambda: "fit")
    assert strategy._assumed() == [
        "2048 tokens per sequence are assumed: the module does not tell; give AutoStrategy(seq=...)"
    ]
    monkeypatch.setattr(strategy, "seq", 512)
    assert strategy._assumed() == []


def shown(choices: Choices) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        show_parts(plan_text(choices.data()), standard_console())
    return printed.getvalue()


def test_steps_of_different_batches_are_told_apart_and_ranked_by_tokens() -> None:
    choices = choices_of()
    data = choices.data()
    assert [plan["sequences_per_step"] for plan in data["plans"]] == [c.job.global_batch for c in choices.ranked]
    assert len({choice.job.global_batch for choice in choices.ranked}) > 1
    rates = [plan["tokens_per_second_per_gpu"] for plan in data["plans"]]
    assert rates == sorted(rates, reverse=True)
    printed = " ".join(shown(choices).split())
    sizes = data["plans"][0]
    assert f"{sizes['sequences_per_step']} sequences of 2048 tokens per step of the first layout" in printed
    assert f"one step of {sizes['sequences_per_step']} sequences" in printed
    assert "micro ┃ batch ┃ memory ┃ s/step ┃ tok/s" in printed
    assert f"│ {sizes['layout']['micro_batch']} │ {sizes['sequences_per_step']} │" in printed
    assert "recompute: " not in printed, "nothing is"
    assert "recompute: full" in shown(choices_of(recompute="full"))
    same = shown(choices_of(data=2))
    assert "recompute ┃" in same
    assert "batch ┃" not in same.replace("micro-batch", "")


def test_layouts_without_a_word_on_memory_are_listed_apart() -> None:
    printed = shown(choices_of(tensor=4))
    assert "layouts that cannot be run like this" in printed
    assert "do not fit" not in printed


@pytest.mark.parametrize(
    ("given", "run", "size"),
    [
        ({"train_dataloaders": [4]}, "fit", 4),
        ({"val_dataloaders": [3]}, "validate", 3),
        ({"test_dataloaders": [3, 5]}, "test", 5),
        ({"predict_dataloaders": [3]}, "predict", 3),
        ({"train_dataloaders": [4, 2]}, "fit", None),  # whose batches come together
        ({"train_dataloaders": [4]}, "validate", None),
    ],
)
def test_the_loader_of_what_runs_tells_the_batch(given: dict[str, list[int]], run: str, size: int | None) -> None:
    trainer, module = Trainer(accelerator="cpu", devices=1, strategy=AutoStrategy(memory_gib=AMPLE), **QUIET), GPT()
    loaders = {name: [DataLoader(Tokens(8), batch) for batch in sizes] for name, sizes in given.items()}
    trainer._data_connector.attach_data(
        module, **{name: found[0] if len(found) == 1 else found for name, found in loaders.items()}
    )
    strategy: Any = trainer.strategy
    strategy.connect(module)
    trainer.state.fn = TrainerFn(run)
    assert _compat.batch_size_of(trainer, run) == size
    if size is None:
        with pytest.raises(ValueError, match="how many sequences a batch has: pass batch_size=8 to AutoStrategy"):
            strategy._batch()
        module.batch_size = 7  # type: ignore[assignment]
        assert strategy._batch() == 7
    else:
        assert strategy._batch() == size
    assert [line for line in strategy._assumed() if f"as {run} reads them" in line] == strategy._assumed()
    assert len(strategy._assumed()) == (run != "fit")


def test_tensor_groups_cross_nodes_where_nothing_fits_otherwise() -> None:
    shape = typical_shape(1e9, seq=65536)
    cluster = Cluster(find_gpu("a100-40gb"), gpus_per_node=1, nodes=2)
    job = TrainingJob(shape, cluster, 2)
    fixed = {"offload": "none"}
    found = search(job, fixed)
    assert [plan.split.tensor for plan in found.plans] == [2]
    assert found.plans[0].time.total == search(job, {**fixed, "tensor": 2}).plans[0].time.total
    assert any(entry.reason.startswith("needs") for entry in found.rejected), "what was tried inside the nodes is told"
    assert "reaches across nodes, whose network has to carry its sums" in advice(found)[0]
    assert search(replace(job, shape=replace(shape, seq=8192))).plans[0].split.tensor == 1
    longer = replace(job, shape=replace(shape, seq=131072))
    assert {(plan.split.tensor, plan.split.offload) for plan in search(longer).plans} == {(2, "cpu")}
    why = strategy_of(job, found.plans[0].split)["why"]
    assert why == "no strategy here runs tensor groups of 2 over nodes of 1 GPU"
    with pytest.raises(ValueError, match="tensor_parallel_size=2 does not divide the 1 devices of a node"):
        ParallelLayout.choose(2, 1, tensor=2)
    kept = AutoStrategy.plan(torch.nn.Identity(), cluster, 1, "bf16-mixed", shape, fixed)
    assert not kept.ranked, "the strategy would refuse what alone fits"
    moved = AutoStrategy.plan(torch.nn.Identity(), cluster, 1, "bf16-mixed", shape)
    assert {(choice.plan.split.tensor, choice.plan.split.offload) for choice in moved.ranked} == {(1, "cpu")}


def test_states_on_the_host_beside_tensor_ranks_are_proposed_and_run_as_written() -> None:
    shape = ModelShape.llama(80, 8192, 64, 28672, kv_heads=8, vocab=32000)
    job = TrainingJob(shape, Cluster(find_gpu("a100-80gb")), 8)
    plans = {plan.split.layout.tensor: plan for plan in search(job).plans}
    assert {plan.split.offload for plan in plans.values()} == {"cpu"}
    split = plans[8].split
    assert plans[8].host["offload"] > 12 * shape.parameters
    strategy = strategy_of(job, split)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=Strategy)
    parsed = parser.parse_object({"strategy": yaml.safe_load(yaml_text(job, split))["trainer"]["strategy"]}).strategy
    assert parsed.class_path == strategy["class_path"]
    names = {"TensorPipelineStrategy": TensorPipelineStrategy, "ZeroConfig": ZeroConfig}
    made = eval(trainer_line(job, split), {**names, "Trainer": lambda strategy, **rest: strategy})
    assert made.zero_config == ZeroConfig(stage=2, offload="cpu", gradient_dtype="parameter")
    for name in ("stage", "offload"):
        assert parsed.init_args.zero_stage.init_args[name] == getattr(made.zero_config, name)
    assert parsed.init_args.tensor_parallel_size == made.tensor_config.size == 8


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory_gib": 0}, "memory_gib=0 is not the memory of a device"),
        ({"memory_gib": "80"}, "memory_gib='80' is not the memory of a device"),
        ({"batch_size": 0}, "batch_size=0 does not count anything; use a whole number of at least 1"),
        ({"seq": -1}, "seq=-1 does not count anything"),
        ({"shape": "7e9"}, "shape='7e9' is no ModelShape"),
        ({"recompute": "some"}, "recompute='some' is unknown; use 'none' or"),
        ({"gpu": "h100"}, "GPU 'h100' is unknown"),
        ({"zero_stage": 7}, "stage 7 of ZeRO is not available"),
        ({"runtime": "ddp"}, "runtime='ddp' is unknown; use 'auto' or 'lightning_parallel'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AutoStrategy(**options)


@pytest.mark.parametrize(
    ("fixed", "device", "precision", "runtime"),
    [
        ({"zero_stage": 0}, "cpu", "16-mixed", "ddp"),
        ({"zero_stage": 3}, "cpu", "bf16-mixed", None),
        ({"zero_stage": 3}, "cuda", "bf16-mixed", "fsdp"),
        ({"zero_stage": 3}, "cuda", "16-mixed", None),
        ({"zero_stage": 0, "micro_batch": 4}, "cuda", "bf16-mixed", None),
        ({"tensor": 2, "zero_stage": 0}, "cuda", "bf16-mixed", None),
    ],
)
def test_lightning_runs_what_it_can(fixed: dict[str, Any], device: str, precision: str, runtime: str | None) -> None:
    choices = choices_of(**{"tensor": 1, "pipeline": 1, "micro_batch": 8, **fixed})
    assert lightning_runtime(choices.best, device, precision) == runtime


def test_the_least_sharding_that_costs_little_is_preferred() -> None:
    whole = choices_of(tensor=1, pipeline=1, micro_batch=8)
    seconds = {choice.plan.split.zero_stage: choice.seconds_per_sequence for choice in whole.ranked}
    fastest = min(seconds, key=seconds.__getitem__)
    assert fastest > 0
    assert seconds[0] < seconds[fastest] / (1 - NOTABLE)
    for device in ("cpu", "cuda"):
        found = simplest(whole, whole, device, "bf16-mixed")
        assert found is not None
        choice, runtime = found
        assert (choice.plan.split.zero_stage, runtime) == (0, "ddp")
    led = whole.led_by(choice)
    assert led.best is choice
    assert [c for c in led.ranked if c is not choice] == [c for c in whole.ranked if c is not choice]
    assert isinstance(led.strategy("ddp"), DDPStrategy)
    for stage in (2, 3):
        sharded = choices_of(tensor=1, pipeline=1, micro_batch=8, zero_stage=stage)
        found = simplest(sharded, sharded, "cuda", "bf16-mixed")
        assert found is not None
        assert found[1] == "fsdp"
    split = choices_of(tensor=2, pipeline=1, zero_stage=0)
    assert simplest(split, split, "cuda", "bf16-mixed") is None, "nobody else splits layers"
    quick = whole.best._replace(plan=replace(whole.best.plan, time=replace(whole.best.plan.time, compute=0.0)))
    ahead = replace(whole, ranked=(quick,))
    assert simplest(ahead, whole, "cuda", "bf16-mixed") is None, "what is notably faster is not given up"


def test_fsdp_gathers_a_block_at_a_time() -> None:
    cluster = Cluster(find_gpu("h100-80gb"), gpus_per_node=8)
    choices = AutoStrategy.plan(GPT(layers=4), cluster, 8, fixed={"tensor": 1, "pipeline": 1, "zero_stage": 3})
    policy: Any = choices.strategy("fsdp")
    assert policy.kwargs["auto_wrap_policy"]._module_classes == {type(GPT(layers=1).layers[0])}


@pytest.mark.parametrize(
    "options", [{"loss_weight": "valid_labels"}, {"non_finite": "skip"}, {"zero_stage": ZeroConfig(2)}]
)
def test_what_only_this_package_does_stays(options: dict[str, Any]) -> None:
    assert AutoStrategy(memory_gib=AMPLE)._may_be_left
    assert not AutoStrategy(memory_gib=AMPLE, **options)._may_be_left
    assert not AutoStrategy(memory_gib=AMPLE, runtime="lightning_parallel")._may_be_left


def test_fsdp_and_deepspeed_need_gpus() -> None:
    job = TrainingJob(typical_shape(2e6), Cluster(cpu_process(AMPLE), 2), 2, precision="fp32")
    assert [list(peers(job, Candidate(data=2, zero_stage=stage))) for stage in (0, 3)] == [["ddp"], []]


def test_a_successor_takes_what_the_trainer_was_given() -> None:
    plugin = AsyncCheckpointIO()
    trainer = Trainer(
        accelerator="cpu", devices=2, precision="bf16-mixed", plugins=[plugin], sync_batchnorm=True,
        strategy=AutoStrategy(memory_gib=AMPLE), **QUIET,
    )  # fmt: skip
    planner: Any = trainer.strategy
    planner.connect(GPT(layers=2))
    choices = choices_of(tensor=1, pipeline=1, zero_stage=3, micro_batch=8)
    successor: Any = choices.peer("fsdp", SUCCEEDING)
    take_over(trainer, successor)
    assert trainer.strategy is successor
    assert lightning_name(successor) == "FSDPStrategy"
    assert isinstance(trainer.precision_plugin, FSDPPrecision)
    assert trainer.precision == "bf16-mixed"
    assert (trainer.world_size, trainer.num_devices, trainer.num_nodes) == (2, 2, 1)
    assert successor.checkpoint_io is plugin
    for name in ("accelerator", "cluster_environment", "launcher", "_layer_sync"):
        assert getattr(successor, name) is getattr(planner, name) is not None


def test_states_go_to_the_host_where_nothing_fits_otherwise() -> None:
    shape = ModelShape.llama(40, 5120, 40, 13824, vocab=32000, seq=512)
    cluster = Cluster(find_gpu("rtx-4090"), gpus_per_node=1, host_gib=512)
    choices = AutoStrategy.plan(torch.nn.Identity(), cluster, 1, "bf16-mixed", shape)
    strategy = choices.strategy()
    assert (strategy.zero_config.stage, strategy.zero_config.offload) == (3, "cpu")
    assert strategy.zero_config.offload_parameters
    assert "Nothing fits without offloading" in choices.data()["advice"][0]
    assert "ZeRO-3 with offload fits" in choices.data()["advice"][1]
    small = replace(cluster, host_gib=64)
    with pytest.raises(
        ValueError, match="and states in host memory, offloading needs 194 GiB .*there are 64 GiB; use more host memory"
    ):
        AutoStrategy.plan(torch.nn.Identity(), small, 1, "bf16-mixed", shape).strategy()
    tiny = replace(cluster, gpu=replace(cluster.gpu, memory_gib=2))
    with pytest.raises(ValueError, match="states in host memory, needs .* usable are 1.9 GiB; use more devices, a"):
        AutoStrategy.plan(torch.nn.Identity(), tiny, 1, "bf16-mixed", shape).strategy()
    refused = AutoStrategy.plan(torch.nn.Identity(), cluster, 1, "bf16-mixed", shape, {"offload": "none"})
    assert not refused.ranked, "what is given is kept"


@pytest.mark.parametrize(
    ("groups", "file", "limit", "gib"),
    [
        ("0::/job/step\n", "sys/fs/cgroup/job/memory.max", 2**30, 1),
        ("0::/\n", "sys/fs/cgroup/memory.max", 2**30, 1),
        ("4:cpu:/a\n3:memory:/box\n", "sys/fs/cgroup/memory/memory.limit_in_bytes", 2**30, 1),
        ("0::/job\n", "sys/fs/cgroup/job/memory.max", "max", None),
        ("4:cpu:/a\n", "sys/fs/cgroup/memory/memory.limit_in_bytes", 2**30, None),
        ("0::/\n", "sys/fs/cgroup/memory.max", 2**62, None),
    ],
)
def test_hosts_have_what_their_control_groups_leave(
    tmp_path: Path, groups: str, file: str, limit: int | str, gib: int | None
) -> None:
    for name, text in (("proc/self/cgroup", groups), (file, f"{limit}\n")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    machine = host_memory(tmp_path / "nothing")
    assert machine > 1.0
    assert host_memory(tmp_path) == (machine if gib is None else gib)


def test_names() -> None:
    assert isinstance(StrategyRegistry.get("auto_parallel"), AutoStrategy)
    assert recognise("NVIDIA H100 80GB HBM3", 79.6).name == "h100-80gb"
    assert recognise("Tesla V100-SXM2-16GB", 15.8).name == "v100-16gb"
    assert recognise("NVIDIA L40S", 44.4).name == "l40s"
    with pytest.raises(ValueError, match="'NVIDIA T4' is not in the catalogue"):
        recognise("NVIDIA T4", 15)
