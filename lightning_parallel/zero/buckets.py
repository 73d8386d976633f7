"""Mechanism: the values and gradients of one bucket of parameters, and this rank's share of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.zero.gradient_state import GradientState, wide_dtype
from lightning_parallel.zero.link import stand_in
from lightning_parallel.zero.replaced import put_back
from lightning_parallel.zero.shards import BucketLayout

if TYPE_CHECKING:
    from lightning_parallel.zero.host_storage import HostStorage
    from lightning_parallel.zero.share_home import DistantHome

__all__ = ["ShardBucket"]


class ShardBucket:
    """Moves parameters into one flat buffer, of which every rank owns a share.

    The optimizer works on `shards`: parameters of their own, views of this rank's share of the values (of a float32
    copy of it for half precision). The user's parameters stay whole and stay the same objects.

    Args:
        layout: who owns what.
        parameters: one for each slot.
        group: the data-parallel group.
        keeps_buffer: keep the memory of the full gradient between steps (stage 1).
        is_replicated: no optimizer updates these parameters: every rank gets their full gradients.
        storage: has the optimizer's side in host memory; None if it lies beside the parameters.
        sums_wide: gradients are kept and summed in float32 if parameters have half precision; otherwise as they come.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        group: ProcessGroup | None,
        keeps_buffer: bool,
        is_replicated: bool = False,
        storage: HostStorage | None = None,
        sums_wide: bool = True,
    ) -> None:
        self.layout = layout
        self.parameters = list(parameters)
        # Those of the tensor ranks' parts; after the run parameters are whole again, and files may still be written.
        self.shapes = [p.shape for p in self.parameters]
        self.group = self.gather_group = group
        self.keeps_buffer = keeps_buffer
        self.is_replicated = is_replicated
        self.storage = storage
        self.home: DistantHome | None = None  # where this rank's share lies, if not in `own`
        self.state = GradientState.EMPTY
        self.filled = [False] * len(self.parameters)
        self.present = [False] * len(self.parameters)
        first = self.parameters[0]
        self.wide = wide_dtype(first.dtype)
        self.gradient_dtype = self.wide if sums_wide else first.dtype
        self.values = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
        self._start, self._stop = layout.bounds[comm.group_rank(group)]
        self._places = self._views(self.values)
        for view, p in zip(self._places, self.parameters, strict=True):
            view.copy_(p.detach())
            p.data = view
        self.own = self.values[self._start : self._stop]
        self.master = self.own if first.dtype == self.wide else self._copy_for_optimizer()
        self.pieces = [layout.piece(place, comm.group_rank(group)) for place in range(len(self.parameters))]
        resting = self._between_steps()
        self.shards = [self._make_shard(place, resting) for place in range(len(self.parameters))]
        self._set_aside: list[Tensor | None] = []
        self._buffer: Tensor | None = None
        self._gradients: list[Tensor] = []
        self._reduced: Tensor | None = None
        self._work: Any = None

    def _views(self, flat: Tensor) -> list[Tensor]:
        slots = zip(self.layout.slots, self.shapes, strict=True)
        return [flat[slot.offset : slot.offset + slot.numel].view(shape) for slot, shape in slots]

    def _copy_for_optimizer(self) -> Tensor:
        """A float32 copy of this rank's share; with a storage, that makes it."""
        return self.own.to(self.wide) if self.storage is None else stand_in((self.own_size,), self.wide)

    def _between_steps(self) -> Tensor:
        """What shards are parts of between steps: as a gradient must have the dtype of its parameter, one that has."""
        if self.storage is not None:
            return stand_in((self.own_size,), self.gradient_dtype)
        return self.own if self.is_narrow else self.master

    def _make_shard(self, place: int, stepped: Tensor) -> nn.Parameter | None:
        own = self.own_part(place, stepped)
        return None if own is None else nn.Parameter(own, requires_grad=own.is_floating_point() or own.is_complex())

    def own_part(self, place: int, share: Tensor) -> Tensor | None:
        """Of a tensor over this rank's share, the part of one parameter: flat, or of its shape if it stays whole."""
        piece = self.pieces[place]
        if piece is None:
            return None
        start = self._start_of(place)
        return self._shaped(place, share[start : start + piece[1] - piece[0]])

    def _start_of(self, place: int) -> int:
        """Where this rank's piece of a parameter begins in its share."""
        piece = self.pieces[place]
        assert piece is not None, "this rank owns something of the parameter"
        return self.layout.slots[place].offset + piece[0] - self._start

    def _shaped(self, place: int, part: Tensor) -> Tensor:
        """Parameters that stay whole, and single numbers, keep their shape; ranges of others are flat."""
        shape = self.shard_shape(place)
        assert shape is not None, "only what this rank owns has a shape here"
        return part.view(shape)

    def shard_shape(self, place: int) -> torch.Size | None:
        """Shape of what this rank owns of a parameter; None if it owns nothing."""
        piece, shape = self.pieces[place], self.shapes[place]
        if piece is None or self.layout.owner is not None or not shape:
            return None if piece is None else shape
        return torch.Size((piece[1] - piece[0],))

    def cut(self, place: int, full: Tensor) -> Tensor | None:
        """Of a tensor of a parameter's shape, what this rank owns, as a copy."""
        piece = self.pieces[place]
        if piece is None:
            return None
        return self._shaped(place, full.reshape(-1)[piece[0] : piece[1]].clone())

    @property
    def is_active(self) -> bool:
        """Whether gradients are wanted for any of the parameters at this moment."""
        return any(p.requires_grad for p in self.parameters)

    @property
    def own_size(self) -> int:
        """Elements of this rank's share, padding included."""
        return self._stop - self._start

    def held_share(self) -> Tensor:
        """This rank's share of the values, wherever it lies; to be looked at."""
        return self.own if self.home is None else self.home.read(0, self.own_size)

    @property
    def gradient_buffer(self) -> Tensor | None:
        """Memory of the full gradient, while there is some."""
        return self._buffer

    @property
    def side(self) -> torch.device:
        """Where the optimizer's side is."""
        return self.values.device if self.storage is None else torch.device("cpu")

    @property
    def has_master(self) -> bool:
        """Whether the optimizer steps on a float32 copy of the values."""
        return self.master is not self.own

    @property
    def is_narrow(self) -> bool:
        """Whether gradients have half precision, between steps."""
        return self.gradient_dtype is not self.wide

    def is_part(self, place: int, value: Any) -> bool:
        """Whether a value in an optimizer's state has an entry for each element that this rank owns of a parameter."""
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape == self.shard_shape(place)

    def attach(self, values: Tensor) -> None:
        """Lets the shards be parts of a tensor over this rank's share."""
        for place, shard in enumerate(self.shards):
            part = None if shard is None else self.own_part(place, values)
            if shard is not None and part is not None:
                shard.data = part

    def widen(self) -> None:
        """For a step: shards and gradients in half precision become float32."""
        if self.is_narrow:
            gradients = [None if shard is None else shard.grad for shard in self.shards]
            self._give_gradients([None for _ in gradients])
            self.attach(self.master)
            self._give_gradients([None if g is None else g.to(self.wide) for g in gradients])
            self._set_aside = gradients

    def narrow(self) -> None:
        """After it: as before."""
        if self.is_narrow:
            self._give_gradients([None for _ in self.shards])
            self.attach(self._between_steps())
            self._give_gradients(self._set_aside)
            self._set_aside = []

    def _give_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for shard, gradient in zip(self.shards, gradients, strict=True):
            if shard is not None:
                shard.grad = gradient

    # -------------------------------------------------------------- gradients
    def add_gradient(self, place: int) -> None:
        """Adds a parameter's `.grad` to this rank's own sum, and removes it from the parameter.

        Raises:
            ValueError: the gradient is sparse.
        """
        parameter = self.parameters[place]
        gradient = parameter.grad
        assert gradient is not None, "only a parameter with a gradient has one to add"
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which is not reduced over "
                "replicas; use sparse=False for embeddings"
            )
        if self.state is not GradientState.LOCAL:
            self._begin()
        if self.filled[place]:
            self._gradients[place].add_(gradient)
        else:
            self._gradients[place].copy_(gradient)
        self.filled[place] = True
        parameter.grad = None

    def _begin(self) -> None:
        if self.state is not GradientState.EMPTY:
            raise RuntimeError(
                f"a gradient arrived in a bucket that holds {self.state.value}; use torch.utils.checkpoint with "
                "use_reentrant=False for modules that share parameters"
            )
        if self._buffer is None:
            self._use_buffer()
        elif (
            self.keeps_buffer and self.storage is None
        ):  # the last sum may still be in use, and lies where the new one will
            for shard in self.shards:
                if shard is not None and shard.grad is not None:
                    shard.grad = shard.grad.clone()
        self.state = GradientState.LOCAL

    def _use_buffer(self) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(self.layout.size, dtype=self.gradient_dtype, device=self.values.device)
            self._buffer[self.layout.used :] = 0  # everything before it is written before it is read
            self._gradients = self._views(self._buffer)
        return self._buffer

    def launch(self, average: bool) -> None:
        """Starts the sum over ranks; parameters without a gradient here take part with zeros."""
        if self.state is GradientState.EMPTY:
            self._begin()
        buffer = self._use_buffer()
        for view, filled in zip(self._gradients, self.filled, strict=True):
            if not filled:
                view.zero_()
        if average:
            buffer.div_(comm.group_size(self.group))
        own = buffer[self._start : self._stop]
        if self.layout.size == 0:
            self._work = None
        elif self.layout.owner is not None:
            self._work = comm.reduce_(buffer, self.layout.owner, self.group, async_op=True)
        else:
            own = own if self.keeps_buffer else torch.empty_like(own)
            self._work = comm.reduce_scatter_into(own, buffer, self.group, async_op=True)
        self._reduced = own
        self.present, self.filled = self.filled, [False] * len(self.filled)
        self.state = GradientState.REDUCING

    @property
    def has_landed(self) -> bool:
        """Whether nothing would have to wait for the sum, neither the host nor the device."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Waits for the sum; in stage 2 the memory of the full gradient is free afterwards."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self.storage is not None and self._reduced is not None:
            self._reduced = self.storage.keep_gradient(self._reduced)
        if not self.keeps_buffer:
            self._free()
        self.state = GradientState.REDUCED

    def _free(self) -> None:
        self._buffer, self._gradients = None, []

    def deliver(self) -> None:
        """Hands this rank's share of the sum to the shards, added to what they have."""
        reduced = self._take_reduced()
        for place, shard in enumerate(self.shards):
            if shard is None or not self.present[place]:
                continue
            part = self.own_part(place, reduced)
            shard.grad = part if shard.grad is None or part is None else shard.grad.add_(part)

    def deliver_in_full(self) -> None:
        """Hands the full sum to the parameters, added to what they have. Collective over the group."""
        full = torch.zeros_like(self._use_buffer())
        self._gather(full, self._take_reduced().to(full.device))
        for view, p, present in zip(self._views(full), self.parameters, self.present, strict=True):
            if present:
                gradient = view.to(p.dtype)
                p.grad = gradient if p.grad is None else p.grad.add_(gradient)
        if not self.keeps_buffer:
            self._free()

    def _take_reduced(self) -> Tensor:
        assert self._reduced is not None, "gradients are delivered once after they were reduced"
        reduced, self._reduced = self._reduced, None
        self.state = GradientState.EMPTY
        return reduced

    def show_local(self) -> None:
        """Lets parameters show what has accumulated on this rank so far."""
        for place, p in enumerate(self.parameters):
            if self.filled[place]:
                p.grad = self._gradients[place].to(p.dtype)

    def cut_gradients(self) -> None:
        """Gives the shards their parts of the parameters' full gradients."""
        for place, shard in enumerate(self.shards):
            gradient = self.parameters[place].grad
            if shard is not None:
                part = None if gradient is None else self.cut(place, gradient)
                shard.grad = None if part is None else part.to(self.side, self.gradient_dtype)

    def clear(self) -> None:
        """Forgets gradients that were not delivered."""
        self.filled = [False] * len(self.filled)
        self._reduced = None
        self.state = GradientState.EMPTY
        if not self.keeps_buffer:
            self._free()

    # -------------------------------------------------------------- values
    def readmit(self) -> None:
        """Takes over the values of parameters whose `data` somebody has replaced; see `put_back`."""
        put_back(self.parameters, self._places)

    def accept_changes(self, values: Tensor) -> None:
        """Takes over what somebody wrote into half-precision parameters since the last step.

        Args:
            values: this rank's share of them, where the float32 copy is.
        """
        if self.has_master:
            changed = values != self.master.to(values.dtype)
            self.master.copy_(torch.where(changed, values.to(self.wide), self.master))

    def publish(self) -> comm.Work | None:
        """Takes over what the optimizer changed, and sends it to every rank, as `share_values`."""
        if self.has_master:
            self.own.copy_(self.master)
        return self.share_values()

    def share_values(self) -> comm.Work | None:
        """Sends this rank's share of the values to every rank. Returns a handle to wait for, if there is one."""
        return self._gather(self.values, self.own, async_op=True)

    def _gather(self, full: Tensor, own: Tensor, async_op: bool = False) -> comm.Work | None:
        """Completes a flat tensor over the bucket from every rank's share. Collective over the group."""
        if self.layout.size == 0:
            return None
        if self.layout.owner is None:
            return comm.all_gather_into(full, own, self.gather_group, async_op)
        if self.layout.owner == comm.group_rank(self.group):
            full.copy_(own)
        source = comm.global_rank(self.gather_group, self.layout.owner)
        return comm.broadcast_(full, source, self.gather_group, async_op)

    def gather_full(self, parts: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
        """Full tensors of every parameter from this rank's parts of them (None: zeros). Collective over the group."""
        share = torch.zeros(self.layout.share(comm.group_rank(self.group)), dtype=dtype, device=self.values.device)
        for place, part in enumerate(parts):
            own = self.own_part(place, share)
            if own is not None and part is not None:
                own.copy_(part)
        full = torch.zeros(self.layout.size, dtype=dtype, device=self.values.device)
        self._gather(full, share)
        return self._views(full)

    def release(self) -> None:
        """Gives every parameter memory of its own again; float32 copies stay, for checkpoints of the finished run."""
        for p in self.parameters:
            p.data = p.data.clone()
        self.clear()
        self._free()
        kept = self.master if self.has_master else None
        self._places = []
        self.values = self.own = self.values.new_empty(0)
        self.master = self.own if kept is None else kept
        self.shards = [None] * len(self.shards)
