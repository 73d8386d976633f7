"""Mechanism: sums over tensor ranks and stages that complete the gradients of parameters held in several places.

Three kinds, all read from the parameter's tag: a parameter that every tensor rank holds whole but sees only part of the
tokens or heads of (norms under sequence parallelism, query and key norms); key and value heads kept by several tensor
ranks; parameters owned by several stages (tied embeddings).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.mesh import Mesh
from lightning_parallel.parameters import ParameterTag
from lightning_parallel.tensor_parallel.sharding import Segment, ShardSpec

__all__ = ["GradientCompleter", "sum_over_holders"]


def sum_over_holders(gradient: torch.Tensor, spec: ShardSpec, rank: int, group: ProcessGroup) -> None:
    """Sums, in place, the ranges of a local gradient that several tensor ranks hold. Collective over the group."""
    shared = _shared_segments(spec)
    length = sum(s.size for s in shared)
    shape = (*gradient.shape[: spec.dim], length, *gradient.shape[spec.dim + 1 :])
    buffer = gradient.new_zeros(shape)
    place, position = {}, 0
    for segment in shared:
        place[segment.start, segment.stop] = position
        position += segment.size
    mine = [
        (where, place[s.start, s.stop], s.size) for s, where in spec.local_slices(rank) if (s.start, s.stop) in place
    ]
    for where, start, size in mine:
        buffer.narrow(spec.dim, start, size).copy_(gradient.narrow(spec.dim, where.start, size))
    comm.all_reduce_(buffer, group)
    for where, start, size in mine:
        gradient.narrow(spec.dim, where.start, size).copy_(buffer.narrow(spec.dim, start, size))


def _shared_segments(spec: ShardSpec) -> list[Segment]:
    found: dict[tuple[int, int], Segment] = {}
    for rank, segments in enumerate(spec.parts):
        for segment in segments:
            if segment.owner != rank:
                found[segment.start, segment.stop] = segment
    return [found[key] for key in sorted(found)]


class GradientCompleter:
    """Completes the local gradients of one rank; the same order of collectives on every rank that takes part.

    Args:
        parameters: name in the plain model -> local parameter (only those this stage holds).
        tags: tag of every parameter of the model.
        mesh: groups; `mesh.stage_pairs` must hold the groups of every set of owners.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], tags: Mapping[str, ParameterTag], mesh: Mesh
    ) -> None:
        self.mesh = mesh
        self.tags = tags
        held = [(tags[n], p) for n, p in sorted(parameters.items())]
        self.partial = [p for tag, p in held if tag.partial_gradient]
        self.replicated = [(p, tag.shard) for tag, p in held if tag.shard is not None and tag.shard.replicated]
        self.shared: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        for tag, p in held:
            if tag.shared:
                self.shared.setdefault(tag.stages, []).append(p)

    @property
    def is_empty(self) -> bool:
        """Whether every gradient is complete on its own."""
        return not (self.partial or self.replicated or self.shared)

    def complete(self) -> None:
        """Sums the accumulated gradients; once per optimizer step, after the last backward pass."""
        if self.mesh.tensor is not None:
            _sum_present(self.partial, self.mesh.tensor)
            for p, spec in _present_somewhere(self.replicated, self.mesh.tensor):
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                sum_over_holders(gradient, spec, self.mesh.tensor_rank, self.mesh.tensor)
                p.grad = gradient
        for stages in sorted(self.shared):
            _sum_present(self.shared[stages], self.mesh.stage_pairs[stages])

    def completed(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """What `complete` would make of one gradient, as a copy, for a look at it while it is still accumulating.

        Collective over the ranks that hold the parameter.

        Args:
            name: of a parameter that this stage holds.
            gradient: the local one; zeros where there is none.
        """
        tag, total = self.tags[name], gradient.clone()
        if self.mesh.tensor is not None and tag.partial_gradient:
            comm.all_reduce_(total, self.mesh.tensor)
        if self.mesh.tensor is not None and tag.shard is not None and tag.shard.replicated:
            sum_over_holders(total, tag.shard, self.mesh.tensor_rank, self.mesh.tensor)
        if tag.shared:
            comm.all_reduce_(total, self.mesh.stage_pairs[tag.stages])
        return total

    def hook_every_backward(self) -> list[Any]:
        """Sums the gradient of each backward pass as it arrives instead: right under any accumulation by the user.

        Costs one collective per parameter and backward pass; for manual optimization, where nobody can say which
        backward pass is the last. Pipelines of one stage only.
        """
        group, rank = self.mesh.tensor, self.mesh.tensor_rank
        if group is None:
            return []

        def sum_whole(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient.clone()
            comm.all_reduce_(total, group)
            return total

        handles = [_hook(p, sum_whole) for p in self.partial]
        for p, spec in self.replicated:

            def sum_ranges(gradient: torch.Tensor, spec: ShardSpec = spec) -> torch.Tensor:
                total = gradient.clone()
                sum_over_holders(total, spec, rank, group)
                return total

            handles.append(_hook(p, sum_ranges))
        return handles


def _hook(parameter: torch.nn.Parameter, work: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Registers a hook on the gradient, also if the parameter is frozen at this moment."""
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_hook(work)
    parameter.requires_grad_(trainable)
    return handle


def _present_somewhere(
    held: Sequence[tuple[torch.nn.Parameter, ShardSpec]], group: ProcessGroup
) -> list[tuple[torch.nn.Parameter, ShardSpec]]:
    """Those that have a gradient on some rank; the others must keep None. Collective over the group.

    Ranks that have every gradient need not look at the answer, which would wait for the device.
    """
    trainable = [(p, spec) for p, spec in held if p.requires_grad]
    if not trainable:
        return []
    complete = all(p.grad is not None for p, _ in trainable)
    flags = torch.tensor([float(p.grad is not None) for p, _ in trainable], device="cpu")
    present = flags.to(trainable[0][0].device, non_blocking=True)
    comm.all_reduce_(present, group)
    counts = [1.0] * len(trainable) if complete else present.tolist()
    return [entry for entry, count in zip(trainable, counts, strict=True) if count > 0]


def _sum_present(parameters: Sequence[torch.nn.Parameter], group: ProcessGroup) -> None:
    """Sums gradients over a group in one collective per dtype; one that no rank has stays None."""
    trainable = [p for p in parameters if p.requires_grad]
    for dtype in dict.fromkeys(p.dtype for p in trainable):
        same = [p for p in trainable if p.dtype == dtype]
        present = [p.grad is not None for p in same]
        parts = [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in same]
        flags = torch.tensor(present, dtype=dtype, device="cpu").to(same[0].device, non_blocking=True)
        flat = torch.cat([*parts, flags])
        comm.all_reduce_(flat, group)
        counts = None
        offset = 0
        for index, p in enumerate(same):
            total = flat[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
            if p.grad is not None:
                p.grad.copy_(total)
                continue
            counts = flat[-len(same) :].tolist() if counts is None else counts
            if counts[index] > 0:
                p.grad = total.clone()
