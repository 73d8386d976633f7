"""Mechanism: forwards of the split layers as mixins, and what a split layer knows (Shoeybi et al. 2019, section 3).

The same forwards serve the public classes and the modules of a user's model that are converted in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.tensor_parallel import mappings
from lightning_parallel.tensor_parallel.linear import column_linears, row_linear
from lightning_parallel.tensor_parallel.random import RegionState
from lightning_parallel.tensor_parallel.sharding import ShardSpec
from lightning_parallel.tensor_parallel.shards import gather_shards, take_shard
from lightning_parallel.weight_gradients import STORE, WeightGradients, linear

__all__ = [
    "SHARED",
    "STATE",
    "ColumnForward",
    "LayerState",
    "OwnColumnForward",
    "OwnRowForward",
    "OwnVocabForward",
    "ParallelForward",
    "RowForward",
    "VocabForward",
]

STATE = "_tensor_state"
SHARED = "_shared_input"


@dataclass(frozen=True, eq=False)
class LayerState:
    """What a parallel layer knows besides its parameters. Copies of the layer share it; pickles lose the group."""

    group: ProcessGroup | None
    spec: ShardSpec
    gather_output: bool = False
    copy_input: bool = True
    split_input: bool = False
    scatter_dim: int | None = None
    transposed: bool = False
    region: RegionState | None = None
    original_class: type[nn.Module] | None = None
    original: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Index of this process in the tensor group."""
        return comm.group_rank(self.group)

    def live_group(self) -> ProcessGroup | None:
        """The tensor group; None for a group of one.

        Raises:
            RuntimeError: the layer was unpickled and has no group yet.
        """
        if self.group is None and self.spec.ranks > 1:
            raise RuntimeError(
                f"a layer split over {self.spec.ranks} ranks was loaded without its process group; "
                "call attach_group(module, group) first"
            )
        return self.group

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "group": None}


class ParallelForward(nn.Module):
    """Base of every forward below; the module it is mixed into brings the parameters."""

    prefix: str
    weight: Tensor
    bias: Any
    padding_idx: int | None
    _tensor_state: LayerState

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tensor_rank={self._tensor_state.rank} of {self._tensor_state.spec.ranks}"


class ColumnForward(ParallelForward):
    """Forward of a column-parallel linear: the rank's rows of the weight make the rank's columns of the output."""

    prefix = "ColumnParallel"

    def forward(self, input: Tensor) -> Tensor:
        state = self._tensor_state
        group = state.live_group()
        if group is None:
            return super().forward(input)
        if state.copy_input and torch.is_grad_enabled() and input.requires_grad:
            shared = self.__dict__.get(SHARED)
            if shared is not None:
                y = shared.linear(self, input, group)
            else:
                store = self.__dict__.get(STORE)
                y = column_linears(input, group, self.weight, self.bias, transposed=state.transposed, store=store)[0]
        else:  # no gradient of the input to reduce
            y = self._alone(input, state)
        return _leave_column(self, y, state)

    def _alone(self, input: Tensor, state: LayerState) -> Tensor:
        store: WeightGradients | None = self.__dict__.get(STORE)
        put_off = None if store is None else store.put_off(self.weight, transposed=state.transposed)
        return super().forward(input) if put_off is None else linear(input, self.weight, self.bias, put_off[0])


class OwnColumnForward(ParallelForward):
    """Column-parallel forward around a subclass's own forward."""

    prefix = "ColumnParallel"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        state = self._tensor_state
        group = state.live_group()
        x, args, kwargs = _take_input(args, kwargs)
        x = mappings.copy_to_group(x, group) if state.copy_input else x
        return _leave_column(self, super().forward(x, *args, **kwargs), state)


def _take_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The first argument, whatever its name, and the others."""
    if args:
        return args[0], args[1:], kwargs
    name = next(iter(kwargs))
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}


def _leave_column(module: nn.Module, y: Tensor, state: LayerState) -> Tensor:
    if state.gather_output:
        return gather_shards(y, state.spec, state.group)
    if state.region is not None and module.training:
        state.region.enter_sharded_region(state.rank, y.device)
    return y


class RowForward(ParallelForward):
    """Forward of a row-parallel linear: partial products of the rank's inputs, summed over the group, plus one bias."""

    prefix = "RowParallel"

    def forward(self, input: Tensor) -> Tensor:
        state = self._tensor_state
        group = state.live_group()
        if group is None:
            return super().forward(input)
        x = _enter_row(input, state)
        dim, store = state.scatter_dim, self.__dict__.get(STORE)
        return row_linear(x, group, self.weight, self.bias, dim, transposed=state.transposed, store=store)


class OwnRowForward(ParallelForward):
    """Row-parallel forward around a subclass's own forward, which must be linear and have no bias."""

    prefix = "RowParallel"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        state = self._tensor_state
        group = state.live_group()
        x, args, kwargs = _take_input(args, kwargs)
        y = super().forward(_enter_row(x, state), *args, **kwargs)
        if state.scatter_dim is not None:
            return mappings.reduce_scatter_sequence(y, group, state.scatter_dim)
        return mappings.reduce_from_group(y, group)


def _enter_row(x: Tensor, state: LayerState) -> Tensor:
    if state.region is not None:
        state.region.leave_sharded_region(x.device)
    return take_shard(x, state.spec, state.group) if state.split_input else x


class VocabForward(ParallelForward):
    """Forward of a vocabulary-parallel embedding: every id is looked up on the one rank that holds it, then summed."""

    prefix = "VocabParallel"

    def forward(self, input: Tensor) -> Tensor:
        state = self._tensor_state
        group = state.live_group()
        if group is None:
            return super().forward(input)
        local, outside = _local_ids(input, state)
        held = sum(segment.size for segment in state.spec.parts[state.rank])
        if held == 0:  # nothing to look up, yet the output needs the same gradients as on the other ranks
            y = self.weight.new_zeros((*input.shape, self.weight.shape[0])) @ self.weight
        else:
            weight = self.weight if held == self.weight.shape[0] else self.weight.narrow(0, 0, held)
            y = F.embedding(local, weight, self.padding_idx)
            if outside is not None:
                y.masked_fill_(outside.unsqueeze(-1), 0)
        return mappings.reduce_from_group_(y, group)


class OwnVocabForward(ParallelForward):
    """Vocabulary-parallel forward around a subclass's own forward, such as a scaled embedding."""

    prefix = "VocabParallel"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        state = self._tensor_state
        group = state.live_group()
        ids, args, kwargs = _take_input(args, kwargs)
        local, outside = _local_ids(ids, state)
        y = super().forward(local, *args, **kwargs)
        if outside is not None:
            y = y.masked_fill(outside.unsqueeze(-1), 0)
        return mappings.reduce_from_group(y, group)


def _local_ids(ids: Tensor, state: LayerState) -> tuple[Tensor, Tensor | None]:
    """Row numbers in this rank's shard, and where an id lies in another's (looked up in row 0 then).

    The first rank does not mask negative ids and the last holder not those past the vocabulary, so that these fail
    there as they do in ``nn.Embedding``.
    """
    part = state.spec.parts[state.rank]
    if not part:
        return torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)
    start, stop = part[0].start, part[-1].stop
    outside = None
    if start > 0:
        outside = ids < start
    if stop < state.spec.size:
        outside = ids >= stop if outside is None else outside | (ids >= stop)
    local = ids - start if start else ids
    return (local, None) if outside is None else (local.masked_fill(outside, 0), outside)
