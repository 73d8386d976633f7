"""The command line: answers as JSON and as text, and errors that are one line."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy
from torch import nn

from lightning_parallel import strategies
from lightning_parallel.cli import main
from lightning_parallel.commands import plan
from lightning_parallel.commands.doctor import LAUNCH_VARIABLES, environment_problems
from lightning_parallel.commands.modules import ASSUMED_SEQ, parameter_count, shape_of_module, tells_seq
from lightning_parallel.planner.hardware import GPUS
from lightning_parallel.strategies import ZeroConfig


def test_explain_bubble_prints_the_simulated_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "bubble", "--stages", "2", "--micro-batches", "3"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "stage 0 | F0 F1 .  .  B0 -- F2 B1 -- .  B2 --" in text
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["bubble"] == pytest.approx(1 / 4)
    assert data["bubble_over_ideal"] == pytest.approx(1 / 3)
    assert data["peak_live_micro_batches"] == [2, 1]
    assert all(line in text for line in data["grid"])


def test_explain_bubble_tells_what_a_split_backward_saves_and_puts_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "bubble", "--stages", "4", "--micro-batches", "8", "--schedule", "zero-bubble"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "idle: 11.1% of the step, or 12.5% on top" in text
    assert "without the split it is (p - 1) / (m + p - 1) = 3/11 = 27.3%" in text
    assert "keeps at once: 4, 3, 2, 1 and whose W it has put off at most: 1, 2, 3, 4" in text


def test_plan_answers_as_data_and_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--layers", "32", "--hidden", "4096", "--heads", "32", "--ffn", "11008", "--vocab", "32000"]
    arguments += ["--gpu", "a100-80gb", "--global-batch", "64", "--tp", "4", "--pp", "2"]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"]["parameters"] == 6_738_415_616
    best = data["plans"][0]
    assert (best["layout"]["tensor"], best["layout"]["pipeline"], best["layout"]["data"]) == (4, 2, 1)
    assert best["strategy"]["class_path"] == "lightning_parallel.strategies.TensorPipelineStrategy"
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert best["trainer"] in text
    assert best["yaml"] in text
    assert "Tensor parallelism 4 stays inside the node" in text


def test_what_a_module_prints_is_no_part_of_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("print('imported')", "from torch import nn", "def Model():", "    print('built')")
    blocks = "[nn.Linear(8, 8) for _ in range(3)]"
    layers = f"    return nn.Sequential(nn.Embedding(9, 8), nn.Sequential(*{blocks}))"
    (tmp_path / "noisy_model.py").write_text("\n".join((*lines, layers)))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--module", "noisy_model:Model", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model"]["parameters"] == 9 * 8 + 3 * (8 * 8 + 8)
    assert captured.err.split() == ["imported", "built"]


def test_a_slower_gpu_is_slower_in_all_precisions(capsys: pytest.CaptureFixture[str]) -> None:
    """Attention runs in 16 bit beside products in 8."""
    arguments = ["plan", "--params", "7e9", "--seq", "131072", "--gpu-memory", "1000", "--precision", "fp8", "--json"]
    for peak in ("10", "20"):
        assert main([*arguments, "--gpu-tflops", peak]) == 0
        assert json.loads(capsys.readouterr().out)["plans"][0]["hfu"] < 1


@pytest.mark.parametrize(
    ("layout", "expected", "also"),
    [
        (["--tp", "2", "--pp", "2", "--zero", "1"], "TensorPipelineStrategy", 0),
        (["--tp", "1", "--pp", "1", "--zero", "2"], "ZeroStrategy", 2),
        (["--tp", "1", "--pp", "1", "--zero", "3"], "ZeroStrategy", 2),
        (["--tp", "1", "--pp", "1", "--zero", "2", "--offload", "cpu"], "ZeroStrategy", 1),
        (["--tp", "1", "--pp", "1", "--zero", "3", "--offload", "nvme"], "ZeroStrategy", 1),
    ],
)
def test_the_yaml_and_the_trainer_line_make_the_same_strategy(
    layout: list[str], expected: str, also: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--params", "7e9", "--gpu", "a100-80gb", "--global-batch", "64", *layout]
    assert main([*arguments, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    options, (_, _, name) = best["strategy"]["init_args"], best["strategy"]["class_path"].rpartition(".")
    names = {"ZeroConfig": ZeroConfig, expected: getattr(strategies, expected)}
    strategy = eval(best["trainer"], {**names, "Trainer": lambda strategy, **rest: strategy})
    assert (name, strategy.zero_config.stage) == (expected, int(layout[layout.index("--zero") + 1]))
    assert strategy.zero_config.gradient_dtype == "parameter"
    assert len(best["alternatives"]) == also
    assert all(f"      {name}: {json.dumps(value)}" in best["yaml"].splitlines() for name, value in options.items())
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=Strategy)
    parsed = parser.parse_object({"strategy": yaml.safe_load(best["yaml"])["trainer"]["strategy"]})
    made = getattr(parser, "instantiate", parser.instantiate_classes)(parsed).strategy
    assert made.zero_config == strategy.zero_config


@pytest.mark.parametrize(
    ("options", "precisions"),
    [
        ("", {"ZeroStrategy": "bf16-true", "DeepSpeedStrategy": "bf16-true"}),
        ("--states autocast --gpu b200", {"ZeroStrategy": "bf16-mixed"}),
        ("--zero 3", {"ZeroStrategy": "bf16-true", "DeepSpeedStrategy": "bf16-true", "FSDPStrategy": "bf16-mixed"}),
        ("--zero 0 --tp 4 --pp 2", {"TensorPipelineStrategy": "bf16-mixed"}),
        ("--zero 1 --tp 4 --pp 1", {"TensorPipelineStrategy": "bf16-true"}),
        ("--zero 1 --tp 4 --pp 1 --states autocast", {"TensorPipelineStrategy": "bf16-mixed"}),
        ("--zero 0 --tp 1 --pp 1 --gpu b200", {"DDPStrategy": "bf16-mixed"}),
        ("--zero 0 --tp 1 --pp 1 --gpu b200 --states true", {"DDPStrategy": "bf16-true"}),
        ("--zero 3 --states true", {"FSDPStrategy": "bf16-true"}),
        ("--precision fp16 --zero 1 --tp 2", {"TensorPipelineStrategy": "16-true"}),
        ("--precision fp16 --zero 1 --tp 2 --states autocast", {"TensorPipelineStrategy": "16-mixed"}),
        ("--precision fp32 --tp 4 --pp 1 --zero 1", {"TensorPipelineStrategy": "32-true"}),
        ("--precision fp8", {"ZeroStrategy": "transformer-engine", "DeepSpeedStrategy": "transformer-engine"}),
    ],
)
def test_the_precision_keeps_the_states_that_were_planned(
    options: str, precisions: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--params", "7e9", "--recompute", "full", "--json", *options.split()]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    lines = [best["trainer"], *best["alternatives"]]
    found = {re.findall(r"strategy=(\w+)\(", line)[0]: re.findall(r"precision='(.*?)'", line)[0] for line in lines}
    assert found == precisions
    assert yaml.safe_load(best["yaml"])["trainer"]["precision"] == found[lines[0].split("=")[1].split("(")[0]]
    unsharded = best["layout"]["zero_stage"] == 0 and "true" not in options
    assert ("Where nothing is sharded" in best["precision_note"]) == unsharded


@pytest.mark.parametrize(("precision", "expected"), [("bf16", "plain"), ("fp8", "fused")])
def test_kernels_are_those_that_come_with_the_precision(
    precision: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--params", "7e9", "--precision", precision, "--json"]
    seconds = []
    for kernels in ("auto", expected):
        assert main([*arguments, "--kernels", kernels]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["plans"][0]["step_seconds"]["total"])
    assert seconds[0] == seconds[1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "a model is given by one of"),
        (["--params", "7e9", "--layers", "3"], "a model is given by one of"),
        (["--layers", "3"], "also needs --hidden and --heads"),
        (
            ["--params", "7e9", "--vocab", "99", "--plain"],
            "--params already tells what --vocab and --plain would; leave",
        ),
        (["--params", "7e9", "--heads", "16", "--seq", "9"], "--params already tells what --heads would; leave it out"),
        (["--config", "mixtral.json", "--untied"], "--config already tells what --untied would"),
        (["--module", "torch.nn:Linear", "--heads", "4", "--gated"], "--module already tells what --gated would"),
        (["--params", "7e9", "--gpu", "h100"], "GPU 'h100' is unknown"),
        (["--params", "7e9", "--gpu", "v100-32gb"], "v100-32gb has no bf16 matrix units"),
        (["--module", "torch.nn:Nothing"], "torch.nn has no Nothing"),
        (["--module", "torch.nn:Linear"], "cannot be built without arguments"),
        (["--module", "mine:Thing"], "makes a Thing, which is no module of torch"),
        (["--module", "nosuch:Thing"], "cannot be imported: No module named 'nosuch'"),
        (["--params", "7e9", "--tp", "3"], "use 1, 2, 4 or 8"),
        (["--layers", "4", "--hidden", "512", "--heads", "8", "--kv-heads", "7"], "use 1, 2, 4 or 8"),
        (["--params", "7e9", "--schedule", "1f1b", "--gpus-per-node", "1"], "no layout has more than one stage"),
        (["--config", "mixtral.json"], "'mixtral' is a mixture of experts, which is not planned: tokens would be sent"),
    ],
)
def test_a_plan_without_sense_is_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("class Thing: pass")
    Path("mixtral.json").write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 8}))
    assert main(["plan", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_plan_says_how_to_recompute(recompute: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "7e9", "--recompute", recompute, "--tp", "4"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False" in text) == (recompute != "none")


def test_experts_are_refused_by_name() -> None:
    class SparseMoeBlock(nn.Module):
        pass

    module = nn.ModuleDict({"tokens": nn.Embedding(10, 8), "mlp": SparseMoeBlock()})
    with pytest.raises(ValueError, match="mlp is a mixture of experts, which is not planned"):
        shape_of_module(module)


def test_parameters_on_the_meta_device_are_counted_one_by_one() -> None:
    with torch.device("meta"):
        assert parameter_count(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))) == 220


def test_the_shape_of_a_module_is_read_off_its_blocks() -> None:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        module = nn.ModuleDict({"tokens": nn.Embedding(1000, 64), "layers": nn.TransformerEncoder(layer, 6).layers})
    shape = shape_of_module(module)
    assert (shape.layers, shape.hidden, shape.heads, shape.ffn, shape.vocab) == (6, 64, 4, 256, 1000)
    assert shape.parameters == sum(p.numel() for p in module.parameters())
    assert shape.seq == ASSUMED_SEQ
    assert not tells_seq(module)
    with torch.device("meta"):
        module["positions"] = nn.Embedding(96, 64)
    assert shape_of_module(module).seq == 96
    assert tells_seq(module)


def test_the_configuration_inside_a_module_tells_more_than_its_blocks() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(12345, device="meta"))
            sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 3, "num_key_value_heads": 2}
            fields = {"model_type": "llama", "vocab_size": 100, "intermediate_size": 128, **sizes}
            self.config = SimpleNamespace(to_dict=lambda: fields)

    shape = shape_of_module(nn.ModuleDict({"model": Model()}), seq=32)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.gated, shape.seq) == (3, 8, 2, True, 32)
    assert shape.parameters == 12345
    assert tells_seq(Model())


def test_the_doctor_tells_versions_names_and_devices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["versions"]["torch"] == torch.__version__
    assert "tp_pp" in data["strategies"]
    assert len(data["devices"]) == torch.cuda.device_count()
    assert data["problems"] == []
    monkeypatch.setenv("RANK", "0")
    assert main(["doctor"]) == 1
    assert "RANK set without LOCAL_RANK" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, None),
        ({"WORLD_SIZE": "2"}, "set without RANK"),
        (dict.fromkeys(LAUNCH_VARIABLES, "1"), "RANK=1 is outside of WORLD_SIZE=1"),
        ({**dict.fromkeys(LAUNCH_VARIABLES, "1"), "WORLD_SIZE": "2"}, None),
    ],
)
def test_launch_variables_must_fit_together(environment: dict[str, str], text: str | None) -> None:
    problems = environment_problems(environment)
    assert len(problems) == (text is not None)
    assert text is None or text in problems[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: COMMAND; see lightning-parallel --help"),
        ("plan --params 7e9 --tp 0", "argument --tp: 0 is not within 1 .. 1e+09; see lightning-parallel plan --help"),
        ("plan --params 7e9 --micro-batch -1", "argument --micro-batch: -1 is not within"),
        ("plan --params 7e9 --virtual-stages 1.5", "argument --virtual-stages: '1.5' is no whole number"),
        ("plan --params 7e9 --global-batch 0", "argument --global-batch: 0 is not within"),
        ("plan --params 1e400", "argument --params: 1e400 is not within"),
        ("plan --params 1e19", "--params counts parameters, 1e6 to 1e18, such as 7e9, got 1e+19"),
        ("plan --params seven", "argument --params: 'seven' is no number"),
        ("plan --params 7B", "argument --params: '7B' is no number; write 7e9"),
        ("scaling fit nosuch.csv", "there is no file nosuch.csv"),
        ("plan --params 7e9 --host-memory nan", "argument --host-memory: nan is not within 0 .. 1e+20"),
        ("plan --params 7e9 --price inf", "argument --price: inf is not within"),
        ("plan --params 7e9 --trainable 2", "trainable is a part above 0 and up to 1, got 2.0; use 1.0"),
        ("plan --params 7e9 --schedule 1f1b --virtual-stages 4", "schedule 1f1b has one model chunk per rank, got"),
        ("plan --module ..x:Y", "--module ..x:Y cannot be imported: "),
        ("plan --module .:Y", "--module .:Y names no class of a module; write package.module:Class"),
        ("plan --layers 4 --hidden 256 --heads 6", "hidden 256 is not a multiple of 6 heads; name the head_dim"),
        ("plan --params 7e9 --zero 5", "argument --zero: invalid choice: 5"),
        (
            "plan --params 7e9 --schedule gpipe --tp 8",
            "tensor=8 leaves none of the 8 GPUs for a pipeline, and a schedule",
        ),
        ("explain bubble --plot /nosuch/drawing.png", "--plot /nosuch/drawing.png cannot be written: No such file"),
        ("explain bubble --stages 0", "argument --stages: 0 is not within 1 .. 64"),
        ("explain ring --ranks 100000", "argument --ranks: 100000 is not within 1 .. 64"),
        ("explain zero --params nan", "argument --params: nan is not within"),
        ("scaling optimal --flops many", "argument --flops: invalid float value: 'many'"),
        ("scaling fit", "the following arguments are required: TABLE"),
    ],
)
def test_wrong_values_end_in_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith(f"lightning-parallel: error: {message}")
    assert len(streams.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said", "unsaid"),
    [
        (
            "plan --params 7e9 --tokens 1e12 --price 2",
            ["the whole run of 1T tokens: 143 days, 27,384 GPU-hours, cost 54,769 at 2 per GPU-hour", "49.7/49.7"],
            [],
        ),
        (
            "plan --params 70e9 --gpu a100-80gb --nodes 4 --tp 8 --pp 4 --zero 0",
            [
                "total of each stage: 48.4 GiB, ",
                "host memory of a node: ",
                "at the start: every process makes its own layers in 32 bit, from a model built on the meta device; ",
                "2086.2 GiB where it builds the whole model first",
                "tokens per day, ",
                "GPU-hours",
            ],
            ["of offloaded states"],
        ),
        (
            "plan --params 13e9 --gpu rtx-4090 --gpus-per-node 1 --global-batch 4",
            ["GiB at the start, 193.7 GiB of offloaded states", "activations │ 6.2 GiB │ estimated"]
            + ["at the start: every process builds the model in 32 bit", "one step of 4 sequences"],
            ["total of each stage", "builds the whole model first"],
        ),
        ("explain ring --ranks 4", ["24 sends", "= 1.5 times the vector, less than twice however many"], []),
        (
            "plan --params 7e9 --recompute full",
            ["32 layers, hidden 4096", "8 sequences of 4096 tokens per step", "adamw", "no --gpu is given: planned for"]
            + ["states 'mixed': bytes per parameter of weights 2, gradients 2", "(1 node)"],
            ["whole run"],
        ),
        (
            "plan --params 70e9 --gpu a100-80gb",
            ["layouts that do not fit", "layouts that do not fit besides: 18; --json lists all"],
            ["no --gpu", "cannot be run like this"],
        ),
        (
            "plan --params 7e9 --schedule interleaved",
            ["a schedule is given: only pipelines are planned", "cannot be run with Lightning: no strategy here runs"],
            ["Trainer(", "trainer:", "1x1x8"],
        ),
        (
            "plan --params 7e9 --gpu h100-80gb --global-batch 7",
            ["layouts that cannot be run like this: tensor", "7 does not split over 8 data ranks", "1x1x8"],
            ["do not fit", "of the first layout"],
        ),
        ("plan --params 7e9 --gpu h100-80gb", ["sharding the optimizer states leaves"], ["no --gpu", "only pipelines"]),
        ("explain collectives --ranks 16", ["rank 15", "--json lists every rank"], ["rank 5"]),
        ("explain ring --ranks 60", ["in 118 steps; --json lists each"], ["all-gather"]),
        ("explain zero --ranks 1", ["over 1 rank ("], []),
        ("scaling table", ["hoffmann-3-printed", "1.45B/11.5B"], []),
    ],
)
def test_answers_say_what_matters_in_eighty_columns(
    arguments: str, said: list[str], unsaid: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 0
    out = capsys.readouterr().out
    text = " ".join(out.split())
    assert [part for part in said if part not in text] == []
    assert [part for part in unsaid if part in text] == []
    assert max((len(line) for line in out.splitlines() if line.startswith(("│", "┏", "└"))), default=0) <= 80
    assert out.count("\n") < 120


def test_planning_and_explaining_need_neither_torch_nor_numpy() -> None:
    code = """
import sys
for name in ("torch", "numpy", "lightning", "transformers", "matplotlib"):
    sys.modules[name] = None
from lightning_parallel.cli import main
for arguments in ("plan --params 7e9", "explain bubble", "explain topology", "scaling table"):
    assert main(arguments.split()) == 0, arguments
for arguments in ("plan --config gpt2", "plan --module a:B", "scaling plot"):
    assert main(arguments.split()) == 2, arguments
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == 3
    assert [next(n for n in ("transformers", "torch", "numpy") if n in line) for line in errors] == [
        "transformers", "torch", "numpy"
    ]  # fmt: skip


def test_a_model_is_planned_by_its_name(tmp_path: Path) -> None:
    """As transformers finds it in its cache, without a network; a name that is not there is one line of error."""
    stored = tmp_path / "hub" / "models--org--small"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("1a2b")
    (stored / "snapshots" / "1a2b").mkdir(parents=True)
    sizes = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    (stored / "snapshots" / "1a2b" / "config.json").write_text(json.dumps(sizes))
    code = """
from lightning_parallel.cli import main
assert main("plan --config org/other --gpu h100-80gb".split()) == 2
assert main("plan --config org/small --gpu h100-80gb --json".split()) == 0
"""
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["parameters"] == 124_439_808
    assert "transformers finds no configuration named 'org/other'" in done.stderr


def test_heads_of_their_own_width_are_planned_by_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                "--layers",
                "4",
                "--hidden",
                "256",
                "--heads",
                "6",
                "--kv-heads",
                "3",
                "--head-dim",
                "32",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["model"]["head_dim"] == 32


@pytest.mark.parametrize(("given", "said"), [([], True), (["--host-memory", "256"], False)])
def test_room_for_what_is_offloaded_is_assumed_aloud(
    capsys: pytest.CaptureFixture[str], given: list[str], said: bool
) -> None:
    assert main(["plan", "--params", "13e9", "--gpu", "rtx-4090", "--gpus-per-node", "1", "--json", *given]) == 0
    found = json.loads(capsys.readouterr().out)["assumed"]
    text = "no --host-memory is given: whatever is offloaded is taken to find room there"
    assert (text in found) == said


def test_what_is_faster_and_not_run_here_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "7e9", "--pp", "4", "--global-batch", "64"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "faster, but nothing here runs them" in text
    assert "the schedule interleaved with" in text


def test_every_option_of_plan_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers())
    (commands,) = parser._subparsers._group_actions  # type: ignore[union-attr]
    options = commands.choices["plan"]._actions  # type: ignore[index,call-overload]
    assert [option.dest for option in options if not option.help] == []
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in GPUS)


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    assert "--offload" in capsys.readouterr().out
