"""Glue: predictions of all replicas in the order of the data, as one process would have returned them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_parallel import comm
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.batch import are_sample_lists, batch_size
from lightning_parallel.strategies.samples import divides_evenly

__all__ = ["PredictionGatherer", "interleave"]


class PredictionGatherer:
    """Remembers how many samples each batch had, and whether the replicas shared the samples out."""

    def __init__(self) -> None:
        self._sizes: dict[int, list[int | None]] = {}
        self._shared_out: dict[int, bool] = {}

    def start(self) -> None:
        """A new prediction run begins."""
        self._sizes.clear()
        self._shared_out.clear()

    def note(self, batch: Any, loader: Any, dataloader_idx: int, replicas: int) -> None:
        """A batch of a loader is about to be predicted."""
        self._sizes.setdefault(dataloader_idx, []).append(batch_size(batch))
        self._shared_out[dataloader_idx] = divides_evenly(loader, replicas)

    def gather(self, predictions: Sequence[Any] | None, mesh: Mesh) -> list[Any]:
        """See `gather_predictions` of the strategy."""
        if predictions is None or not self._sizes:
            raise ValueError(
                "gather_predictions() needs what Trainer.predict() just returned; call that first, with "
                "return_predictions=True"
            )
        several = len(self._sizes) > 1
        mine = list(predictions) if several else [predictions]
        everyone = comm.gather_objects((mine, self._sizes), mesh.data_control)
        if len(everyone) > 1 and not all(self._shared_out.values()):
            raise ValueError(
                f"the {mesh.layout.data} replicas did not share out the samples of every predict dataloader, so "
                "that their predictions have no common order; use a map-style dataset without a sampler of your own "
                "and leave use_distributed_sampler=True"
            )
        gathered = []
        for index in range(len(mine)):
            parts = [loaders[index] for loaders, _ in everyone]
            sizes = [sizes.get(index, []) for _, sizes in everyone]
            gathered.append(_join(parts, sizes))
        return gathered if several else gathered[0]


def _join(parts: list[list[Any]], sizes: list[list[int | None]]) -> list[Any]:
    """Batches of the replicas, in turn, as batches of all of them; a replica may have one batch less than another."""
    joined = []
    for number in range(max(len(part) for part in parts)):
        here = [(part[number], size[number]) for part, size in zip(parts, sizes, strict=True) if number < len(part)]
        joined.append(interleave([output for output, _ in here], [size for _, size in here]))
    return joined


def interleave(outputs: Sequence[Any], sizes: Sequence[int | None]) -> Any:
    """Results of several replicas, whose samples are dealt out in turn, in the order of the samples.

    Tensors and lists with one entry per sample (also tensors of unequal sizes) are interleaved, numbers and tensors
    without dimensions are averaged over the samples, mappings and tuples are joined entry by entry; of anything else
    the first replica's is returned.

    Args:
        outputs: results, one per replica.
        sizes: samples of each replica: neighbours differ by one at most, descending. None: not known.

    >>> interleave([["a", "c", "e"], ["b", "d"]], [3, 2])
    ['a', 'b', 'c', 'd', 'e']
    >>> [len(t) for t in interleave([[torch.zeros(1), torch.zeros(3)], [torch.zeros(2), torch.zeros(4)]], [2, 2])]
    [1, 2, 3, 4]
    >>> interleave([(0.5, 1.0), (1.5, 3.0)], [2, 2])  # a loss and an accuracy
    (1.0, 2.0)
    """
    first = outputs[0]
    known = [size or 0 for size in sizes]
    if len(outputs) == 1 or None in sizes:
        return first
    if isinstance(first, torch.Tensor):
        if first.dim() and all(o.dim() and o.size(0) == size for o, size in zip(outputs, known, strict=True)):
            return torch.cat(list(outputs))[torch.tensor(_turns(known), device=first.device)]
        return first if first.dim() or not first.is_floating_point() else _mean(list(outputs), known)
    if isinstance(first, float):
        return _mean([torch.tensor(o, dtype=torch.float64) for o in outputs], known).item()
    if isinstance(first, Mapping):
        return {key: interleave([o[key] for o in outputs], sizes) for key in first}
    if are_sample_lists(outputs, known):
        flat = [entry for o in outputs for entry in o]
        return type(first)([flat[place] for place in _turns(known)])
    if isinstance(first, list | tuple):
        entries = [interleave(list(same), sizes) for same in zip(*outputs, strict=True)]
        return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)
    return first


def _turns(sizes: Sequence[int]) -> list[int]:
    """Places of the samples in the concatenation of all replicas', in the order in which they were dealt out.

    >>> _turns([2, 1])
    [0, 2, 1]
    """
    starts = [sum(sizes[:replica]) for replica in range(len(sizes))]
    return [
        start + turn for turn in range(max(sizes)) for start, size in zip(starts, sizes, strict=True) if turn < size
    ]


def _mean(values: list[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    shares = torch.tensor(sizes, dtype=torch.float64, device=values[0].device)
    mean = (torch.stack(values).to(torch.float64) * shares).sum() / shares.sum()
    return mean.to(values[0].dtype)
