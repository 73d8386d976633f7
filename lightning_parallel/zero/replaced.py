"""Mechanism: parameters whose `data` somebody has replaced, so that they lie in memory that no shard knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["put_back"]


@torch.no_grad()
def put_back(parameters: Sequence[nn.Parameter], places: Sequence[Tensor]) -> None:
    """Moves the values of replaced parameters to where they belong; they lie there again.

    Args:
        parameters: most of which lie there.
        places: a view of a bucket for each parameter; none if values are elsewhere.

    Raises:
        RuntimeError: data was replaced by something of another shape or dtype.
    """
    for view, p in zip(places, parameters, strict=bool(places)):
        if p.data_ptr() == view.data_ptr():
            continue
        if (p.shape, p.dtype) != (view.shape, view.dtype):
            raise RuntimeError(
                f"the data of a parameter of shape {tuple(view.shape)} and {view.dtype} was replaced by data of shape "
                f"{tuple(p.shape)} and {p.dtype}, for which its shards have no place; change models before trainer.fit"
            )
        view.copy_(p.data)
        p.data = view
