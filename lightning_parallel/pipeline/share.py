"""Mechanism: sends a nested value from the last stage to every stage of a replica, with the fewest messages.

One header on the host-side group, and one message per dtype. The structure travels only when it is new; Python numbers
travel apart, on the host-side group, so that one which changes every step does not make a new structure and reading it
never waits for the device.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_parallel import comm
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.outline import skeleton_of, spec_of

__all__ = ["TreeBroadcast"]

_MAX_KNOWN = 256


class TreeBroadcast:
    """Broadcasts from the last stage; collective over the pipeline group."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.source = mesh.rank_of_stage(mesh.layout.pipeline - 1)
        self._numbers: dict[bytes, int] = {}
        self._structures: dict[int, bytes] = {}

    def __call__(self, value: Any = None) -> Any:
        """Returns the last stage's `value` on every stage; other stages' argument is ignored.

        Tensors arrive on the mesh's device, without a graph.

        Raises:
            TypeError: the value holds something that cannot be pickled; on every stage.
        """
        if self.mesh.pipeline is None:
            return value
        if self.mesh.is_last_stage:
            self._send(value)
            return value
        return self._receive()

    def _send(self, value: Any) -> None:
        leaves, spec = tree_flatten(value)
        kinds: list[Any] = []
        tensors: list[torch.Tensor] = []
        for leaf in leaves:
            kind, tensor = self._encode(leaf)
            kinds.append(kind)
            if tensor is not None:
                tensors.append(tensor)
        carried = [k for k in kinds if k[0] != "object"]
        payload = self._pickled((kinds, skeleton_of(spec)))
        known = payload in self._numbers
        number = self._numbers.setdefault(payload, len(self._numbers))
        comm.broadcast_(
            torch.tensor([number, 0 if known else len(payload)], device="cpu"), self.source, self.mesh.control
        )
        if not known:
            comm.broadcast_(torch.frombuffer(bytearray(payload), dtype=torch.uint8), self.source, self.mesh.control)
        for on_host, dtype in _messages(kinds):
            parts = [t.flatten() for k, t in zip(carried, tensors, strict=True) if _message(k) == (on_host, dtype)]
            comm.broadcast_(torch.cat(parts), self.source, self._group(on_host))
        self._forget_if_full()

    def _pickled(self, structure: Any) -> bytes:
        """The structure as bytes; if that fails, the other stages are told instead of left waiting."""
        try:
            return pickle.dumps(structure)
        except Exception as error:
            text = f"what the step returned or logged cannot be sent to the other pipeline stages: {error}"
            encoded = text.encode()
            comm.broadcast_(torch.tensor([-1, len(encoded)], device="cpu"), self.source, self.mesh.control)
            comm.broadcast_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), self.source, self.mesh.control)
            raise TypeError(text) from error

    def _group(self, on_host: bool) -> comm.ProcessGroup | None:
        return self.mesh.control if on_host else self.mesh.pipeline

    def _encode(self, leaf: Any) -> tuple[Any, torch.Tensor | None]:
        if isinstance(leaf, torch.Tensor):
            return ("tensor", tuple(leaf.shape), leaf.dtype), leaf.detach().to(self.mesh.device)
        if isinstance(leaf, float):
            return ("float", (), torch.float64), torch.tensor([leaf], dtype=torch.float64, device="cpu")
        if isinstance(leaf, int) and not isinstance(leaf, bool) and abs(leaf) < 2**62:
            return ("int", (), torch.int64), torch.tensor([leaf], dtype=torch.int64, device="cpu")
        return ("object", leaf), None

    def _receive(self) -> Any:
        header = torch.empty(2, dtype=torch.int64, device="cpu")
        comm.broadcast_(header, self.source, self.mesh.control)
        number, length = header.tolist()
        if length:
            buffer = torch.empty(length, dtype=torch.uint8, device="cpu")
            comm.broadcast_(buffer, self.source, self.mesh.control)
            received = buffer.numpy().tobytes()
            if number < 0:
                raise TypeError(received.decode())
            self._structures[number] = received
        kinds, skeleton = pickle.loads(self._structures[number])
        flats: dict[tuple[bool, torch.dtype], torch.Tensor] = {}
        for message in _messages(kinds):
            on_host, dtype = message
            count = sum(_numel(k[1]) for k in kinds if k[0] != "object" and _message(k) == message)
            flats[message] = torch.empty(count, dtype=dtype, device="cpu" if on_host else self.mesh.device)
            comm.broadcast_(flats[message], self.source, self._group(on_host))
        self._forget_if_full()
        return tree_unflatten(_decode(kinds, flats), spec_of(skeleton))

    def _forget_if_full(self) -> None:
        """Both sides forget at the same message, so that the numbers keep meaning the same."""
        if max(len(self._numbers), len(self._structures)) >= _MAX_KNOWN:
            self._numbers.clear()
            self._structures.clear()


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _message(kind: Any) -> tuple[bool, torch.dtype]:
    """Which message carries a leaf: (whether on the host, dtype)."""
    return kind[0] != "tensor", kind[2]


def _messages(kinds: list[Any]) -> list[tuple[bool, torch.dtype]]:
    """The messages that a structure needs, in the same order on both sides."""
    return list(dict.fromkeys(_message(k) for k in kinds if k[0] != "object"))


def _decode(kinds: list[Any], flats: dict[tuple[bool, torch.dtype], torch.Tensor]) -> list[Any]:
    position = dict.fromkeys(flats, 0)
    leaves: list[Any] = []
    for kind in kinds:
        if kind[0] == "object":
            leaves.append(kind[1])
            continue
        message = _message(kind)
        start = position[message]
        position[message] = start + _numel(kind[1])
        piece = flats[message][start : position[message]]
        leaves.append(piece.view(kind[1]).clone() if kind[0] == "tensor" else piece.item())
    return leaves
