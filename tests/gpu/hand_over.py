"""Runs a whole job once on GPUs and saves what was seen. Arguments: file, ZeRO stage (0 is a plain Trainer), devices.

Stages 2 and 3 are planned for so little memory that states go to the host, which is what DeepSpeed is given.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_parallel import AutoStrategy
from lightning_parallel.strategies.succeeding import lightning_name
from tests.glue.oracle import QUIET, PeerSite
from tests.glue.story import SHAPE, TIGHT, Adam, OffloadedAdam, in_folder, of_file, of_folder, story


class OnDevices(PeerSite):
    """One rank of a plan on the machine's own devices."""

    def trainer(self, **kwargs: Any) -> Trainer:
        """A quiet Trainer with a strategy that plans, or a plain one."""
        where: dict[str, Any] = {"devices": self.replicas, "use_distributed_sampler": False}
        if self.options["zero_stage"]:
            sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
            where["strategy"] = AutoStrategy(memory_gib=TIGHT, shape=SHAPE, **sizes, **self.options)
        return Trainer(accelerator="auto", **{**QUIET, **where, **kwargs})


def hand_over(stage: int, devices: int, folder: Path) -> dict[str, Any]:
    """What a job and its user's next steps show; all ranks of a job share the folder."""
    site = OnDevices((1, 1, devices), int(os.environ.get("LOCAL_RANK", "0")), {"zero_stage": stage})
    make, weights_of = (OffloadedAdam, of_folder) if stage else (Adam, of_file)
    told = in_folder(folder, lambda: story(site, make, weights_of))
    return {"same": told["same"], "strategy": lightning_name(told["trainer"].strategy)}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    seen = hand_over(int(sys.argv[2]), int(sys.argv[3]), out.with_suffix(""))
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        torch.save(seen, out)
