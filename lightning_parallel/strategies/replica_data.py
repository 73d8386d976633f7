"""Glue: replicas whose data has different numbers of batches: told before one waits for the others, or added up.

A training step needs every replica, so that each must have the same batches there. In validation, test and prediction
each replica takes as many steps as it has batches, but at least one of every dataloader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len

from lightning_parallel import comm
from lightning_parallel.mesh import Mesh
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.sight import Sight

__all__ = ["Batch", "Logged", "ReplicaData"]


_DATA = {"train": "training", "val": "validation", "test": "test", "predict": "prediction"}


class Batch(IntEnum):
    """What a replica's data holds for the next training step."""

    ABSENT = 0
    MORE_FOLLOW = 1
    LAST = 2
    NOTHING = 3  # a batch that is None, which Lightning passes over


@dataclass(frozen=True)
class Logged:
    """What the steps of one evaluation dataloader logged.

    Attributes:
        results: the loop's result collection.
        fx: name of the step.
        place: the dataloader's number; None if there is only one.
        combined: whether logged values are combined over replicas at all.
    """

    results: Any
    fx: str
    place: int | None
    combined: bool

    def sums(self, also_on_step: bool) -> dict[str, tuple[str, float, float]]:
        """See `running_sums`."""
        return _compat.running_sums(self.results, self.fx, self.place, also_on_step) if self.combined else {}

    def set_sums(self, sums: dict[str, tuple[float, float]]) -> None:
        """Replaces them."""
        _compat.set_running_sums(self.results, sums)

    def metrics(self) -> set[str]:
        """Names of torchmetrics objects, which all replicas compute together at the end."""
        return _compat.running_metrics(self.results, self.fx, self.place)


class ReplicaData:
    """Of one rank's run; the ranks of a replica have the same data, and say the same.

    Args:
        mesh: groups of this rank.
        sight: lets ranks meet that took steps of their own.
    """

    def __init__(self, mesh: Mesh, sight: Sight) -> None:
        self.mesh = mesh
        self._sight = sight

    # -------------------------------------------------------------- before and in training
    def refuse_missing(self, loader: object, stage: str, limit: float) -> None:
        """Tells, before any step, if some replicas have no batch of a dataloader. Collective over the replicas.

        Args:
            loader: this replica's part; says nothing if it has no length.
            stage: "train", "val", "test" or "predict", as in the trainer's options.
            limit: that limit; a float is a share of the batches.

        Raises:
            ValueError: some have none and others do, on every rank.
        """
        length = sized_len(loader)
        planned = None if length is None else int(length * limit) if isinstance(limit, float) else min(length, limit)
        counts = comm.gather_objects(planned, self.mesh.data_control)
        if any(count == 0 for count in counts) and any(count != 0 for count in counts):
            share = f" with limit_{stage}_batches={limit}" if isinstance(limit, float) and limit < 1 else ""
            raise ValueError(
                f"the {_DATA[stage]} data{share} has no batch on {_some(counts)}; give each at least one batch"
            )

    def agree_on_batch(self, state: Batch, number: int) -> None:
        """Before each training step. Collective over the world.

        Args:
            state: what this replica's data holds.
            number: of this batch in the epoch, from 1.

        Raises:
            ValueError: not all replicas are to take this step, or not all will take the next; on every rank.
        """
        low, high = self._extremes(state)
        if low == high:
            return
        if low == Batch.ABSENT:
            states = comm.gather_objects(int(state), self.mesh.data_control)
            limit = f", for example limit_train_batches={number - 1}" if number > 1 else ", at least one"
            raise ValueError(
                f"the training data has no batch {number} of this epoch on {_some(states)}; give every replica the "
                f"same number of batches{limit}"
            )
        if high == Batch.NOTHING:
            raise ValueError(
                f"batch {number} of this epoch is None on some replicas, which would leave its step out alone; let the "
                "data give a batch to each replica, or None to all"
            )
        raise ValueError(
            f"the training data of some replicas ends with batch {number} of this epoch and that of others goes on; "
            f"give every replica the same number of batches, for example limit_train_batches={number}"
        )

    def require_batch(self, batch: Any) -> None:
        """Before something is planned with the first training batch. Collective over the world.

        Raises:
            ValueError: there is none, on some replicas or on all.
        """
        self.agree_to_start("train", batch is not None)
        if batch is None:
            raise ValueError("the training data has no batch, but how to share the steps is planned with its first one")

    # -------------------------------------------------------------- evaluation
    def agree_to_start(self, stage: str, has_batch: bool) -> None:
        """Before the first step of a stage. Collective over the world.

        Raises:
            ValueError: some replicas will take no step at all, on every rank.
        """
        low, high = self._extremes(int(has_batch))
        if low != high:
            counts = comm.gather_objects(int(has_batch), self.mesh.data_control)
            raise ValueError(f"the {_DATA[stage]} data has no batch on {_some(counts)}; give each at least one batch")

    def add_up(self, dataloader: int, taken: int, lockstep: bool, logged: Logged) -> None:
        """After the last batch of an evaluation dataloader: adds up what its steps logged. Collective over replicas.

        Once per epoch and by name, so that replicas may have different numbers of batches and different keys.

        Args:
            dataloader: its number.
            taken: steps that this replica took.
            lockstep: whether replicas took the same steps, of which values that are shown per step are global already.
            logged: by these steps.

        Raises:
            ValueError: some replicas had no batch, or log other metrics than others; on every rank.
        """
        self._sight.meet(apart=not lockstep)
        sums = logged.sums(also_on_step=not lockstep) if taken else {}
        metrics = logged.metrics() if taken else set()
        told = comm.gather_objects((taken, metrics, sums), self.mesh.data_control)
        counts = [count for count, _, _ in told]
        if 0 in counts and any(counts):
            name = logged.fx.removesuffix("_step")
            raise ValueError(
                f"{name} dataloader {dataloader} has no batch on {_some(counts)}; give each at least one batch"
            )
        names = [found for _, found, _ in told]
        odd = sorted(set.union(*names) - set.intersection(*names))
        if odd:
            raise ValueError(
                f"{logged.fx} logs the metric {odd[0]!r} on some replicas only, but all must compute it together"
            )
        if taken:
            logged.set_sums(_joined([part for _, _, part in told]))

    def _extremes(self, state: int) -> tuple[int, int]:
        self._sight.meet()
        votes = torch.tensor([-int(state), int(state)], device="cpu")
        comm.all_reduce_(votes, self.mesh.world_control, "max")
        return -int(votes[0]), int(votes[1])


def _some(counts: Sequence[int | None]) -> str:
    """Names the replicas without batches.

    >>> _some([3, 0, None, 0])
    'replicas 1 and 3 of 4'
    >>> _some([0, 2])
    'replica 0 of 2'
    """
    lacking = [str(replica) for replica, count in enumerate(counts) if count == 0]
    named = " and ".join([", ".join(lacking[:-1]), lacking[-1]]) if len(lacking) > 1 else lacking[0]
    return f"replica{'s' if len(lacking) > 1 else ''} {named} of {len(counts)}"


def _joined(parts: Sequence[Mapping[str, tuple[str, float, float]]]) -> dict[str, tuple[float, float]]:
    """Sums, extremes and sample counts of all replicas.

    >>> _joined([{"a": ("mean", 1.0, 2.0), "b": ("max", 3.0, 0.0)}, {"a": ("mean", 2.0, 1.0), "b": ("max", 1.0, 0.0)}])
    {'a': (3.0, 3.0), 'b': (3.0, 0.0)}
    """
    sums: dict[str, tuple[float, float]] = {}
    for part in parts:
        for key, (reduction, value, samples) in part.items():
            if key not in sums:
                sums[key] = (value, samples)
                continue
            old, count = sums[key]
            joined = {"max": max, "min": min}.get(reduction, lambda a, b: a + b)(old, value)
            sums[key] = (joined, count + samples)
    return sums
