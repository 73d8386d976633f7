"""Mechanism: sums gradients over the data replicas in buckets, while the last backward pass is still running.

Buckets are filled in reverse parameter order, roughly the order in which gradients become ready, and are reduced in
that fixed order on every rank, whatever order they complete in (Li et al. 2020, PyTorch Distributed, section 3.2). The
gradients live in the buckets, so a reduction copies nothing and accumulation adds in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_parallel import comm
from lightning_parallel.bucket_order import BucketOrder
from lightning_parallel.comm import ProcessGroup

__all__ = ["GradientReducer"]

DEFAULT_BUCKET_BYTES = 25 * 2**20


@dataclass
class _Bucket:
    """A flat buffer of gradients, followed by one slot per parameter that counts the ranks with a gradient."""

    parameters: list[torch.nn.Parameter]
    offsets: list[int]
    buffer: torch.Tensor
    views: list[torch.Tensor]
    present: list[bool] = field(default_factory=list)
    work: Any = None

    @property
    def counts(self) -> torch.Tensor:
        return self.buffer[len(self.buffer) - len(self.parameters) :]


def _make_bucket(parameters: list[torch.nn.Parameter]) -> _Bucket:
    offsets, total = [], 0
    for p in parameters:
        offsets.append(total)
        total += p.numel()
    first = parameters[0]
    buffer = torch.zeros(total + len(parameters), dtype=first.dtype, device=first.device)
    views = [buffer[o : o + p.numel()].view(p.shape) for o, p in zip(offsets, parameters, strict=True)]
    return _Bucket(parameters, offsets, buffer, views)


def _group_into_buckets(parameters: Sequence[torch.nn.Parameter], limit: int) -> list[list[torch.nn.Parameter]]:
    """Consecutive parameters of one dtype and device, closed once a bucket reaches `limit` bytes."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    closed = []
    for p in reversed(parameters):
        key = (p.dtype, p.device)
        bucket = open_buckets.setdefault(key, [])
        bucket.append(p)
        if sum(q.numel() * q.element_size() for q in bucket) >= limit:
            closed.append(open_buckets.pop(key))
    return closed + list(open_buckets.values())


class GradientReducer:
    """Sums the gradients of some parameters over a group, once per optimizer step.

    `arm()` before the last backward pass of a step, `finish()` after it; backward passes in between that are not armed
    only accumulate. A parameter that has no gradient on any rank keeps None.

    Args:
        parameters: in the order of the model, the same on every rank. Only those that require gradients take part.
        group: the data-parallel group.
        bucket_bytes: a bucket is closed once it holds this many bytes.
        average: divide by the number of ranks (for losses that were not weighted before the backward pass).
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        group: ProcessGroup,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        average: bool = False,
    ) -> None:
        self.group = group
        self.average = average
        self._all = list(parameters)
        self._known = {id(p) for p in self._all}
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self._place: dict[int, tuple[int, int]] = {}
        self._hooks: dict[int, Any] = {}
        self._armed = False
        self._order = BucketOrder([])
        self._trainable: tuple[int, ...] = ()
        self._unsummed: set[int] = set()

    @property
    def bucket_sizes(self) -> list[int]:
        """Elements of each bucket, in the order of reduction."""
        return [sum(p.numel() for p in b.parameters) for b in self._buckets]

    def _refresh(self) -> None:
        """Rebuilds the buckets if other parameters require gradients than before (freezing and unfreezing)."""
        trainable = [p for p in self._all if p.requires_grad]
        key = tuple(id(p) for p in trainable)
        if key == self._trainable and all(p.device == self._buckets[0].buffer.device for p in trainable[:1]):
            return
        for handle in self._hooks.values():
            handle.remove()
        kept = {id(p): p.grad.clone() for p in trainable if p.grad is not None}
        self._buckets = [_make_bucket(ps) for ps in _group_into_buckets(trainable, self._bucket_bytes)]
        self._place = {id(p): (i, j) for i, b in enumerate(self._buckets) for j, p in enumerate(b.parameters)}
        for p in trainable:
            p.grad = kept.get(id(p))
        self._hooks = {id(p): p.register_post_accumulate_grad_hook(self._on_gradient) for p in trainable}
        self._trainable = key

    def prepare(self) -> None:
        """To be called before the first backward pass of a step, so that gradients land in the buckets."""
        self._refresh()

    def arm(self) -> None:
        """The coming backward pass completes the gradients: reduce each bucket as soon as it is full."""
        self._refresh()
        for bucket in self._buckets:
            bucket.present = [False] * len(bucket.parameters)
            bucket.work = None
        self._order = BucketOrder([len(bucket.parameters) for bucket in self._buckets])
        self._armed = True

    def disarm(self) -> None:
        """Forget an armed state, for example after a failed step."""
        self._armed = False

    def lacks_sums(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether any parameter has a gradient of this rank alone, which no armed pass has summed."""
        is_prepared = bool(self._trainable)
        return any(p.grad is not None and (id(p) in self._unsummed or not is_prepared) for p in parameters)

    def keeps(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a gradient waits anywhere else than in its parameter."""
        return False

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient of a parameter is summed over the ranks."""
        return id(parameter) in self._known

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        index, place = self._place[id(parameter)]
        bucket = self._buckets[index]
        self._move_into_bucket(bucket, place)
        if not self._armed:
            self._unsummed.add(id(parameter))
            return
        if bucket.present[place]:
            if bucket.work is not None:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} arrived twice in one backward "
                    "pass, after it had been reduced; leave it at one pass in the hook backward, and use "
                    "torch.utils.checkpoint with use_reentrant=False for modules that share parameters"
                )
            return
        bucket.present[place] = True
        for ready in self._order.arrived(index):
            self._launch(self._buckets[ready])

    @staticmethod
    def _move_into_bucket(bucket: _Bucket, place: int) -> None:
        parameter, view = bucket.parameters[place], bucket.views[place]
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which is not reduced over "
                "replicas; use sparse=False for embeddings"
            )
        if gradient is not None and gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = view

    def _launch(self, bucket: _Bucket) -> None:
        if all(bucket.present):
            bucket.counts.fill_(1)
        else:
            bucket.counts.copy_(torch.tensor(bucket.present, dtype=bucket.buffer.dtype), non_blocking=True)
        if self.average:
            bucket.buffer.div_(comm.group_size(self.group))
        bucket.work = comm.all_reduce_(bucket.buffer, self.group, async_op=True)

    def finish(self) -> None:
        """Reduces what is left and waits; gradients are the sums over the group afterwards.

        A parameter without a gradient here takes part with zeros, and gets the sum if any other rank had one. Only
        ranks that miss a gradient look at the counts (which waits for the device).
        """
        if not self._armed:
            raise RuntimeError("finish() needs arm() before the backward pass")
        self._armed = False
        self._unsummed -= self._place.keys()
        for bucket in [self._buckets[index] for index in self._order.rest()]:
            for place, parameter in enumerate(bucket.parameters):
                if parameter.grad is None:
                    bucket.views[place].zero_()
                else:
                    # accumulated before, but not touched by the armed pass
                    bucket.present[place] = True
                    self._move_into_bucket(bucket, place)
            self._launch(bucket)
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            self._hand_out(bucket)

    @staticmethod
    def _hand_out(bucket: _Bucket) -> None:
        counts = None
        for place, parameter in enumerate(bucket.parameters):
            if parameter.grad is None:
                counts = bucket.counts.tolist() if counts is None else counts
                if counts[place] > 0:
                    parameter.grad = bucket.views[place]

    def close(self) -> None:
        """Removes the hooks; gradients stay where they are."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._trainable = ()
