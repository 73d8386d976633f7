"""One script under every launcher: torchrun on two machines, spawn, LightningCLI. Others use the Trainer's own."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Trainer
from torch.distributed.run import main as torchrun

from lightning_parallel import TensorPipelineStrategy
from tests.glue import launched
from tests.glue.oracle import QUIET, assert_same
from tests.harness import Ranks, run_script
from tests.harness.pool import free_port
from tests.harness.process import ROOT

SCRIPT = ROOT / "tests" / "glue" / "launched.py"
EXAMPLES = ROOT / "examples"
GLOBAL_BATCH = 4
TORCHRUN = ["--nproc-per-node=2", "--start-method=fork", "--run-path"]

CHOICE = [
    "processes │ 4 = pipeline 2 x data 1 x tensor 2",
    "micro-batches │ up to 8 per batch, schedule 1f1b",
    "predicted bubble │ 11.1% of the time",  # 1 / (8 + 2 - 1)
    "tok │ vocab",
    "layers.*.attn.qkv (3) │ colwise_qkv",
    "layers.*.attn.proj (3) │ rowwise",
    "layers.*.mlp.fc1 (3) │ colwise",
    "layers.*.mlp.fc2 (3) │ rowwise",
    "head │ colwise_gather",
    "pos │ replicated",
    "0 │ layers.0 (1 block) │ 420",  # half of 216 + 64 + 144 + 128 weights and 2 x 24 others; 6 words and positions
    "1 │ layers.1 .. layers.2 (2 blocks) │ 712",
]
"""What is printed before training starts on the automatic layout of 4 devices."""

sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """What one process with a plain Trainer sees."""
    record = launched.Record(None)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        **QUIET,
        num_sanity_val_steps=0,
        callbacks=[record],
    )
    launched.fit(trainer, launched.Model(), GLOBAL_BATCH)
    return record.seen


def script(folder: Path, **options: Any) -> list[str | Path]:
    return [SCRIPT, json.dumps(options), folder]


def check(folder: Path, plain: dict[str, Any], layout: tuple[int, int, int]) -> None:
    """Every rank saw the plain run's losses and weights; replicas saw its samples between them, each once."""
    tensor, pipeline, data = layout
    world_size = tensor * pipeline * data
    seen = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world_size)]
    for rank, found in enumerate(seen):
        assert found.pop("layout") == list(layout)
        same = {key: found[key] for key in ("losses", "weights", "val_loss", "steps")}
        assert_same(same, {key: plain[key] for key in same}, f"rank {rank} of {layout}")
    # Rank order: pipeline slowest, then data, tensor fastest.
    for replica in range(data):
        members = [rank for rank in range(world_size) if rank // tensor % data == replica]
        assert len({json.dumps([seen[r]["samples"], seen[r]["validated"]]) for r in members}) == 1
    replicas = [seen[replica * tensor] for replica in range(data)]
    batches = [sorted(sum(parts, [])) for parts in zip(*(r["samples"] for r in replicas), strict=True)]
    assert batches == plain["samples"]
    once = sorted(sum((r["validated"] for r in replicas), []))
    expected = plain["validated"] + [100] * 2 * (len(once) > len(plain["validated"]))  # the last one has a stand-in
    assert once == sorted(expected)


def automatic(rank: int, world_size: int, folder: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        launched.run({"devices": world_size, "batch_size": GLOBAL_BATCH}, folder)
    return printed.getvalue()


def test_the_automatic_layout_by_name(ranks: Ranks, tmp_path: Path, plain: dict[str, Any]) -> None:
    first, *others = ranks(4, automatic, str(tmp_path), launch="lightning", timeout=110)
    check(tmp_path, plain, (2, 2, 1))
    shown = " ".join(first.split())
    for row in CHOICE:
        assert f"│ {row}" in shown, first
    assert not any("colwise_qkv" in printed for printed in others), "once, by rank 0"


def agent(rank: int, world_size: int, options: list[str], command: list[str]) -> None:
    """What `torchrun` does on one machine; it forks its processes, which spares them their imports."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGQUIT)}
    torchrun([*options, f"--node-rank={rank}", *command])  # raises if one of them fails
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_two_machines_keep_tensor_groups_inside_and_replicas_across(
    ranks: Ranks, tmp_path: Path, plain: dict[str, Any]
) -> None:
    """Two torchrun agents on one machine stand for two machines; LightningCLI reads the run from a file."""
    recording = {"class_path": "tests.glue.launched.Record", "init_args": {"out": str(tmp_path)}}
    quiet = {"num_sanity_val_steps": 0, "callbacks": [recording], **QUIET}
    trainer = {"accelerator": "cpu", "devices": 2, "num_nodes": 2, "strategy": "tp_pp", "max_epochs": 2, **quiet}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"trainer": trainer, "data": {"batch_size": GLOBAL_BATCH // 2}}))
    meeting = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    ranks(2, agent, [*TORCHRUN, *meeting], [str(SCRIPT), "fit", "--config", str(file)], launch="lightning", timeout=110)
    check(tmp_path, plain, (2, 1, 2))


def test_spawn_brings_the_weights_back_to_the_main_process(ranks: Ranks, tmp_path: Path, plain: dict[str, Any]) -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "start_method": "spawn"}
    options = script(tmp_path, devices=2, batch_size=GLOBAL_BATCH, strategy=sizes)
    ranks(1, run_script, SCRIPT, list(map(str, options[1:])), tmp_path, timeout=110)
    check(tmp_path, plain, (2, 1, 1))
    main = json.loads((tmp_path / "main.json").read_text())
    assert_same(main, {key: plain[key] for key in ("weights", "val_loss")}, "the main process")


def test_lightning_cli_from_the_examples_yaml(ranks: Ranks, tmp_path: Path) -> None:
    from train_gpt import GPT, ByteData

    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 40)
    sizes = ["--model.layers=2", "--model.width=32", "--data.context=32", "--data.batch_size=4"]
    data = [f"--data.data=[{text}]"]
    run = ["--trainer.accelerator=cpu", "--trainer.max_steps=4", "--trainer.val_check_interval=2"]
    layout = ["--trainer.devices=2", "--trainer.strategy.init_args.tensor_parallel_size=1"]
    arguments = ["fit", "--config", str(EXAMPLES / "train_gpt.yaml"), *sizes, *data, *run, *layout]
    arguments.append(f"--trainer.default_root_dir={tmp_path}")
    script = EXAMPLES / "train_gpt_cli.py"
    printed, _ = ranks(2, run_script, script, arguments, tmp_path, launch="lightning", timeout=110)
    assert "2 = pipeline 2 x data 1 x tensor 1" in printed
    assert "up to 4 per batch" in printed  # micro_batches of the file
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    # Reference: a plain Trainer validates the checkpoint.
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    module = GPT.load_from_checkpoint(checkpoint)
    (metrics,) = trainer.validate(module, ByteData([str(text)], 32, 4), verbose=False)
    states = torch.load(checkpoint, weights_only=False)["callbacks"]
    (best,) = [float(state["best_model_score"]) for name, state in states.items() if "ModelCheckpoint" in name]
    assert abs(metrics["val_bpb"] - best) < 1e-5


@pytest.mark.parametrize(
    ("choice", "sizes"),
    [
        (["--trainer.strategy=tp_pp"], ("auto", "auto")),
        (["--trainer.strategy=pp"], (1, "auto")),
        (
            [
                "--trainer.strategy=lightning_parallel.TensorPipelineStrategy",
                "--trainer.strategy.tensor_parallel_size=2",
                "--trainer.strategy.pipeline_parallel_size=1",
            ],
            (2, 1),
        ),
    ],
)
def test_lightning_cli_takes_names_and_class_paths(choice: list[str], sizes: tuple[Any, Any]) -> None:
    from train_gpt import GPT, ByteData
    from train_gpt_cli import GPTCLI

    arguments = ["--trainer.accelerator=cpu", "--trainer.devices=2", *choice]
    cli = GPTCLI(GPT, ByteData, run=False, args=arguments, seed_everything_default=False)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, TensorPipelineStrategy)
    assert (strategy.tensor_config.size, strategy.pipeline_config.size) == sizes
