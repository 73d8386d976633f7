"""One call of `step` on shards that come in bucket by bucket, as its user and their hooks see it; one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_parallel.zero.offload import Offload
from lightning_parallel.zero.sharder import ShardOptions, ZeroSharder


def parameters(count: int = 4) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2) * (place + 1)) for place in range(count)]


def sharder(members: list[nn.Parameter], optimizer: optim.Optimizer, kind: str, folder: Path) -> ZeroSharder:
    """One bucket for each parameter."""
    options = ShardOptions(bucket_bytes=1, offload=Offload(kind, str(folder) if kind == "nvme" else None))
    return ZeroSharder(members, [optimizer], None, options)


def backward(sharded: ZeroSharder, members: list[nn.Parameter]) -> torch.Tensor:
    loss = torch.stack([(p * (place + 1)).sum() for place, p in enumerate(members) if p.requires_grad]).sum()
    sharded.prepare()
    sharded.arm()
    loss.backward()
    sharded.finish()
    sharded.deliver()
    return loss.detach()


def end(sharded: ZeroSharder | None, members: list[nn.Parameter]) -> list[torch.Tensor]:
    """The values that a run leaves, whose files go."""
    if sharded is not None:
        sharded.close()
        sharded.storage.remove()  # type: ignore[union-attr]
    return [p.detach().clone() for p in members]


def give_gradients(sharded: ZeroSharder | None, members: list[nn.Parameter]) -> None:
    """Those of `backward`, also where nothing is sharded."""
    if sharded is not None:
        backward(sharded, members)
        return
    for place, p in enumerate(members):
        p.grad = torch.full((3, 2), place + 1.0) if p.requires_grad else None


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
def test_nothing_goes_on_from_a_step_that_an_error_has_interrupted(kind: str, tmp_path: Path) -> None:
    """It would go on with the buckets that were in memory, and leave the others as they are."""
    members = parameters()
    optimizer = optim.AdamW(members, lr=0.5)
    sharded = sharder(members, optimizer, kind, tmp_path)

    def fails(*args: Any) -> None:
        raise ArithmeticError("in a hook of the user's")

    handle = optimizer.register_step_pre_hook(fails)
    backward(sharded, members)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    handle.remove()
    with pytest.raises(RuntimeError, match="an error has interrupted the last step of AdamW, which has changed some"):
        optimizer.step()
    sharded.close()
    assert [p for group in optimizer.param_groups for p in group["params"]] == members
    assert sharded.storage is not None
    sharded.storage.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
def test_closures_and_hooks_are_called_once_and_groups_come_back(kind: str, tmp_path: Path) -> None:
    members, plain = parameters(), parameters()
    optimizer = optim.AdamW([{"params": members[:3], "lr": 0.5}, {"params": members[3:], "lr": 0.1}])
    expected = optim.AdamW([{"params": plain[:3], "lr": 0.25}, {"params": plain[3:], "lr": 0.1}])
    calls: list[str] = []

    def halve(*args: Any) -> None:
        calls.append("before")
        optimizer.param_groups[0]["lr"] = 0.25

    def raise_again(*args: Any) -> None:
        calls.append("after")
        optimizer.param_groups[0]["lr"] = 0.5

    optimizer.register_step_post_hook(raise_again)
    sharded = sharder(members, optimizer, kind, tmp_path)
    optimizer.register_step_pre_hook(halve)
    fused = optimizer.param_groups[0]["fused"]

    def closure() -> torch.Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        return backward(sharded, members)

    losses = [optimizer.step(closure), optimizer.step(closure=closure)]  # type: ignore[call-overload]
    assert calls == ["before", "closure", "after"] * 2
    assert losses[0] == sum(6 * (place + 1) ** 2 for place in range(4))
    found = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p is q for p, q in zip(found, members, strict=True))
    assert (fused, optimizer.param_groups[0]["fused"], optimizer.param_groups[1]["fused"]) == (None, None, None)
    for _ in range(2):
        for place, p in enumerate(plain):
            p.grad = torch.full((3, 2), place + 1.0)
        expected.step()
    torch.testing.assert_close(members, plain, atol=1e-6, rtol=1e-6)
    if kind == "nvme":
        with pytest.raises(KeyError, match="exp_avg"):
            optimizer.state[members[0]]["exp_avg"]
    assert int(optimizer.state[members[0]]["step"]) == 2
    sharded.close()
    assert sharded.storage is not None
    sharded.storage.remove()


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
def test_late_parameters_values_written_by_hand_and_keys_that_come_later(kind: str, tmp_path: Path) -> None:
    """One thaws later; one is trained by no optimizer at first; momentum is switched on after the first step."""
    results = []
    for offloaded in (True, False):
        members = parameters()
        members[1].requires_grad_(False)
        optimizer = optim.SGD(members[:2], lr=0.1)
        sharded = sharder(members, optimizer, kind, tmp_path) if offloaded else None
        for step in range(4):
            optimizer.zero_grad()
            members[2].grad = members[3].grad = None
            if step == 1:
                members[1].requires_grad_(True)
                optimizer.add_param_group({"params": members[2:3], "momentum": 0.5})
                optimizer.param_groups[0]["momentum"] = 0.9
                members[0].data.mul_(3.0)
            give_gradients(sharded, members)
            optimizer.step()
        results.append(end(sharded, members))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-6)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
def test_states_that_are_cleared_begin_anew(kind: str, tmp_path: Path) -> None:
    results = []
    for offloaded in (True, False):
        members = parameters()
        optimizer = optim.AdamW(members, lr=0.1)
        sharded = sharder(members, optimizer, kind, tmp_path) if offloaded else None
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                optimizer.state.clear()
            give_gradients(sharded, members)
            optimizer.step()
        results.append(end(sharded, members))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda p: optim.AdamW(p, capturable=True), "cpu", "AdamW with capturable=True steps on the device only"),
        (lambda p: optim.SGD(p, differentiable=True), "nvme", "SGD with differentiable=True steps on the device only"),
        (optim.Adafactor, "nvme", "Adafactor has a step of its own, .* use offload='cpu', or an optimizer such as"),
        (optim.LBFGS, "cpu", "LBFGS needs all parameters at once"),
    ],
)
def test_optimizers_that_cannot_step_there(make: Any, kind: str, text: str, tmp_path: Path) -> None:
    members = parameters(1)
    with pytest.raises(ValueError, match=text):
        sharder(members, make(members), kind, tmp_path)
    assert list(tmp_path.iterdir()) == []
