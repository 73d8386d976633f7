"""Glue: a precision plugin whose clipping and overflow checks span every rank; uses private names of the scaler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.amp.grad_scaler import OptState

__all__ = ["derive_precision", "loss_scale"]


class _SpanningPrecision:
    """Mixed into the precision plugin: norms and overflow votes span every rank that holds a part of the model."""

    _span: Any
    _has_gradients: bool

    def main_params(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
        return self._span.trained(optimizer)

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        self._span.clip_by_norm(self.main_params(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        held = [p for p in self.main_params(optimizer) if p.grad is not None]
        if held:  # torch refuses to clip nothing, which a rank may well hold
            torch.nn.utils.clip_grad_value_(held, clip_val)

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        clip: Any = super().clip_gradients  # type: ignore[misc]
        if clip.__func__ is MixedPrecision.clip_gradients:
            # It refuses optimizers that unscale by themselves, but their gradients are unscaled by now.
            clip = super(MixedPrecision, self).clip_gradients  # type: ignore[misc]
        with self._span.hidden():
            clip(optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        def noted() -> Any:
            result = closure()
            self._has_gradients = result is not None or not model.automatic_optimization
            return result

        return super().optimizer_step(optimizer, model, noted, **kwargs)  # type: ignore[misc]

    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        scaler = getattr(self, "scaler", None)
        if scaler is not None and self._has_gradients:
            with self._span.holding_gradients(optimizer):
                flags = _overflow_flags(scaler, optimizer)
            self._span.share_overflow(flags)
        super()._after_closure(model, optimizer)  # type: ignore[misc]
        if scaler is None:
            self._span.vote(optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


@cache
def _spanning_class(found: type[Precision]) -> type[Precision]:
    # The name is kept because checkpoints file the plugin's state under it.
    names = {"__module__": found.__module__, "__qualname__": found.__qualname__}
    return type(found.__name__, (_SpanningPrecision, found), names)


def derive_precision(plugin: Precision, span: Any) -> Precision:
    """A copy of a precision plugin whose clipping and overflow checks go through `span`."""
    if isinstance(plugin, _SpanningPrecision):
        plugin._span = span
        return plugin
    derived = copy.copy(plugin)
    derived.__class__ = _spanning_class(type(plugin))  # type: ignore[arg-type]
    derived._span = span  # type: ignore[attr-defined]
    return derived


def _overflow_flags(scaler: torch.amp.GradScaler, optimizer: Any) -> list[torch.Tensor]:
    """The scaler's found-inf tensors for an optimizer, whose gradients are unscaled now if they were not yet.

    Optimizers that unscale by themselves would look for infinities once more, on this rank alone. Of others Lightning
    unscales what their parameters hold, which is nothing where gradients are in shards.
    """
    optimizer = getattr(optimizer, "_optimizer", optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    if scaler._scale is None:  # a scaler that is switched off
        return []
    if state["stage"] is OptState.READY or not state["found_inf_per_device"]:
        state["stage"] = OptState.READY
        _unscale(scaler, scaler._scale, optimizer)
    if not state["found_inf_per_device"]:  # no gradient here, but a vote
        state["found_inf_per_device"] = {scaler._scale.device: torch.zeros((), device=scaler._scale.device)}
    return list(state["found_inf_per_device"].values())


def _unscale(scaler: torch.amp.GradScaler, scale: torch.Tensor, optimizer: Any) -> None:
    """Unscales gradients where they are: in host memory the scaler would use its scale before a copy has arrived."""
    held = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    gradient = next(held, scale)
    scaler._scale = scale.to(gradient.device)
    try:
        scaler.unscale_(optimizer)
    finally:
        scaler._scale = scale


def loss_scale(plugin: Precision, loss: torch.Tensor) -> torch.Tensor:
    """The loss as the precision plugin scales it before a backward pass."""
    scaler = getattr(plugin, "scaler", None)
    return loss if scaler is None else scaler.scale(loss)
