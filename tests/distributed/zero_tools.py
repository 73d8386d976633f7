"""Parameters, losses and optimizers with which ZeRO is compared with one process that sees every replica's loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from lightning_parallel.zero.sharder import ShardOptions, ZeroSharder

Optimizer = torch.optim.Optimizer
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (6, 5),
    "one": (1,),
    "none": (0,),
    "five": (5,),
    "scalar": (),
    "seven": (7,),
    "square": (4, 4),
}


class Odd(nn.Module):
    """Parameters of sizes that divide by nothing; weights by formula."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for place, (name, shape) in enumerate(SHAPES.items()):
            count = torch.Size(shape).numel()
            values = torch.sin(torch.arange(count, dtype=torch.float64) * 1.7 + place)
            self.register_parameter(name, nn.Parameter(values.view(shape).to(dtype)))


def loss_of(net: nn.Module, rank: int, step: int, skip: tuple[str, ...] = ()) -> Tensor:
    """A loss whose gradients are small whole numbers: sums over ranks are exact in any order."""
    terms = []
    for place, (name, p) in enumerate(net.named_parameters()):
        if name not in skip and p.requires_grad:
            slopes = (torch.arange(p.numel()) * (rank + 2) + step * (place + 1)) % 7 - 3
            terms.append((p * slopes.view(p.shape).to(p.dtype)).sum())
    return torch.stack(terms).sum()


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, the rest does not and has a learning rate of its own."""
    return [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.05},
    ]


class Spectral(Optimizer):
    """Scales the step by the norm of the whole gradient and keeps a factored moment: it needs whole matrices."""

    def __init__(self, groups: Any, lr: float = 0.1) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                rows = p.grad.flatten(1).mean(1) if p.dim() > 1 else p.grad
                state["rows"] = state.get("rows", torch.zeros_like(rows)) * 0.5 + rows
                state["step"] = state.get("step", 0) + 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                scale = 1 + p.grad.norm() + state["rows"].sum()
                p.sub_(p.grad * (group["lr"] / scale))


class Twisted(optim.SGD):
    """A subclass with a step of its own is not known to be elementwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    p.sub_(group["lr"] * p.grad * p.abs().max())


class Clipping(optim.AdamW):
    """Changes each gradient by its own norm, and lets the class below step, around whose step hooks run as well."""

    def __init__(self, groups: Any, lr: float) -> None:
        optim.AdamW([nn.Parameter(torch.zeros(1))])  # torch puts hooks around the step of a class when it is first used
        super().__init__(groups, lr=lr, foreach=False)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(1 + p.grad.norm())
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - group["lr"] * 0.1 * (p.grad is not None))
        return result


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "plain sgd": lambda groups: optim.SGD(groups, lr=0.1, fused=True),
    "adamw": lambda groups: optim.AdamW(groups, lr=0.1, foreach=False),
    "foreach adamw": lambda groups: optim.AdamW(groups, lr=0.1, foreach=True, amsgrad=True),
    "fused adam": lambda groups: optim.Adam(groups, lr=0.1, fused=True),
    "adagrad": lambda groups: optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda groups: optim.RMSprop(groups, lr=0.1, momentum=0.5, centered=True, alpha=0.5),
    "adadelta": lambda groups: optim.Adadelta(groups, lr=0.1),
    "adamax": lambda groups: optim.Adamax(groups, lr=0.1),
    "nadam": lambda groups: optim.NAdam(groups, lr=0.1, foreach=True),
    "radam": lambda groups: optim.RAdam(groups, lr=0.1),
    "asgd": lambda groups: optim.ASGD(groups, lr=0.1),
    "rprop": lambda groups: optim.Rprop([{**g, "weight_decay": 0} for g in groups], lr=0.1),
    "spectral": lambda groups: Spectral(groups),
    "clipping": lambda groups: Clipping(groups, lr=0.1),
    "twisted": lambda groups: Twisted(groups, lr=0.1),
}


def sharder(net: nn.Module, optimizers: list[Optimizer], **options: Any) -> ZeroSharder:
    """Over all ranks; small buckets, so that there are several."""
    chosen = ShardOptions(**{"bucket_bytes": 60, **options})
    return ZeroSharder(net.parameters(), optimizers, dist.group.WORLD, chosen)


def sharded_backward(sharded: ZeroSharder, losses: list[Tensor]) -> None:
    """Backward passes of one optimizer step."""
    for place, loss in enumerate(losses):
        sharded.prepare()
        if place == len(losses) - 1:
            sharded.arm()
        loss.backward()
    sharded.finish()
    sharded.deliver()


def plain_state(optimizer: Optimizer) -> dict[str, Any]:
    """A copy of its state dict."""
    state = optimizer.state_dict()
    entries = {i: {k: _copy(v) for k, v in entry.items()} for i, entry in state["state"].items()}
    return {"state": entries, "param_groups": state["param_groups"]}


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def values(net: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: p.detach().clone() for name, p in net.named_parameters()}
