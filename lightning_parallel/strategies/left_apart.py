"""Glue: a module whose weights stayed in parts on the ranks that trained them: it tells, and does not compute."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule

__all__ = ["AFTER_AN_EXCEPTION", "AS_ASKED_FOR", "mark_left_apart", "refuse_left_apart"]

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
        raise RuntimeError(self.reason)


def mark_left_apart(module: LightningModule, reason: str) -> None:
    """Makes every later use of the module's weights an error.

    Parts may fit together: half of one layer's outputs are half of the next layer's inputs, and the result is wrong.

    Args:
        module: in its plain form, with the weights of this rank only.
        reason: the text of the error.
    """
    hook = _LeftApart(reason)
    for child in module.modules():
        if isinstance(child, torch.jit.ScriptModule):  # takes no hooks, and has nothing that was divided
            continue
        child.register_forward_pre_hook(hook)
        child.register_state_dict_pre_hook(hook)
        child.register_load_state_dict_pre_hook(hook)


def refuse_left_apart(module: LightningModule) -> None:
    """Raises RuntimeError if an earlier run left the module's weights apart."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _LeftApart):
            hook()
