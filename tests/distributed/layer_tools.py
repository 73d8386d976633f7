"""What the tests of split layers share: filling, slicing, comparing, counting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.tensor_parallel.sharding import ShardSpec
from lightning_parallel.tensor_parallel.shards import shard_tensor
from tests.distributed.formulas import wave

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def fill(module: AnyModule) -> AnyModule:
    """Set every parameter by formula, each with another phase."""
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            parameter.copy_(wave(*parameter.shape, phase=place))
    return module


def put_shards(module: nn.Module, spec: ShardSpec) -> None:
    """Put this rank's slices into the weight's data, and into a bias that belongs to split outputs."""
    rank = dist.get_rank()
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
    weight.data = shard_tensor(weight.data, spec, rank)
    if bias is not None and spec.dim == (1 if hasattr(module, "nf") else 0):
        bias.data = shard_tensor(bias.data, replace(spec, dim=0), rank)


def close(actual: Tensor | None, expected: Tensor | None, atol: float) -> None:
    """Both exist and are equal within `atol`."""
    assert actual is not None
    assert expected is not None
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=0, atol=atol)


class Counter:
    """Counts all-reduces while it is open."""

    def __init__(self) -> None:
        self.all_reduces = 0

    def __enter__(self) -> Counter:
        self._original = dist.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.all_reduces += 1
            return self._original(*args, **kwargs)

        dist.all_reduce = counted
        return self

    def __exit__(self, *exception: object) -> None:
        dist.all_reduce = self._original
