"""Glue: optimizers that keep a rank's parts, in hooks and after the run: nothing may take those for the whole."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["PartedState", "mark_parted", "reading_parts", "take_parts"]


class PartedState:
    """An optimizer's state as users see it: all of it may be scaled or dropped, but not read by parameter."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def values(self) -> Any:
        """What this rank keeps for each of its parts."""
        return self.parts.values()

    def clear(self) -> None:
        """Drops everything."""
        self.parts.clear()

    def _refuse(self, *args: Any) -> Any:
        raise RuntimeError(
            "an optimizer's state is divided over the ranks, so that it cannot be read by parameter; "
            "trainer.save_checkpoint() writes it whole, and optimizer.state.values() reaches every part"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = _refuse
    get = items = keys = pop = setdefault = update = _refuse


class _Parted:
    """Refuses steps, saving and loading of an optimizer."""

    def __init__(self, ranks: int, kind: Hashable) -> None:
        self.ranks = ranks
        self.kind = kind
        self.is_open = False

    def __call__(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if not self.is_open:
            raise RuntimeError(
                f"the run is over, and {self.ranks} ranks keep parts of the state of this {type(optimizer).__name__}; "
                "trainer.save_checkpoint() writes it whole, another fit goes on with it, and steps of your own need a "
                "new optimizer"
            )


def mark_parted(optimizer: Any, ranks: int, kind: Hashable) -> None:
    """Makes every use of an optimizer an error until a run takes its parts up again.

    Args:
        optimizer: that ranks have divided; one that torch's class did not build takes no hooks and is left alone.
        ranks: that share it.
        kind: of equal kind are runs that divide it in the same way.
    """
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return
    hook = _Parted(ranks, kind)
    optimizer.register_step_pre_hook(hook)
    optimizer.register_state_dict_pre_hook(hook)
    optimizer.register_load_state_dict_pre_hook(hook)
    optimizer.state = PartedState(optimizer.state)


def take_parts(optimizer: Any, kind: Hashable) -> bool:
    """Frees an optimizer for a run; whether it comes with this rank's parts of an earlier one.

    Raises:
        ValueError: an earlier run divided it otherwise.
    """
    marks = _marks(optimizer)
    for mark in marks:
        if mark.kind != kind:
            raise ValueError(
                f"configure_optimizers returned the {type(optimizer).__name__} of an earlier run, whose {mark.ranks} "
                "ranks divided its state otherwise than this run does; return a new optimizer, and go on from a "
                "checkpoint: trainer.fit(..., ckpt_path=...)"
            )
    for entries in (_hooks_of(optimizer, name) for name in _HOOKED):
        for key in [key for key, hook in entries.items() if isinstance(hook, _Parted)]:
            del entries[key]
    if marks:
        optimizer.state = optimizer.state.parts
    return bool(marks)


@contextmanager
def reading_parts(*optimizers: Any) -> Generator[None, None, None]:
    """Inside, what knows of the parts may read them."""
    marks = [mark for optimizer in optimizers for mark in _marks(optimizer)]
    shown = [optimizer for optimizer in optimizers if _marks(optimizer)]
    states = [optimizer.state for optimizer in shown]
    for optimizer in shown:
        optimizer.state = optimizer.state.parts
    for mark in marks:
        mark.is_open = True
    try:
        yield
    finally:
        for mark in marks:
            mark.is_open = False
        for optimizer, state in zip(shown, states, strict=True):
            optimizer.state = state


_HOOKED = ("_optimizer_step_pre_hooks", "_optimizer_state_dict_pre_hooks", "_optimizer_load_state_dict_pre_hooks")


def _hooks_of(optimizer: Any, name: str) -> Any:
    return getattr(optimizer, name, {})


def _marks(optimizer: Any) -> list[_Parted]:
    return [hook for hook in _hooks_of(optimizer, _HOOKED[0]).values() if isinstance(hook, _Parted)]
