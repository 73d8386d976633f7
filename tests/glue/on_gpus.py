"""CPU ranks that FSDP and DeepSpeed take for GPUs: what asks for CUDA gets an answer, what runs is as ever."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle

from lightning_parallel import AutoStrategy
from lightning_parallel.strategies import auto
from tests.glue.oracle import QUIET, PeerSite
from tests.glue.story import SHAPE

__all__ = ["HandedOver", "deepspeed_on_cpus", "fsdp_on_cpus"]


class OnGpus(AutoStrategy):
    """Plans for GPUs of the catalogue, and takes its own devices for such when it asks who suffices."""

    def _left_to_lightning(self, choices: Any) -> Any:
        ask = auto.simplest
        as_cuda = lambda found, whole, device, precision: ask(found, whole, "cuda", precision)  # noqa: E731
        with patch.object(auto, "simplest", as_cuda):
            return super()._left_to_lightning(choices)


class NumberedCPUs(CPUAccelerator, CUDAAccelerator):
    """Is an accelerator for CUDA to those who ask, and has CPUs, which are numbered like GPUs."""

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cpu", index) for index in range(devices)]


@dataclass(frozen=True)
class HandedOver(PeerSite):
    """A rank of a plan that is left to Lightning's own strategy; options are those of the planner.

    Attributes:
        accelerator: of the Trainer.
    """

    accelerator: Any = "cpu"

    def trainer(self, **kwargs: Any) -> Trainer:
        """A quiet Trainer with a strategy that plans."""
        sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        strategy = OnGpus(gpu="h100-80gb", shape=SHAPE, **sizes, **self.options)
        where = {"devices": self.replicas, "use_distributed_sampler": False, "accelerator": self.accelerator}
        return Trainer(**{**QUIET, "strategy": strategy, **where, **kwargs})


@contextmanager
def fsdp_on_cpus() -> Iterator[None]:
    """FSDP shards on CPUs."""
    make = FullyShardedDataParallel.__init__

    def on_cpu(self: Any, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        make(self, *args, device_id=torch.device("cpu") if device_id is None else device_id, **kwargs)

    with (
        patch.object(FullyShardedDataParallel, "__init__", on_cpu),
        # Nothing is copied to the host here: torch would free the only copy there is.
        patch.object(FlatParamHandle, "to_cpu", lambda self: nullcontext()),
        # It names CUDA.
        patch.object(FSDPPrecision, "forward_context", _autocast),
    ):
        yield


def _autocast(precision: FSDPPrecision) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled="mixed" in precision.precision)


@contextmanager
def deepspeed_on_cpus(ranks: int) -> Iterator[None]:
    """DeepSpeed shards on CPUs over gloo, and steps with torch's products instead of code that it would compile."""
    with patch.dict(os.environ, {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(ranks)}):
        import cpuinfo
        import deepspeed
        import deepspeed.ops.adam.cpu_adam

        built = {"deepspeed_shm_comm": False}
        with (
            patch.dict(deepspeed.ops.__compatible_ops__, built),
            patch.object(deepspeed.ops.adam.cpu_adam, "CPUAdamBuilder", _Kernels),
            patch.object(cpuinfo, "get_cpu_info", dict),  # asks other programs for a second, each time
            patch.object(deepspeed.comm.comm, "cdb", None),  # of a group that may be gone
        ):
            yield


class _Kernels:
    """Adam as DeepSpeed's compiled kernels compute it (arXiv:1412.6980; decoupled weight decay, arXiv:1711.05101)."""

    def load(self) -> _Kernels:
        return self

    def create_adam(self, number: int, lr: float, b1: float, b2: float, eps: float, decay: float, *rest: Any) -> None:
        self.decouples = rest[0]

    def destroy_adam(self, number: int) -> None: ...

    @torch.no_grad()
    def adam_update(self, number: int, step: int, lr: float, b1: float, b2: float, eps: float, *rest: Any) -> None:
        decay, corrects, p, gradient, mean, square = rest
        assert corrects
        assert self.decouples
        p.mul_(1 - lr * decay)
        mean.mul_(b1).add_(gradient, alpha=1 - b1)
        square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        p.addcdiv_(mean, (square / (1 - b2**step)).sqrt() + eps, value=-lr / (1 - b1**step))
