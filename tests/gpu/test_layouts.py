"""On CUDA devices: every layout, offload and precision that the machine has devices for equals one plain GPU.

Several devices talk over NCCL. What one device alone can show is offload with its copies and streams, loss scaling,
waits, and two ranks that share it over gloo, which has no transfers between stages for GPUs.
"""

from __future__ import annotations

import json
import math
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.train_once import Case
from tests.harness import run_python

SCRIPT = Path(__file__).with_name("train_once.py")
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2)]
RUN_HERE = [layout for layout in LAYOUTS if math.prod(layout) <= torch.cuda.device_count()]
OFFLOADS: list[dict[str, Any]] = [
    {"stage": 1, "offload": "cpu"},
    {"stage": 2, "offload": "nvme"},
    {"stage": 3, "offload": "cpu"},
    {"stage": 3, "offload": "cpu", "offload_parameters": True},
    {"stage": 3, "offload": "nvme", "offload_parameters": True},
]


def run(folder: Path, case: Case) -> dict[str, Any]:
    out = folder / "seen.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(case.devices)))

    def machine(number: int) -> None:
        arguments: list[str | Path] = [SCRIPT, out, json.dumps(asdict(case))]
        done = run_python(arguments, cwd=folder, timeout=90, env={**place, "NODE_RANK": str(number)})
        assert done.returncode == 0, done.output

    with ThreadPoolExecutor(case.machines) as pool:
        list(pool.map(machine, range(case.machines)))
    return json.loads(out.read_text())


class Plain:
    """Runs of one plain GPU, each once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory = factory
        self.seen: dict[str, dict[str, Any]] = {}

    def __call__(self, precision: str) -> dict[str, Any]:
        if precision not in self.seen:
            self.seen[precision] = run(self.factory.mktemp("plain"), Case(precision=precision))
        return self.seen[precision]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(tmp_path_factory)


def check(plain: Plain, folder: Path, case: Case, atol: float = 1e-5) -> None:
    expected, seen = plain(case.precision), run(folder, case)
    assert seen["losses"] == pytest.approx(expected["losses"], abs=atol)
    for name, values in expected["weights"].items():
        assert seen["weights"][name] == pytest.approx(values, abs=atol), name


@pytest.mark.parametrize("layout", RUN_HERE, ids=str)
def test_layout_equals_one_gpu(layout: tuple[int, int, int], plain: Plain, tmp_path: Path) -> None:
    tensor, pipeline, data = layout
    check(plain, tmp_path, Case(tensor, pipeline, devices=tensor * pipeline * data))


@pytest.mark.parametrize("layout", [x for x in RUN_HERE if x[1] > 1], ids=str)
def test_zero_bubble_equals_one_gpu(layout: tuple[int, int, int], plain: Plain, tmp_path: Path) -> None:
    tensor, pipeline, data = layout
    check(plain, tmp_path, Case(tensor, pipeline, devices=tensor * pipeline * data, schedule="zero-bubble"))


def test_two_replicas_on_one_gpu_equal_one(plain: Plain, tmp_path: Path) -> None:
    check(plain, tmp_path, Case(1, machines=2))


@pytest.mark.parametrize("zero", OFFLOADS, ids=str)
def test_offload_equals_one_gpu(zero: dict[str, Any], plain: Plain, tmp_path: Path) -> None:
    check(plain, tmp_path, Case(zero=zero))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("zero", [None, {"stage": 2, "offload": "cpu"}], ids=str)
def test_half_precision_is_near_one_gpu(
    precision: str, zero: dict[str, Any] | None, plain: Plain, tmp_path: Path
) -> None:
    check(plain, tmp_path, Case(1, zero=zero, precision=precision), atol=0.02)


@pytest.mark.parametrize(("stage", "name"), [(0, "DDPStrategy"), (3, "FSDPStrategy")])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL has one rank on a GPU")
def test_lightning_runs_a_plan(stage: int, name: str, plain: Plain, tmp_path: Path) -> None:
    seen = run(tmp_path, Case(planned=stage, devices=2))
    assert seen["strategy"] == name
    assert seen["losses"] == pytest.approx(plain("32-true")["losses"], abs=1e-5)


def test_step_never_waits_for_the_device(tmp_path: Path) -> None:
    run(tmp_path, Case(1, watch=True))
