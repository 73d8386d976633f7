"""Mechanism: run a user's forward on local shapes where it reads sizes off its input or writes the full width down."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_parallel.tensor_parallel.layers import derive_class

__all__ = ["LocalShape", "LocalViews", "RegionRun", "run_on_local_shapes", "unwrap_input"]

_RUN = "_region_run"


@dataclass(frozen=True, eq=False)
class RegionRun:
    """How one module's forward runs on local shapes.

    Attributes:
        ranks: number of tensor ranks.
        names: positional parameters of the forward.
        stand_in: parameters whose tensor is replaced by a :class:`LocalShape`.
        local_views: whether :class:`LocalViews` is active.
        columns: layers that get the real tensor back.
    """

    ranks: int
    names: tuple[str, ...]
    stand_in: frozenset[str]
    local_views: bool
    columns: tuple[nn.Module, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionRun:
        return self


class LocalShape:
    """Stands for a region's input where only its shape is read: the last dimension is the local width.

    Column layers get the real tensor back (``full``). Nothing can be computed with a stand-in, so a forward that uses
    its input otherwise fails instead of computing something else.
    """

    def __init__(self, full: torch.Tensor, width: int) -> None:
        self.full = full
        self.shape = torch.Size((*full.shape[:-1], width))
        self.device = full.device
        self.dtype = full.dtype
        self.ndim = full.ndim
        self.is_cuda = full.is_cuda
        self.requires_grad = full.requires_grad

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Like ``torch.Tensor.size``."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Like ``torch.Tensor.dim``."""
        return self.ndim

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"the forward of this attention module uses .{name} of its input, but under tensor parallelism only the "
            f"shape of the input may be read besides passing it to the projections"
        )


class LocalViews(TorchFunctionMode):
    """While active, a view that asks for ``ranks`` times too many elements gets its last dimension divided.

    Such a call could only fail otherwise, so code that already uses local sizes is not touched.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self._watched = frozenset({torch.Tensor.view, torch.Tensor.reshape, torch.reshape})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._watched and len(args) > 1 and not kwargs:
            shape = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            if all(isinstance(size, int) and size >= 0 for size in shape) and shape:
                wanted = torch.Size(shape).numel()
                if wanted == self.ranks * args[0].numel() and wanted and shape[-1] % self.ranks == 0:
                    return func(args[0], (*shape[:-1], shape[-1] // self.ranks))
        return func(*args, **(kwargs or {}))


def unwrap_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a column layer: the real tensor behind a stand-in."""
    return (args[0].full, *args[1:]) if args and isinstance(args[0], LocalShape) else None


def local_arguments(
    names: tuple[str, ...], stand_in: frozenset[str], ranks: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with stand-ins for the parameters in ``stand_in``."""

    def local(name: str, value: Any) -> Any:
        wanted = name in stand_in and isinstance(value, torch.Tensor)
        return LocalShape(value, value.shape[-1] // ranks) if wanted else value

    padded = (*names, *("" for _ in range(len(args) - len(names))))
    changed = tuple(local(name, value) for name, value in zip(padded, args, strict=False))
    return changed, {name: local(name, value) for name, value in kwargs.items()}


def run_on_local_shapes(module: nn.Module, run: RegionRun) -> Callable[[], None]:
    """Convert ``module`` in place so that its forward runs as ``run`` says; returns what undoes it."""
    original: Any = type(module)
    handles = [column.register_forward_pre_hook(unwrap_input) for column in run.columns if run.stand_in]
    vars(module)[_RUN] = run
    module.__class__ = derive_class(original, _LocalShapes)

    def undo() -> None:
        module.__class__ = original
        del vars(module)[_RUN]
        for handle in handles:
            handle.remove()

    return undo


class _LocalShapes(nn.Module):
    """The module's own forward on local shapes."""

    prefix = "Local"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run: RegionRun = getattr(self, _RUN)
        if run.stand_in:
            args, kwargs = local_arguments(run.names, run.stand_in, run.ranks, args, kwargs)
        with LocalViews(run.ranks) if run.local_views else nullcontext():
            return super().forward(*args, **kwargs)
