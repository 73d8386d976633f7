"""Mechanism: carries the values at a stage boundary (any tensors in any structure) between neighbouring stages.

Shapes may change with every micro-batch. Each forward transfer is announced by a header of two integers on a host-side
group; the structure itself travels only when it is seen for the first time, so a steady run sends 16 bytes extra.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.pipeline.outline import Outline, TensorMeta
from lightning_parallel.pipeline.placeholder import PipelineCutError

__all__ = ["Boundary", "BoundaryLink", "strangers_in"]

_MAX_KNOWN = 256
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.Size)


def strangers_in(value: Any) -> list[str]:
    """Types of what cannot travel in a nested value: neither tensors nor plain values.

    >>> strangers_in((torch.ones(1), {"depth": 2}, object()))
    ['object']
    """
    leaves = tree_flatten(value)[0]
    return sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_PLAIN))})


class _Enter(torch.autograd.Function):
    """Puts received data into the graph: what is computed from `data` gives `anchor` its gradient.

    The data itself becomes the result, so that a block may write into it, which autograd forbids for a leaf and for a
    view of one.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(data)
        return data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


@dataclass
class Boundary:
    """The tensors of one boundary value of one micro-batch, on either side of the boundary.

    Attributes:
        leaves: of the value.
        spec: its structure.
        outlines: of the outputs of all earlier blocks, if shapes change from block to block.
        needs_gradient: on the receiving side, for each tensor whether its gradient travels back.
        anchors: on the receiving side, where the gradients arrive.
    """

    leaves: list[Any]
    spec: TreeSpec
    outlines: tuple[Outline, ...] = ()
    needs_gradient: list[bool] = field(default_factory=list)
    anchors: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def like(cls, outline: Outline, earlier: tuple[Outline, ...], device: torch.device) -> Boundary:
        """A value of that structure with memory for its tensors, as the receiving side has it before they arrive."""
        metas = [leaf for leaf in outline.leaves if isinstance(leaf, TensorMeta)]
        leaves = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, TensorMeta) else leaf
            for leaf in outline.leaves
        ]
        return cls(leaves, outline.spec, earlier, [meta.requires_grad for meta in metas])

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor, in transfer order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def differentiable(self) -> list[torch.Tensor]:
        """On the sending side, the tensors whose gradient travels back."""
        return [t for t in self.tensors if t.requires_grad]

    def value(self) -> Any:
        """The value in the structure of the sending block, safe to modify in place."""
        return tree_unflatten(self.leaves, self.spec)

    def enter_graph(self) -> None:
        """Makes the received value differentiable where it was on the sending side; once, when its data arrived."""
        places = [place for place, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        for place, needed in zip(places, self.needs_gradient, strict=True):
            if needed:
                anchor = self.leaves[place].detach().requires_grad_()
                self.leaves[place] = _Enter.apply(anchor, self.leaves[place])
                self.anchors.append(anchor)


class BoundaryLink:
    """The two neighbours of a stage.

    Args:
        previous: global rank of the previous stage, None on the first.
        following: global rank of the next stage, None on the last.
        group: group of the tensors.
        control: host-side group of the headers.
        device: where received tensors are allocated.

    Attributes:
        latest: outline of the boundary value that was expected last, and those of the outputs of all earlier blocks.
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
        self._known: dict[int, tuple[Outline, tuple[Outline, ...]]] = {}
        self._headers: list[tuple[Any, torch.Tensor]] = []
        self._awaited = 0
        self._next_header: tuple[list[comm.Work], torch.Tensor] | None = None
        self.latest: tuple[Outline, tuple[Outline, ...]] | None = None

    def neighbours(self) -> tuple[int, int]:
        """Ranks of the previous and next stage; -1 (which no group holds) at the ends of the pipeline."""
        return -1 if self.previous is None else self.previous, -1 if self.following is None else self.following

    def pack(self, value: Any, block: str, outlines: tuple[Outline, ...] = ()) -> Boundary:
        """Flattens what a block returned.

        Args:
            value: what the block returned.
            block: the block's name, for messages.
            outlines: of the outputs of all earlier blocks, if shapes change from block to block.

        Raises:
            PipelineCutError: it holds something that cannot travel, or no tensor at all.
        """
        leaves, spec = tree_flatten(value)
        strangers = strangers_in(leaves)
        if strangers:
            raise PipelineCutError(f"{block} returns {', '.join(strangers)}, which cannot be sent to a stage")
        if not any(isinstance(x, torch.Tensor) for x in leaves):
            raise PipelineCutError(f"{block} returns no tensor, so that the next stage would receive nothing")
        elsewhere = {x.device.type for x in leaves if isinstance(x, torch.Tensor)} - {self.device.type}
        if elsewhere:
            raise PipelineCutError(
                f"{block} returns a tensor on {elsewhere.pop()}, but stages exchange what is on {self.device}; move it "
                "there in the block, or return a Python number"
            )
        return Boundary([x.contiguous() if isinstance(x, torch.Tensor) else x for x in leaves], spec, outlines)

    def announce(self, boundary: Boundary) -> None:
        """Sends the header (and a new structure) of a boundary value to the next stage, without waiting."""
        outline = Outline.of_leaves(boundary.leaves, boundary.spec)
        payload = pickle.dumps((outline, boundary.outlines))
        known = payload in self._sent
        number = self._sent.setdefault(payload, len(self._sent))
        self._post(torch.tensor([number, 0 if known else len(payload)], device="cpu"))
        if not known:
            self._post(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        if len(self._sent) >= _MAX_KNOWN:  # the receiver forgets at the same message
            self._sent.clear()

    def _post(self, tensor: torch.Tensor) -> None:
        assert self.following is not None, "the last stage has no next stage to announce to"
        works = comm.exchange([comm.SendRecv(tensor, self.following, send=True)], self.control)
        self._headers = [(w, t) for w, t in self._headers if not w.is_completed()]
        self._headers += [(work, tensor) for work in works]

    def await_headers(self, count: int) -> None:
        """So many boundary values are going to arrive: each header is received while the value before it is in use."""
        self._awaited = count
        self._receive_header_ahead()

    def _receive_header_ahead(self) -> None:
        if self._awaited and self._next_header is None:
            self._awaited -= 1
            header = torch.empty(2, dtype=torch.int64, device="cpu")
            self._next_header = self._start_receiving(header), header

    def expect(self) -> Boundary:
        """Waits for the header of the next boundary value and allocates its tensors.

        Raises:
            AssertionError: no more values were said to arrive.
        """
        assert self._next_header is not None, "await_headers says how many boundary values are to be expected"
        (works, header), self._next_header = self._next_header, None
        for work in works:
            work.wait()
        number, length = header.tolist()
        if length:
            payload = torch.empty(length, dtype=torch.uint8, device="cpu")
            for work in self._start_receiving(payload):
                work.wait()
            self._known[number] = pickle.loads(payload.numpy().tobytes())
        self._receive_header_ahead()
        self.latest = self._known[number]
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        return Boundary.like(*self.latest, self.device)

    def exchange(self, transfers: list[comm.SendRecv]) -> list[comm.Work]:
        """Starts transfers of tensors with the neighbours."""
        return comm.exchange(transfers, self.group)

    def _start_receiving(self, tensor: torch.Tensor) -> list[comm.Work]:
        assert self.previous is not None, "the first stage has no previous stage to receive from"
        return comm.exchange([comm.SendRecv(tensor, self.previous, send=False)], self.control)

    def finish(self) -> None:
        """Waits for outstanding headers."""
        for work, _ in self._headers:
            work.wait()
        self._headers.clear()
