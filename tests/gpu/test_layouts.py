"""On CUDA devices, over NCCL: every layout that the machine has devices for equals one plain GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_python

SCRIPT = Path(__file__).with_name("train_once.py")
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2)]


def run_layout(folder: Path, tensor: int, pipeline: int, devices: int, *extra: str) -> dict[str, Any]:
    out = folder / f"{tensor}-{pipeline}-{devices}-{len(extra)}.json"
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices)))}
    arguments = [SCRIPT, out, str(tensor), str(pipeline), str(devices), *extra]
    done = run_python(arguments, cwd=folder, timeout=90, env=visible)
    assert done.returncode == 0, done.output
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_layout(tmp_path_factory.mktemp("plain"), 0, 1, 1)


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if math.prod(x) <= torch.cuda.device_count()], ids=str)
def test_layout_equals_one_gpu(layout: tuple[int, int, int], plain: dict[str, Any], tmp_path: Path) -> None:
    tensor, pipeline, data = layout
    seen = run_layout(tmp_path, tensor, pipeline, tensor * pipeline * data)
    assert seen["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    for name, values in plain["weights"].items():
        assert seen["weights"][name] == pytest.approx(values, abs=1e-5), name


def test_step_never_waits_for_the_device(tmp_path: Path) -> None:
    run_layout(tmp_path, 1, 1, 1, "watch")
