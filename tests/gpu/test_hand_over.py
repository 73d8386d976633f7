"""On CUDA devices: a whole job that the planner leaves to DeepSpeed, with states in host memory, equals one plain GPU.

DeepSpeed compiles its Adam for the CPU when it is first asked for, for which it needs the CUDA toolkit.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.glue.oracle import assert_same
from tests.harness import run_python

SCRIPT = Path(__file__).with_name("hand_over.py")
COUNTS = [count for count in (1, 2) if count <= torch.cuda.device_count()]
SECONDS = 300
"""Compiling included."""


def run(folder: Path, stage: int, devices: int) -> dict[str, Any]:
    out = folder / f"stage-{stage}.pt"
    place = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices)))}
    done = run_python([SCRIPT, out, str(stage), str(devices)], cwd=folder, timeout=SECONDS, env=place)
    assert done.returncode == 0, done.output
    return torch.load(out, weights_only=False)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("devices", COUNTS)
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_trains_as_one_gpu_does(stage: int, devices: int, tmp_path: Path) -> None:
    plain, found = run(tmp_path, 0, 1), run(tmp_path, stage, devices)
    assert found["strategy"] == "DeepSpeedStrategy"
    assert_same(found["same"], plain["same"], f"ZeRO {stage}", atol=1e-4)
