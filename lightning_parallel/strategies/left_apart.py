"""Glue: a module whose weights stayed in parts on the ranks that trained them: it tells, and does not compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

__all__ = ["AFTER_AN_EXCEPTION", "AS_ASKED_FOR", "BetweenRuns", "mark_left_apart", "refuse_left_apart"]

AS_ASKED_FOR = (
    "restore_weights=False left each rank's weights where they were: save before the run ends, for example with "
    "ModelCheckpoint, or set restore_weights=True"
)
AFTER_AN_EXCEPTION = (
    "the run ended with an exception, which left each rank's weights where they were: save with "
    "ModelCheckpoint(save_on_exception=True), and go on with a module that is built anew"
)


class _LeftApart:
    """Refuses calls, saving and loading of a module; copies and pickles go along with the module."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __call__(self, *args: Any) -> None:
        if self.reason:
            raise RuntimeError(self.reason)


def mark_left_apart(module: LightningModule, reason: str) -> None:
    """Makes every later use of the module's weights an error.

    Parts may fit together: half of one layer's outputs are half of the next layer's inputs, and the result is wrong.

    Args:
        module: in its plain form, with the weights of this rank only.
        reason: the text of the error.
    """
    hook = _LeftApart(reason)
    for child in _hookable(module):
        child.register_forward_pre_hook(hook)
        child.register_state_dict_pre_hook(hook)
        child.register_load_state_dict_pre_hook(hook)


class BetweenRuns:
    """Refuses what a module cannot do while a strategy keeps its weights in parts, for its next run or a checkpoint.

    Args:
        module: with weights in parts.
        reason: the text of the error.
        calls: whether calling it, or a module inside, is refused, too.
    """

    def __init__(self, module: LightningModule, reason: str, calls: bool) -> None:
        self._hook = _LeftApart(reason)
        self._handles = [module.register_state_dict_pre_hook(self._hook)]
        self._handles.append(module.register_load_state_dict_pre_hook(self._hook))
        if calls:
            self._handles += [child.register_forward_pre_hook(self._hook) for child in _hookable(module)]

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, the module's state may be asked for."""
        self._hook.reason, reason = "", self._hook.reason
        try:
            yield
        finally:
            self._hook.reason = reason

    def end(self) -> None:
        """The module is whole again."""
        for handle in self._handles:
            handle.remove()


def refuse_left_apart(module: LightningModule) -> None:
    """Raises RuntimeError if an earlier run left the module's weights apart."""
    for hook in module._state_dict_pre_hooks.values():
        if isinstance(hook, _LeftApart):
            hook()


def _hookable(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those inside, but for scripted ones: these take no hooks, and have nothing that was divided."""
    return (child for child in module.modules() if not isinstance(child, torch.jit.ScriptModule))
