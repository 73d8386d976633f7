"""Glue: metrics that are ratios of sums over all samples, counted once per replica and kept over a resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_parallel import comm
from lightning_parallel.mesh import world_size
from lightning_parallel.scaling.checks import check_range

__all__ = ["SumsMetric", "single_number"]

BEFORE = "_before"
MOST = 1e30


def single_number(name: str, value: Tensor | float) -> Tensor | float:
    """A count or a time; on a device it is not looked at, which would wait for the device."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be a single number, got a tensor of shape {tuple(value.shape)}")
        return value.detach().reshape(())
    return check_range(name, value, (0.0, MOST), "2048")


class SumsMetric(Metric):
    """Base of metrics over running sums.

    Each sum has two states: what this replica counted since the start or the last resume, which is added over
    replicas, and what all had counted before, which every rank holds alike and which therefore counts once. So a
    checkpoint can be resumed on any number of ranks. It holds what all replicas counted if the metric was computed or
    logged since its last update, or if the strategy adds states up (tp_pp); otherwise, where the state of rank 0 alone
    is saved (ddp), the other replicas are taken to have counted as much as rank 0 had.
    """

    full_state_update = False
    is_differentiable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # A state and not an attribute, because only the last stage of a pipeline updates and all share its states.
        one = torch.ones((), dtype=torch.long, device="cpu")
        self.add_state("counted_by", one, dist_reduce_fx="max", persistent=True)
        self.counted_by: Tensor
        self._shared: dict[str, tuple[Tensor, Tensor]] = {}

    def add_sum(self, name: str, dtype: torch.dtype = torch.float64) -> None:
        """Registers a sum; call it in the constructor."""
        zero = torch.zeros((), dtype=dtype, device="cpu")  # also where a model is built on the meta device
        self.add_state(name, zero, dist_reduce_fx="sum", persistent=True)
        self.add_state(name + BEFORE, zero.clone(), dist_reduce_fx="max", persistent=True)

    def add(self, name: str, value: Tensor | float) -> None:
        """Adds to a sum of this replica."""
        setattr(self, name, getattr(self, name) + value)
        self.counted_by = torch.full_like(self.counted_by, self.replicas)

    def total(self, name: str) -> Tensor:
        """The sum over all that was counted, of this replica or, inside of ``compute``, of all."""
        result = getattr(self, name) + getattr(self, name + BEFORE)
        assert isinstance(result, Tensor), f"{name} is registered with add_sum"
        return result

    @property
    def replicas(self) -> int:
        """Number of groups of ranks that see samples of their own."""
        if self.process_group is not None:
            return comm.group_size(self.process_group)
        available = self.distributed_available_fn
        return world_size() if available is not None and available() else 1

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Adds the states of all replicas up, and remembers what came out."""
        own = {name: getattr(self, name) for name in self._sums()}
        super().sync(*args, **kwargs)
        if self._is_synced:
            self._shared = {name: (mine, getattr(self, name)) for name, mine in own.items()}

    def reset(self) -> None:
        """Starts again from nothing."""
        super().reset()
        self._shared = {}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The states, with the sums of all replicas as what was before: so they count once wherever they are loaded."""
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for name in self._sums():
            if prefix + name in state:
                counted = getattr(self, name) if self._is_synced else self._of_all(name)
                state[prefix + name + BEFORE] = counted + getattr(self, name + BEFORE)
                state[prefix + name] = torch.zeros_like(counted)
        return state

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Also the states when asked for this module alone.

        That is how `torch.distributed.checkpoint` and Lightning's ModelParallelStrategy ask what to restore, one tensor
        after the other. Walks over a whole model, such as that of DDP, which would broadcast what it finds, do not.
        """
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if not recurse:
            dot = prefix and prefix + "."
            yield from ((dot + name, getattr(self, name)) for name in self._defaults if self._persistent[name])

    def _of_all(self, name: str) -> Tensor:
        own = getattr(self, name)
        seen, shared = self._shared.get(name, (None, None))
        if seen is not None and shared is not None and torch.equal(seen, own):
            return shared.clone()
        return torch.as_tensor(own * self.counted_by)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name in self._sums():
            setattr(self, name + BEFORE, self.total(name))
            setattr(self, name, torch.zeros_like(getattr(self, name)))
        self.counted_by = torch.ones_like(self.counted_by)
        self._shared = {}
        self._computed = None

    def _sums(self) -> list[str]:
        return [state.removesuffix(BEFORE) for state in self._defaults if state.endswith(BEFORE)]
