"""Whole jobs that the planner leaves to Lightning's FSDP and DeepSpeed: they train as one plain process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from tests.glue.on_gpus import HandedOver, NumberedCPUs, deepspeed_on_cpus, fsdp_on_cpus
from tests.glue.oracle import Site, assert_same
from tests.glue.story import (
    BATCH,
    EPOCHS,
    TIGHT,
    Adam,
    Fails,
    Model,
    OffloadedAdam,
    Seen,
    in_folder,
    of_file,
    of_folder,
    story,
)
from tests.glue.training import Tokens
from tests.harness import Ranks

Case = tuple[int, dict[str, Any]]
"""ZeRO stage, options of the Trainer."""
CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
FSDP: list[Case] = [(2, {}), (3, CLIPPED), (2, {"precision": "bf16-mixed"}), (3, {"precision": "bf16-mixed"})]
SCALED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
DEEPSPEED: list[Case] = [(2, {}), (3, SCALED)]


def left_with_shards(site: Site, module: LightningModule, name: str, calls: bool) -> None:
    """Nobody takes the shards in a module for the weights."""
    left = f"{name} left shards of the trained weights in {type(module).__name__}; go on with the same Trainer"
    batch = torch.stack([Tokens(2)[index][:-1] for index in range(2)])
    uses: list[Callable[[], Any]] = [module.state_dict, lambda: module.load_state_dict({})]
    uses += [lambda: site.trainer(max_epochs=1).fit(module, site.loader(Tokens(16), BATCH))]
    uses += [lambda: module(batch)] if calls else []
    for use in uses:
        with pytest.raises(RuntimeError, match=left):
            use()


def after_an_exception(site: Site, make: Callable[[], LightningModule], shards: bool) -> dict[str, list[float]]:
    """What a trainer does with a new module, after it failed with one."""
    seen, module = Seen(), make()
    loader, validation = (site.loader(Tokens(count * BATCH), BATCH) for count in (4, 2))
    trainer = site.trainer(max_epochs=EPOCHS, callbacks=[seen, Fails()])
    with pytest.raises(ArithmeticError):
        trainer.fit(module, loader, validation)
    if shards:
        for use in (module.state_dict, lambda: trainer.fit(module, loader, validation)):
            with pytest.raises(RuntimeError, match="the run ended with an exception, which left each rank's weights"):
                use()
    else:
        assert {tuple(value.shape) for value in module.state_dict().values()} == {
            tuple(value.shape) for value in make().state_dict().values()
        }
    seen.taken()
    del trainer.callbacks[-1]  # type: ignore[attr-defined]
    fresh = site.trainer(max_epochs=EPOCHS, callbacks=[seen])
    fresh.fit(make(), loader, validation)
    return seen.taken()


def by_fsdp(rank: int, world_size: int) -> Any:
    found = []
    for number, (stage, options) in enumerate(FSDP):
        site = HandedOver((1, 1, world_size), rank, {"memory_gib": 8.0, "zero_stage": stage})
        with fsdp_on_cpus():
            told = in_folder(Path(str(number)), lambda: story(site, Model, of_file, **options))  # noqa: B023
            strategy = told.pop("trainer").strategy
            assert isinstance(strategy, FSDPStrategy)
            assert strategy.sharding_strategy.name == {2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}[stage]
            module = told.pop("module")
            assert sum(p.numel() for p in module.parameters()) < sum(p.numel() for p in Model().parameters())
            left_with_shards(site, module, "FSDP", calls=True)
            told["file"] = torch.load(f"{number}/after.ckpt", weights_only=False) if rank == 0 else None
            if stage == 3 and not options.get("precision"):
                told["after an exception"] = after_an_exception(site, Model, shards=True)
        found.append(told)
    return found


def by_deepspeed(rank: int, world_size: int) -> Any:
    found = []
    with deepspeed_on_cpus(world_size):
        for number, (stage, options) in enumerate(DEEPSPEED):
            planned = {"memory_gib": TIGHT, "zero_stage": stage}
            site = HandedOver((1, 1, world_size), rank, planned, accelerator=NumberedCPUs())
            told = in_folder(Path(str(number)), lambda: story(site, OffloadedAdam, of_folder, **options))  # noqa: B023
            strategy = told.pop("trainer").strategy
            assert isinstance(strategy, DeepSpeedStrategy)
            sharding = strategy.config["zero_optimization"]
            assert (sharding["stage"], sharding["offload_optimizer"]["device"]) == (stage, "cpu")
            assert ("offload_param" in sharding) == (stage == 3)
            module = told.pop("module")
            if stage == 3:
                left_with_shards(site, module, "DeepSpeed", calls=False)
            else:
                told["weights"] = {name: value.clone() for name, value in module.state_dict().items()}
            told["after an exception"] = after_an_exception(site, OffloadedAdam, shards=stage == 3)
            found.append(told)
    return found


def plain_runs(cases: list[Case], make: Callable[[], LightningModule], folder: Path) -> list[Any]:
    found = []
    for number, (_, options) in enumerate(cases):
        told = in_folder(folder / str(number), lambda: story(Site(), make, of_file, **options))  # noqa: B023
        found.append(told["same"])
    return found


def check(both: list[Any], number: int, expected: Any, atol: float) -> None:
    """What is promised to be that of one process is; what each rank logs is its own."""
    own = []
    for rank, found in enumerate(both):
        assert_same(found[number]["same"], expected, f"case {number}, rank {rank}", atol)
        own.append(found[number]["own"])
    assert own[0] != own[1]


def test_fsdp_trains_saves_and_goes_on_as_one_process_does(ranks: Ranks, tmp_path: Path) -> None:
    both = ranks(2, by_fsdp, launch="lightning", timeout=100)
    plain = plain_runs(FSDP, Model, tmp_path)
    for number, (_, options) in enumerate(FSDP):
        narrow = options.get("precision") is not None
        check(both, number, plain[number], atol=1e-3 if narrow else 1e-5)
        found = both[0][number]["same"]["fit"]["loss"]
        assert_same(found, plain[number]["fit"]["loss"], "losses", 2e-4 if narrow else 1e-5)
        file = both[0][number]["file"]
        expected = torch.load(tmp_path / str(number) / "after.ckpt", weights_only=False)
        assert list(file) == list(expected), "a plain Trainer reads it"
        for key, state in expected["optimizer_states"][0]["state"].items():
            assert_same(file["optimizer_states"][0]["state"][key], state, f"state {key}", 1e-2 if narrow else 1e-5)
    assert_same(both[0][1]["after an exception"], plain[0]["fit"], "a module after one that failed")
    fresh = Site().trainer(max_epochs=EPOCHS + 1)
    torch.save(both[0][0]["file"], tmp_path / "theirs.ckpt")
    module = Model()
    fresh.fit(module, Site().loader(Tokens(4 * BATCH), BATCH), ckpt_path=tmp_path / "theirs.ckpt")
    assert_same(dict(module.state_dict()), dict(plain[0]["resumed"]["weights"]), "resumed by a plain Trainer")
    narrow, wide = (plain[number]["fit"]["loss"][0] for number in (2, 0))
    assert abs(narrow - wide) > 5e-4, "a run in 32 bit would be told from one in 16"


def test_deepspeed_trains_saves_and_goes_on_as_one_process_does(ranks: Ranks, tmp_path: Path) -> None:
    both = ranks(2, by_deepspeed, launch="lightning", timeout=100)
    plain = plain_runs(DEEPSPEED, Adam, tmp_path)
    for number in range(len(DEEPSPEED)):
        check(both, number, plain[number], atol=1e-5)
    for found in both:
        for case in found:
            assert_same(case["after an exception"], plain[0]["fit"], "a module after one that failed")
        assert_same(found[0]["weights"], dict(plain[0]["fitted on"]["weights"]), "what ZeRO 2 leaves in the module")
