"""Jobs that DeepSpeed trains in a plain loop: Lightning's strategy for it refuses CPUs."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.bare_jobs import start_group, train
from tests.benchmarks.job import Run
from tests.benchmarks.model import GPT, loss_of, optimizer_of

BUCKET_ELEMENTS = 5_000_000
"""As many as our buckets of 25 MB have, nearly; the default would put the whole model into one."""


def _train(run: Run, stage: int, offload: bool = False) -> list[Tensor]:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(run.ranks)}
    import deepspeed

    start_group()
    sharding: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": False,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "stage3_param_persistence_threshold": 0,
    }
    if offload:
        sharding["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": run.sizes.batch // run.ranks,
        "gradient_clipping": 0.0,  # it would clip at 1 where nothing is said
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": sharding,
    }
    model = GPT(run.sizes)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    assert dist.get_backend() == "gloo", "all jobs talk through the same backend"

    def step(ids: Tensor, target: Tensor) -> Tensor:
        loss = loss_of(engine(ids), target)
        engine.backward(loss)
        engine.step()
        return loss

    return train(run, step, run.rank, run.ranks)


def stage1(run: Run) -> list[Tensor]:
    """Optimizer state sharded."""
    return _train(run, 1)


def stage2(run: Run) -> list[Tensor]:
    """Gradients too."""
    return _train(run, 2)


def stage3(run: Run) -> list[Tensor]:
    """Parameters too."""
    return _train(run, 3)


def stage2_offload(run: Run) -> list[Tensor]:
    """Stage 2, stepped in host memory by the optimizer that all jobs use."""
    return _train(run, 2, offload=True)
