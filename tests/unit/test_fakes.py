"""Fakes made directly are what torch makes of a tensor, and know what shares memory in the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_parallel.fakes import fake_like
from lightning_parallel.pipeline.planning import observe_step

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4),
        torch.ones(3, 4, dtype=torch.int64).t(),
        torch.ones(()),
        torch.ones(0, 2),
        nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(3), requires_grad=False),
        nn.Parameter(torch.ones(2, 2, device="meta")),
    ],
    ids=lambda t: f"{type(t).__name__} {tuple(t.shape)} {t.dtype} {t.device}",
)
def test_a_fake_is_what_torch_makes(tensor: torch.Tensor) -> None:
    mode = FakeTensorMode()
    fake, torchs = fake_like(mode, tensor, CPU), mode.from_tensor(tensor)
    assert type(fake) is type(torchs)
    assert fake.device == CPU
    for name in ("dtype", "requires_grad", "is_leaf", "layout"):
        assert getattr(fake, name) == getattr(torchs, name), name
    assert (fake.shape, fake.stride()) == (torchs.shape, torchs.stride())
    assert isinstance(fake, nn.Parameter) == isinstance(tensor, nn.Parameter)
    assert isinstance((fake + 1).detach(), type(torchs)), "operators on it are followed without a mode, too"
    assert fake.untyped_storage()._cdata != fake_like(mode, tensor, CPU).untyped_storage()._cdata


class Views(nn.Module):
    """The first block's weight is half of a buffer of the last block's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        whole = torch.ones(8, 4)
        self.blocks[0].weight = nn.Parameter(whole[:4])
        self.blocks[1].register_buffer("whole", whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](x))
        return x + F.linear(x, self.blocks[1].get_buffer("whole")[:4])


def test_memory_that_is_shared_in_the_model_is_shared_by_its_fakes() -> None:
    trace = observe_step(Views(), ("blocks.0", "blocks.1"), lambda m, x: m(x).sum(), torch.ones(2, 4), {})
    assert trace.after == {"blocks.0.weight"}, "the step uses it after the blocks, by the buffer"
