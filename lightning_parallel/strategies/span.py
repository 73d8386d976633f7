"""Glue: decisions that span every rank of a replica: gradient norm, overflow, non-finite gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_parallel import comm
from lightning_parallel.mesh import Mesh
from lightning_parallel.parameters import ParameterTag

__all__ = ["ModelSpan", "NonFiniteGradientError"]


class NonFiniteGradientError(RuntimeError):
    """A gradient was infinite or not a number; raised on every rank."""


class ModelSpan:
    """Norms and votes over the ranks that hold one replica; each element counts once.

    Args:
        mesh: groups of this rank.
        tags: tag of every parameter of the plain model.
        names: id of a local parameter -> name in the plain model.
        non_finite: "ignore", "raise" or "skip".
    """

    def __init__(self, mesh: Mesh, tags: Mapping[str, ParameterTag], names: Mapping[int, str], non_finite: str) -> None:
        self.mesh = mesh
        self.tags = tags
        self.names = names
        self.non_finite = non_finite
        self.skipped_steps = 0
        self.norm_group = mesh.model
        self.hidden: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around what works on this rank's part although a hook, which sees the whole model, may have asked for it."""

    # -------------------------------------------------------------- where gradients are
    def trained(self, optimizer: Any) -> Iterator[nn.Parameter]:
        """What holds the gradients of an optimizer."""
        return (p for group in optimizer.param_groups for p in group["params"])

    def holding_gradients(self, optimizer: Any) -> AbstractContextManager[None]:
        """Inside, the groups of an optimizer hold what holds its gradients."""
        return nullcontext()

    # -------------------------------------------------------------- norms
    def total_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        """2-norm of the gradients of a replica, as a 0-dim tensor. Collective over the replica."""
        counted = [g for p in parameters if p.grad is not None for g in self._counted_parts(p)]
        if counted:
            wide = any(g.dtype in (torch.float64, torch.complex128) for g in counted)
            counted = [torch.view_as_real(g) if g.is_complex() else g for g in counted]
            norms = torch._foreach_norm(counted, 2, torch.float64 if wide else torch.float32)
            total = torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum()
        else:
            total = torch.zeros((), device=self.mesh.device)
        if self.norm_group is not None:
            total = total.to(self.mesh.device, torch.float64)
            comm.all_reduce_(total, self.norm_group)
        return total.sqrt()

    def _counted_parts(self, parameter: nn.Parameter) -> list[torch.Tensor]:
        gradient = parameter.grad
        assert gradient is not None, "only parameters with a gradient have counted parts"
        name = self.names.get(id(parameter))
        if name is None:  # a parameter that is not the model's: every rank holds it whole
            return [gradient] if self.mesh.stage == 0 and self.mesh.tensor_rank == 0 else []
        tag = self.tags[name]
        ranges = tag.counted_ranges(self.mesh.stage, self.mesh.tensor_rank)
        if ranges is None:
            return [gradient]
        if not ranges or tag.shard is None:
            return []
        return [gradient.narrow(tag.shard.dim, start, stop - start) for start, stop in ranges]

    def clip_by_norm(self, parameters: Iterable[nn.Parameter], clip_val: float) -> None:
        """Scales gradients so that the norm over the replica is at most `clip_val`.

        Same formula as `torch.nn.utils.clip_grad_norm_`: factor min(1, clip_val / (norm + 1e-6)).
        """
        held = [p for p in parameters if p.grad is not None]
        factor = torch.clamp(clip_val / (self.total_norm(held) + 1e-6), max=1.0)
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for gradient in (p.grad for p in held):
            if gradient is not None:
                alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, dtype), gradients in alike.items():
            torch._foreach_mul_(gradients, factor.to(device, dtype))

    # -------------------------------------------------------------- votes
    def share_overflow(self, flags: list[torch.Tensor]) -> None:
        """An overflow that one rank found counts for every rank: all skip the step and lower the scale alike."""
        found = torch.zeros((), device=self.mesh.device)
        for flag in flags:
            found = torch.maximum(found, flag.to(found))
        comm.all_reduce_(found, self.mesh.world, op="max")
        for flag in flags:
            flag.copy_(found)
        if self.non_finite == "skip" and bool(found):  # the scaler skips the step
            self.skipped_steps += 1

    def vote(self, optimizer: Any) -> None:
        """Decides together, before the optimizer step, what happens to non-finite gradients.

        Every rank of the world takes part: a replica whose gradients went wrong after their reduction counts too.

        Raises:
            NonFiniteGradientError: on every rank, with `non_finite="raise"`.
        """
        if self.non_finite == "ignore":
            return
        parameters = [p for p in self.trained(optimizer) if p.grad is not None]
        found = torch.zeros((), device=self.mesh.device)
        gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
        if gradients:
            # Largest elements, because the sum of squares of finite numbers may overflow.
            largest = torch._foreach_norm(gradients, float("inf"))
            found = (~torch.isfinite(torch.stack([n.to(found) for n in largest])).all()).float()
        mine = found.clone()
        comm.all_reduce_(found, self.mesh.world, op="max")
        if not bool(found):
            return
        if self.non_finite == "skip":
            self.skipped_steps += 1
            for p in parameters:
                p.grad = None
            return
        mesh = self.mesh
        where = f"pipeline stage {mesh.stage}, replica {mesh.data_rank}, tensor rank {mesh.tensor_rank}"
        reports = comm.gather_objects(where if bool(mine) else None, mesh.world)
        places = "; ".join(r for r in reports if r is not None)
        raise NonFiniteGradientError(
            f"gradients are not finite on {places}. Lower the learning rate, clip gradients, or set "
            "non_finite='skip' to leave such steps out"
        )
