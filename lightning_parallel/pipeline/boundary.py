"""Mechanism: carries the values at a stage boundary (any tensors in any structure) between neighbouring stages.

Shapes may change with every micro-batch. Each forward transfer is announced by a header of two integers on a host-side
group; the structure itself travels only when it is seen for the first time, so a steady run sends 16 bytes extra.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.pipeline.placeholder import PipelineCutError

__all__ = ["Boundary", "BoundaryLink"]

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.Size)


@dataclass(frozen=True)
class _TensorMeta:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class Boundary:
    """The tensors of one boundary value of one micro-batch, on either side of the boundary."""

    leaves: list[Any]
    spec: TreeSpec
    needs_gradient: list[bool] = field(default_factory=list)

    def mark_received(self) -> None:
        """Marks the tensors whose gradient travels back; called once their data arrived."""
        for tensor, needed in zip(self.tensors, self.needs_gradient, strict=True):
            tensor.requires_grad_(needed)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor, in transfer order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def differentiable(self) -> list[torch.Tensor]:
        """The tensors whose gradient travels back."""
        return [t for t in self.tensors if t.requires_grad]

    def value(self) -> Any:
        """The value in the structure of the sending block, safe to modify in place."""
        tree = tree_unflatten(self.leaves, self.spec)
        # A block may write into its input, which autograd forbids for a leaf: hand out a view.
        return tree_map_only(torch.Tensor, lambda t: t.view_as(t) if t.requires_grad else t, tree)


class BoundaryLink:
    """The two neighbours of a stage.

    Args:
        previous: global rank of the previous stage, None on the first.
        following: global rank of the next stage, None on the last.
        group: group of the tensors.
        control: host-side group of the headers.
        device: where received tensors are allocated.
    """

    def __init__(
        self,
        previous: int | None,
        following: int | None,
        group: ProcessGroup | None,
        control: ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.previous = previous
        self.following = following
        self.group = group
        self.control = control
        self.device = device
        self._sent: dict[bytes, int] = {}
        self._known: dict[int, tuple[list[Any], TreeSpec]] = {}
        self._headers: list[tuple[Any, torch.Tensor]] = []

    def neighbours(self) -> tuple[int, int]:
        """Ranks of the previous and next stage; -1 (which no group holds) at the ends of the pipeline."""
        return -1 if self.previous is None else self.previous, -1 if self.following is None else self.following

    def pack(self, value: Any, block: str) -> Boundary:
        """Flattens what a block returned.

        Raises:
            PipelineCutError: it holds something that cannot travel, or no tensor at all.
        """
        leaves, spec = tree_flatten(value)
        strangers = {type(x).__name__ for x in leaves if not isinstance(x, (torch.Tensor, *_PLAIN))}
        if strangers:
            raise PipelineCutError(f"{block} returns {', '.join(sorted(strangers))}, which cannot be sent to a stage")
        return Boundary([x.contiguous() if isinstance(x, torch.Tensor) else x for x in leaves], spec)

    def announce(self, boundary: Boundary) -> None:
        """Sends the header (and a new structure) of a boundary value to the next stage, without waiting."""
        metas = [
            _TensorMeta(tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x in boundary.leaves
        ]
        payload = pickle.dumps((metas, boundary.spec))
        known = payload in self._sent
        number = self._sent.setdefault(payload, len(self._sent))
        self._post(torch.tensor([number, 0 if known else len(payload)]))
        if not known:
            self._post(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def _post(self, tensor: torch.Tensor) -> None:
        assert self.following is not None, "the last stage has no next stage to announce to"
        works = comm.exchange([comm.SendRecv(tensor, self.following, send=True)], self.control)
        self._headers = [(w, t) for w, t in self._headers if not w.is_completed()]
        self._headers += [(work, tensor) for work in works]

    def expect(self) -> Boundary:
        """Waits for the header of the next boundary value and allocates its tensors."""
        header = torch.empty(2, dtype=torch.int64)
        self._receive(header)
        number, length = header.tolist()
        if length:
            payload = torch.empty(length, dtype=torch.uint8)
            self._receive(payload)
            self._known[number] = pickle.loads(payload.numpy().tobytes())
        metas, spec = self._known[number]
        leaves = [self._allocate(m) if isinstance(m, _TensorMeta) else m for m in metas]
        return Boundary(leaves, spec, [m.requires_grad for m in metas if isinstance(m, _TensorMeta)])

    def _receive(self, tensor: torch.Tensor) -> None:
        assert self.previous is not None, "the first stage has no previous stage to receive from"
        for work in comm.exchange([comm.SendRecv(tensor, self.previous, send=False)], self.control):
            work.wait()

    def _allocate(self, meta: _TensorMeta) -> torch.Tensor:
        return torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    def finish(self) -> None:
        """Waits for outstanding headers."""
        for work, _ in self._headers:
            work.wait()
        self._headers.clear()
