"""Glue: which samples of a batch count. Distributed samplers repeat samples to give every replica equally many."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_parallel import comm
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.batch import batch_size, slice_batch

__all__ = ["SampleCounter", "divides_evenly", "real_samples", "refuse_unlike_shares"]


def _dividing_sampler(loader: Any, replicas: int) -> DistributedSampler[Any] | None:
    """The sampler that gives every replica equally many samples; None if the loader has another kind."""
    if not isinstance(loader, DataLoader):
        return None
    sampler = next((s for s in _samplers(loader) if isinstance(s, DistributedSampler)), None)
    return None if sampler is None or sampler.num_replicas != replicas else sampler


def _samplers(loader: DataLoader[Any]) -> tuple[Any, ...]:
    return loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)


def refuse_unlike_shares(loader: DataLoader[Any], mesh: Mesh) -> None:
    """Raises ValueError if a sampler deals the ranks of one replica different samples. Collective over the replica.

    A `DistributedSampler` that is made without arguments, as for DDP, divides the data among all processes.
    """
    names = ("num_replicas", "rank")
    shares = [
        tuple(getattr(sampler, name) for name in names) for sampler in _samplers(loader) if _deals(sampler, names)
    ]
    if len({repr(told) for told in comm.gather_objects(shares, mesh.model_control)}) > 1:
        raise ValueError(
            f"a sampler of the {type(loader.dataset).__name__} divides it among {shares[0][0]} processes, but the "
            f"{comm.group_size(mesh.model)} ranks of a replica must have the same samples; make it with "
            "**trainer.strategy.distributed_sampler_kwargs, or leave it to the trainer"
        )


def _deals(sampler: Any, names: tuple[str, ...]) -> bool:
    return all(isinstance(getattr(sampler, name, None), int) for name in names)


def divides_evenly(loader: Any, replicas: int) -> bool:
    """Whether every replica is known to get equally many batches.

    >>> divides_evenly(object(), 2)
    False
    """
    return replicas == 1 or _dividing_sampler(loader, replicas) is not None


def real_samples(loader: Any, replicas: int, data_rank: int) -> int | None:
    """Samples of this replica that are no repetition; None if the loader's sampler does not repeat any.

    >>> real_samples(object(), 2, 0) is None
    True
    """
    sampler = _dividing_sampler(loader, replicas)
    if replicas == 1 or sampler is None or sampler.drop_last:
        return None
    total = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.total_size <= total:
        return None
    # Indices go to replicas in turn; what lies behind the end of the data is a repetition.
    return (total - data_rank + replicas - 1) // replicas


def _full_size(loader: DataLoader[Any], seen: int) -> int:
    """Samples of every batch but the last; as many as one was seen to have if the loader does not tell."""
    told = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return told if isinstance(told, int) else seen


class SampleCounter:
    """Counts the samples of one pass over a loader and cuts repeated ones off."""

    def __init__(self, replicas: int, data_rank: int) -> None:
        self.replicas = replicas
        self.data_rank = data_rank
        self._seen: dict[Any, int] = {}
        self._taken = 0

    def start(self, taken: int = 0) -> None:
        """A new pass over every loader begins.

        Args:
            taken: batches of it that an earlier run has taken, behind which the loaders go on.
        """
        self._seen.clear()
        self._taken = taken

    def keep_real(self, batch: Any, loader: Any, key: Any = 0) -> tuple[Any, bool]:
        """The batch without repeated samples.

        Returns:
            The batch, and False if it holds nothing but repeated samples (then it comes back whole and must not count).
        """
        limit = real_samples(loader, self.replicas, self.data_rank)
        size = batch_size(batch) if limit is not None else None
        if limit is None or size is None:
            return batch, True
        seen = self._seen.get(key, self._taken * _full_size(loader, size))
        self._seen[key] = seen + size
        left = limit - seen
        if left >= size:
            return batch, True
        if left <= 0:
            return batch, False
        return slice_batch(batch, 0, left, size), True
