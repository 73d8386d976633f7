"""Mechanism: the optimizer's states and float32 copies of shards in a file (Rajbhandari et al. 2021, section 5.2).

Gradients stay in host memory. A step has the states of at most three buckets there: one is read while the next one is
stepped and the one before is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.zero.buckets import ShardBucket
from lightning_parallel.zero.host_storage import HostStorage
from lightning_parallel.zero.link import HostBuffers, bytes_of, stand_in
from lightning_parallel.zero.offload import Extent, FileLayout
from lightning_parallel.zero.placement import plain_step
from lightning_parallel.zero.share_home import FileHome, Shelf
from lightning_parallel.zero.state_file import Pending, StateFile

if TYPE_CHECKING:
    from lightning_parallel.zero.unit_bucket import UnitBucket

__all__ = ["DiskStorage"]

Lane = tuple[str, torch.dtype]
"""Something that the optimizer keeps for each element of a bucket: its name and dtype."""
MASTER = ""
"""Name of the lane of float32 copies: no optimizer calls anything so."""


@dataclass
class _OnDisk:
    """What is known of a bucket whose states are in the file.

    Attributes:
        number: of the bucket in the file.
        keys: for each parameter everything in its state in the optimizer's order, with the dtype of what is in the
            file; None without a state.
        lanes: what of the file is in memory.
        pending: reads or writes of that.
    """

    number: int
    keys: list[dict[str, torch.dtype | None] | None]
    lanes: dict[Lane, Tensor] = field(default_factory=dict)
    pending: list[Pending] = field(default_factory=list)

    def needed(self, bucket: ShardBucket) -> set[Lane]:
        """Lanes that hold something."""
        held = {(key, kind) for keys in self.keys if keys for key, kind in keys.items() if kind is not None}
        return held | ({(MASTER, bucket.wide)} if bucket.has_master else set())

    def wait(self) -> None:
        for pending in self.pending:
            pending.wait()
        self.pending = []


class DiskStorage(HostStorage):
    """A storage whose states are in one file per rank.

    Args:
        device: where the parameters are.
        group: the data-parallel group.
        path: folder for the file's own folder.

    Raises:
        ValueError: on every rank, if one of them cannot write there.
    """

    def __init__(self, device: torch.device, group: ProcessGroup | None, path: str | Path) -> None:
        super().__init__(device)
        self._group = group
        self._path = path
        self._layout = FileLayout()
        self._known: dict[ShardBucket, _OnDisk] = {}
        self._open: StateFile | None = None
        problem = None
        try:
            self._open = StateFile(path, f"rank-{comm.global_rank(group, comm.group_rank(group))}")
        except OSError as error:
            problem = str(error)
        self._agree(problem)
        self.shelf = Shelf(self.file, self.buffers, HostBuffers(self.link.pins), self.postponed)
        self._housed = 0

    @property
    def file(self) -> StateFile:
        """The file of this rank."""
        assert self._open is not None, "the file exists until it is removed"
        return self._open

    def _agree(self, problem: str | None) -> None:
        """Raises the same ValueError on every rank if one has a problem."""
        problems = comm.gather_objects(problem, self._group)
        texts = [f"replica {rank} says: {text}" for rank, text in enumerate(problems) if text is not None]
        if texts:
            self.remove()
            raise ValueError(
                f"nvme_path={str(self._path)!r} cannot take the optimizer's state: {texts[0]}; free space there, give "
                "a folder on another disk, or use offload='cpu'"
            )

    def adopt(self, buckets: Sequence[tuple[ShardBucket, torch.optim.Optimizer]]) -> None:
        """New buckets: takes all the space that they will need and writes what they have. Collective over the group.

        Raises:
            ValueError: on every rank, if one of them has no space.
        """
        for bucket, optimizer in buckets:
            self._known[bucket] = _OnDisk(len(self._known), [None] * len(bucket.parameters))
            for lane in _foreseen(bucket, optimizer):
                self._extent(bucket, lane)
        self._reserve()
        for bucket, optimizer in buckets:
            if bucket.has_master:
                master = self.buffers.take(bucket.own_size, bucket.wide)
                self._known[bucket].lanes[MASTER, bucket.wide] = master.copy_(bucket.held_share())
                bucket.master = master
            self._put(bucket, optimizer)
            self._release(bucket)

    def _reserve(self) -> None:
        problem = None
        try:
            self.file.reserve(self._layout.size)
        except OSError as error:
            problem = str(error)
        self._agree(problem)

    def house(self, bucket: UnitBucket) -> None:
        """Lets this rank's share of a unit's parameters lie in the file. Collective over the group.

        Raises:
            ValueError: on every rank, if one of them has no space.
        """
        extent = self._layout.place(self._housed, "parameters", bucket.own_size * bucket.own.dtype.itemsize)
        self._housed += 1
        self._reserve()
        bucket.move_to(FileHome(bucket.own, self.link, self.shelf, extent))

    def _extent(self, bucket: ShardBucket, lane: Lane) -> Extent:
        name, dtype = lane
        size = bucket.own_size * dtype.itemsize
        return self._layout.place(self._known[bucket].number, f"{name} {dtype}", size)

    # -------------------------------------------------------------- steps
    def fetch(self, bucket: ShardBucket) -> None:
        """Begins to bring in what a step on a bucket needs."""
        self._begin_reading(bucket)
        super().fetch(bucket)

    def arrive(self, bucket: ShardBucket, optimizer: torch.optim.Optimizer) -> None:
        """Waits for it; the shards and their states can be used."""
        self._finish_reading(bucket, optimizer)
        super().arrive(bucket, optimizer)

    def send(self, bucket: ShardBucket, optimizer: torch.optim.Optimizer) -> comm.Work | None:
        """Begins to put back what the step changed, on this rank and on the others. Collective over the group.

        Returns:
            A handle to wait for before the parameters are used, if there is one.
        """
        work = super().send(bucket, optimizer)
        self._put(bucket, optimizer)
        return work

    def settle(self, bucket: ShardBucket) -> None:
        """Waits until the bucket needs no memory on the host any more but what stays there between steps."""
        super().settle(bucket)
        self._release(bucket)

    # -------------------------------------------------------------- between memory and file
    def _begin_reading(self, bucket: ShardBucket) -> None:
        known = self._known[bucket]
        for lane in sorted(known.needed(bucket), key=str):
            values = self.buffers.take(bucket.own_size, lane[1])
            known.lanes[lane] = values
            known.pending.append(self.file.read(self._extent(bucket, lane), bytes_of(values)))

    def _finish_reading(self, bucket: ShardBucket, optimizer: torch.optim.Optimizer) -> None:
        known = self._known[bucket]
        known.wait()
        if bucket.has_master:
            bucket.master = known.lanes[MASTER, bucket.wide]
            bucket.attach(bucket.master)
        for place, keys in enumerate(known.keys):
            if keys is not None:
                owner = _owner(bucket, place, optimizer)
                held = optimizer.state.get(owner)
                if held is None:  # its user lets the optimizer begin anew
                    known.keys[place] = None
                    continue
                optimizer.state[owner] = {
                    key: held[key] if dtype is None else bucket.own_part(place, known.lanes[key, dtype])
                    for key, dtype in keys.items()
                }

    def _put(self, bucket: ShardBucket, optimizer: torch.optim.Optimizer) -> None:
        """Takes the states of a bucket from its optimizer and begins to write them."""
        known = self._known[bucket]
        self._take(bucket, optimizer)
        for lane in known.lanes:
            self._extent(bucket, lane)
        self.file.reserve(self._layout.size)
        known.pending = [
            self.file.write(self._extent(bucket, lane), bytes_of(values)) for lane, values in known.lanes.items()
        ]

    def _take(self, bucket: ShardBucket, optimizer: torch.optim.Optimizer) -> None:
        known = self._known[bucket]
        for place in range(len(bucket.parameters)):
            owner = _owner(bucket, place, optimizer)
            state = optimizer.state.get(owner)
            if state is None or bucket.pieces[place] is None:
                known.keys[place] = None
                continue
            parts = {key: value for key, value in state.items() if bucket.is_part(place, value)}
            known.keys[place] = {key: parts[key].dtype if key in parts else None for key in state}
            optimizer.state[owner] = {key: value for key, value in state.items() if key not in parts}
            for key, value in parts.items():
                lane = key, value.dtype
                if lane not in known.lanes:
                    known.lanes[lane] = self.buffers.take(bucket.own_size, value.dtype)
                part = bucket.own_part(place, known.lanes[lane])
                assert part is not None, "this rank owns something of the parameter"
                if part.data_ptr() != value.data_ptr():
                    part.copy_(value)

    def _release(self, bucket: ShardBucket) -> None:
        """Waits for reads and writes, and gives the memory back."""
        known = self._known[bucket]
        known.wait()
        for values in known.lanes.values():
            self.buffers.give(values)
        known.lanes = {}
        if bucket.has_master:
            bucket.master = stand_in((bucket.own_size,), bucket.wide)
        self._detach(bucket)

    # -------------------------------------------------------------- checkpoints and the end
    @contextmanager
    def resident(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[ShardBucket], changed: bool
    ) -> Iterator[None]:
        """Inside, between two steps, the states of some buckets and their float32 copies are in memory.

        Args:
            optimizer: that steps on them.
            buckets: which.
            changed: they are other ones afterwards.
        """
        known = [bucket for bucket in buckets if bucket in self._known]
        for bucket in known:
            self._begin_reading(bucket)
        for bucket in known:
            self._finish_reading(bucket, optimizer)
        try:
            yield
        finally:
            for bucket in known:
                if changed:
                    self._put(bucket, optimizer)
                else:
                    self._take(bucket, optimizer)
            for bucket in known:
                self._release(bucket)
            self.buffers.clear()  # it may have been all of them

    def rest(self) -> None:
        """The run is over; what the optimizer has remains, in the file."""
        super().rest()
        if self._open is not None:
            self._open.rest()

    def remove(self) -> None:
        """Nothing is needed any more: removes the file."""
        super().remove()
        if self._open is not None:
            self._open.remove()
            self._open = None


def _owner(bucket: ShardBucket, place: int, optimizer: torch.optim.Optimizer) -> Any:
    """Under what the optimizer files the state: the shard within a step, the user's parameter between steps."""
    shard = bucket.shards[place]
    return bucket.parameters[place] if shard is None or shard not in optimizer.state else shard


def _foreseen(bucket: ShardBucket, optimizer: torch.optim.Optimizer) -> list[Lane]:
    """Everything that will be kept for each element of a bucket."""
    lanes: dict[Lane, None] = {(MASTER, bucket.wide): None} if bucket.has_master else {}
    owned = {id(p): place for place, p in enumerate(bucket.parameters) if bucket.pieces[place] is not None}
    for group in optimizer.param_groups:
        places = [owned[id(p)] for p in group["params"] if id(p) in owned]
        made = [place for place in places if bucket.parameters[place] in optimizer.state]  # before the first step
        for place in made:
            state = optimizer.state[bucket.parameters[place]]
            lanes |= dict.fromkeys((key, v.dtype) for key, v in state.items() if bucket.is_part(place, v))
        if places and not made:
            lanes |= dict.fromkeys(_rehearsed(optimizer, group, bucket.wide))
    return list(lanes)


def _rehearsed(optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype) -> list[Lane]:
    """What an optimizer keeps for the elements of a group, seen in a step on a parameter that is nobody's."""
    nobodys = nn.Parameter(torch.zeros(2, dtype=dtype))
    nobodys.grad = torch.ones(2, dtype=dtype)
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [nobodys]}]
    try:
        plain_step(optimizer)
    finally:
        optimizer.param_groups = groups
    state = optimizer.state.pop(nobodys, {})
    return [(key, v.dtype) for key, v in state.items() if isinstance(v, Tensor) and v.shape == nobodys.shape]
