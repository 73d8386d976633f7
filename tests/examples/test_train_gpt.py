"""The example as torchrun runs it, and the pieces of it that a short run would not show to be wrong."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Trainer

from lightning_parallel.tensor_parallel.plan import resolve_plan
from tests.glue.oracle import QUIET
from tests.harness import Ranks, run_script
from tests.harness.process import ROOT

# The examples are scripts beside the package, not part of it.
sys.path.insert(0, str(ROOT / "examples"))

from train_gpt import GPT, ByteData, parse_arguments, read_text, standard_library, verify

EXAMPLES = ROOT / "examples"
TINY = ["--max-steps=6", "--val-every=3", "--layers=2", "--width=32", "--context=32", "--batch-size=4", "--out=out"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of text for a run of seconds."""
    folder = tmp_path / "text"
    folder.mkdir()
    content = read_text(standard_library(), 33 * 32 * 16)
    (folder / "first.txt").write_bytes(content[:5000])
    (folder / "second.txt").write_bytes(content[5000:])
    return folder


@pytest.mark.timeout(260)
def test_example_trains_and_a_plain_trainer_finds_the_same_loss(ranks: Ranks, tmp_path: Path, text: Path) -> None:
    command = ["--strategy", "tp_pp", "--devices", "4", "--data", str(text), *TINY]
    script = EXAMPLES / "train_gpt.py"
    output, *_ = ranks(4, run_script, script, command, tmp_path, launch="lightning", timeout=240)
    parallel, plain, difference = re.findall(r"(?:run|Trainer|difference): +([\d.e+-]+)$", output, re.MULTILINE)
    # Reference: the plain run. Both print eight digits; fp32 means over the same windows.
    assert abs(float(parallel) - float(plain)) < 1e-5
    assert float(difference) < 1e-5
    assert 0 < float(plain) < math.log(256)
    assert "def " in output.partition("A sample of what it writes")[2]
    assert (tmp_path / "out").is_dir()


def test_verification_fails_when_the_loss_is_another(tmp_path: Path, text: Path, capsys: Any) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, **QUIET)
    trainer.fit(GPT(layers=1, heads=2, width=16, context=32), ByteData([str(text)], context=32, batch_size=4))
    trainer.save_checkpoint(tmp_path / "gpt.ckpt")
    found = ["--data", str(text), *TINY, "--verify", str(tmp_path / "gpt.ckpt")]
    with pytest.raises(SystemExit, match=r"the two losses differ by more than 0\.0001"):
        verify(parse_arguments([*found, "--expect", "1.0"]))
    (loss,) = re.findall(r"plain Trainer: +([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    verify(parse_arguments([*found, "--expect", loss]))


def test_windows_cover_the_text_once_and_targets_are_the_next_byte(tmp_path: Path) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(bytes(range(256)) * 4)
    data = ByteData([str(file)], context=8, batch_size=4, max_val_bytes=17)
    data.setup("fit")
    windows = [data.train[index] for index in range(len(data.train))]
    assert torch.cat([bytes_in for bytes_in, _ in windows]).tolist() == (list(range(256)) * 4)[: len(windows) * 8]
    assert all(torch.equal(targets, (bytes_in + 1) % 256) for bytes_in, targets in windows)
    assert (len(data.train), len(data.val)) == ((1024 - 17 - 1) // 8, 2)


def test_text_is_read_in_order_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "b").write_bytes(b"bb")
    (tmp_path / "folder" / "inner" / "c").write_bytes(b"cc")
    (tmp_path / "a").write_bytes(b"aa")
    paths = [tmp_path / "folder", tmp_path / "a"]
    assert [read_text(paths, limit) for limit in (100, 3, 0)] == [b"bbccaa", b"bbc", b""]
    with pytest.raises(FileNotFoundError):
        read_text([tmp_path / "missing"], 10)
    assert len(read_text(standard_library(), 4_000_000)) > 1_000_000


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="a context of 32 needs 528 bytes of text or more, got 100"):
        ByteData([str(tmp_path / "short")], context=32).setup("fit")


def test_model_looks_only_back() -> None:
    model = GPT(layers=2, heads=2, width=16, context=12).eval()
    text = torch.arange(12)[None] * 7
    changed = text.clone()
    changed[0, 8] = 3
    difference = (model(text) - model(changed)).abs().sum(-1)[0]
    assert torch.equal(difference > 0, torch.arange(12) >= 8)


def test_tied_head_is_one_parameter() -> None:
    tied, free = (GPT(layers=1, heads=2, width=16, context=8, tie_head=flag) for flag in (True, False))
    assert tied.model.head.weight is tied.model.tok.weight
    assert sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters()) == 256 * 16


def test_automatic_plan_splits_every_layer() -> None:
    plan = resolve_plan(GPT(layers=1, heads=2, width=16, context=8), "auto", 2)
    assert {rule.name.removeprefix("model."): rule.style for rule in plan.rules} == {
        "tok": "vocab",
        "blocks.0.attn.qkv": "colwise_qkv",
        "blocks.0.attn.proj": "rowwise",
        "blocks.0.mlp.fc": "colwise",
        "blocks.0.mlp.proj": "rowwise",
        "head": "colwise_gather",
    }
    assert plan.replicated == ("model.pos",)


def test_yaml_describes_the_same_run_as_the_script() -> None:
    """The two ways to start share their sizes, so that their curves can be laid side by side."""
    defaults = vars(parse_arguments([]))
    settings = yaml.safe_load((EXAMPLES / "train_gpt.yaml").read_text())
    for part, names in {"model": "layers heads width dropout lr", "data": "context batch_size"}.items():
        for name in names.split():
            assert settings[part][name] == defaults[name], name
    trainer = settings["trainer"]
    assert (trainer["max_steps"], trainer["val_check_interval"]) == (defaults["max_steps"], defaults["val_every"])
