"""Mechanism: between the optimizer state of one replica, sharded over all, and that of one that is not sharded.

A state is a shard's if it has the shard's shape; everything else (step counts, factored moments of optimizers that own
whole parameters) is taken from the first rank that has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.zero.buckets import ShardBucket
from lightning_parallel.zero.optimizer import ShardedOptimizer

__all__ = ["MASTER", "load_full_state", "whole_state"]

MASTER = "master_weight"
"""Key under which the float32 copy of a half-precision parameter is saved beside its moments."""


@contextmanager
def whole_state(sharded: ShardedOptimizer, control: ProcessGroup | None, keep: bool) -> Iterator[None]:
    """Inside, the optimizer holds the state of a run without shards, on the CPU. Collective over the replicas.

    Args:
        sharded: the optimizer.
        control: the replicas on a host-side group.
        keep: False leaves the state out and saves the memory; the rank still takes part.
    """
    optimizer = sharded.optimizer
    own = dict(optimizer.state)
    full = dict(own)
    for bucket in sharded.sharder.buckets_of(sharded.parameters()):
        with sharded.sharder.resident(sharded, [bucket]):
            full |= _full_states(bucket, optimizer.state, control, keep)
    members = {id(p) for p in sharded.parameters()}
    optimizer.state.clear()
    optimizer.state.update({p: s for p, s in full.items() if not isinstance(p, Tensor) or id(p) in members})
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(own)


def _full_states(
    bucket: ShardBucket, states: Mapping[Any, Any], control: ProcessGroup | None, keep: bool
) -> dict[Any, dict[str, Any]]:
    mine: dict[int, dict[str, Any]] = {}
    parts: dict[int, dict[str, Tensor]] = {}
    for place, p in enumerate(bucket.parameters):
        master = bucket.own_part(place, bucket.master) if bucket.has_master else None
        if bucket.pieces[place] is None or (p not in states and master is None):
            continue
        state = states.get(p, {})
        parts[place] = {key: value for key, value in state.items() if bucket.is_part(place, value)}
        parts[place] |= {} if master is None else {MASTER: master}
        mine[place] = {k: _to_cpu(v) for k, v in state.items() if k not in parts[place]}
        mine[place] |= {key: (value.dtype,) for key, value in parts[place].items()}
    outline: dict[int, dict[str, Any]] = {}
    for found in comm.gather_objects((mine, _order(states, bucket)), control):
        for place, entry in found[0].items():
            outline.setdefault(place, {key: entry[key] for key in [*found[1][place], *entry] if key in entry})
    for kind in _kinds(outline):
        held = [parts.get(place, {}).get(kind[0]) for place in range(len(bucket.parameters))]
        for place, full in enumerate(bucket.gather_full(held, kind[1])):
            if outline.get(place, {}).get(kind[0]) == (kind[1],):
                outline[place][kind[0]] = full.to("cpu", copy=True) if keep else full.new_empty(0)
    return {bucket.parameters[place]: entry for place, entry in sorted(outline.items())} if keep else {}


def _order(states: Mapping[Any, Any], bucket: ShardBucket) -> dict[int, list[str]]:
    """Keys of each state in the order in which the optimizer made them."""
    return {place: list(states.get(p, ())) for place, p in enumerate(bucket.parameters)}


def _kinds(outline: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, torch.dtype]]:
    """Every state that is in parts, with its dtype, in the same order on every rank."""
    found = {
        (key, value[0]): None
        for _, entry in sorted(outline.items())
        for key, value in entry.items()
        if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], torch.dtype)
    }
    return list(found)


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def load_full_state(sharded: ShardedOptimizer, full: Mapping[str, Any]) -> None:
    """Loads a state dict of a run without shards, of which this rank keeps its parts."""
    sharder = sharded.sharder
    sharder.refresh()
    with sharder.resident(sharded, sharder.buckets_of(sharded.parameters()), changed=True):
        _load(sharded, full)


def _load(sharded: ShardedOptimizer, full: Mapping[str, Any]) -> None:
    sharder = sharded.sharder
    state = {key: value for key, value in full["state"].items() if not isinstance(key, int)}
    for index, p in enumerate(sharded.parameters()):
        entry = full["state"].get(index)
        if entry is None:
            continue
        found = sharder.find(p)
        if found is None:
            state[index] = entry
            continue
        bucket, place = found
        if bucket.pieces[place] is None:
            continue
        own = sharded.cut_state(p, {key: value for key, value in entry.items() if key != MASTER})
        state[index] = own
        part = bucket.own_part(place, bucket.master)
        if MASTER in entry and bucket.has_master and part is not None:
            saved = bucket.cut(place, entry[MASTER])
            assert saved is not None, "this rank owns something of the parameter"
            part.copy_(saved)
    sharded.load_state_dict({**full, "state": state})
