"""Mechanism: keeps padded sequences padded between the blocks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

__all__ = ["keep_padded"]


def keep_padded(root: nn.Module, blocks: Sequence[str]) -> Callable[[], None]:
    """Keeps torch's encoders from packing sequences around their layers in evaluation.

    A packed (nested) tensor takes the values of the input, which other stages do not have, and cannot be sent.

    Args:
        root: the whole model.
        blocks: module paths of its blocks.

    Returns:
        A function that undoes it.
    """
    changed = [
        module
        for name, module in root.named_modules()
        if isinstance(module, nn.TransformerEncoder)
        and module.use_nested_tensor
        and any(block.startswith(f"{name}." if name else "") for block in blocks)
    ]
    for module in changed:
        module.use_nested_tensor = False

    def undo() -> None:
        for module in changed:
            module.use_nested_tensor = True

    return undo
