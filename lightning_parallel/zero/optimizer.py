"""Mechanism: lets a torch optimizer step on the shards of one rank, while everybody else sees the user's parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_parallel.zero.offloaded_step import OffloadedStep

if TYPE_CHECKING:
    from lightning_parallel.zero.sharder import ZeroSharder

__all__ = ["ShardedOptimizer", "is_within_step"]


class ShardedOptimizer:
    """Puts shards into the groups of an optimizer for the time of its step, and the user's parameters back after it.

    Between steps the groups hold the user's parameters, so that schedulers, finetuning callbacks, `zero_grad` and
    `add_param_group` meet what they expect; the optimizer's state, filed under the user's parameters, has the size of
    this rank's shards.

    Args:
        optimizer: any optimizer that `needs_whole_parameters` does not refuse.
        sharder: knows the shards.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharder: ZeroSharder) -> None:
        self.optimizer = optimizer
        self.sharder = sharder
        self._aside: list[list[nn.Parameter]] | None = None
        self._offloaded: OffloadedStep | None = None
        self._is_stepping = False
        self._inner_steps = 0
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        # The step is not over before it: a user's own hook may already change options for the next one.
        after_steps: Any = optimizer._optimizer_step_post_hooks
        after_steps.move_to_end(self._handles[1].id, last=False)
        self._zero_grad = optimizer.zero_grad
        optimizer.zero_grad = self._zero  # type: ignore[method-assign]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The user's parameters, in the order of the groups."""
        groups = self._aside or [group["params"] for group in self.optimizer.param_groups]
        return (p for group in groups for p in group)

    def _zero(self, set_to_none: bool = True) -> None:
        self.sharder.zero(self.parameters(), set_to_none)
        self._zero_grad(set_to_none)

    # -------------------------------------------------------------- steps
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Enters the step: after the closure if there is one, because gradients come out of it."""
        if self._is_stepping and is_within_step(optimizer):
            self._inner_steps += 1
            return None
        self._is_stepping, self._inner_steps = True, 0
        position = 1 if len(args) > 1 else "closure"
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._begin()
            return None

        begun = False

        def then_begin() -> Any:
            nonlocal begun
            if begun:
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} calls its closure again within one step, when its groups hold "
                    "shards that the model does not compute with; step twice instead, or use zero_stage=0"
                )
            result = closure()
            self._begin()
            begun = True
            return result

        if position == 1:
            return (args[0], then_begin, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_begin}

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inner_steps > 0:
            self._inner_steps -= 1
            return
        works = None if self._offloaded is None else self._offloaded.finish()
        self._is_stepping = False
        self._offloaded = None
        self._leave()
        self.sharder.after_step(self.sharder.buckets_of(self.parameters()), works)

    def _begin(self) -> None:
        if self._aside is not None:
            raise RuntimeError(
                f"an error has interrupted the last step of {type(self.optimizer).__name__}, which has changed some of "
                "its shards and not others; go on from a checkpoint"
            )
        self._enter()
        buckets = self.sharder.buckets_of(self.parameters())
        if self.sharder.storage is not None or any(bucket.is_narrow for bucket in buckets):
            self._offloaded = OffloadedStep(self.optimizer, buckets)
            self._offloaded.begin()

    def _enter(self) -> None:
        if self._aside is None:
            self.sharder.refresh()
            self.sharder.before_step(self.sharder.buckets_of(self.parameters()))
            self._swap_in(lambda p: None)

    def _swap_in(self, otherwise: Callable[[nn.Parameter], nn.Parameter | None]) -> None:
        """Replaces parameters by shards; those of which this rank owns nothing by `otherwise` of them, if anything."""
        self._aside = [group["params"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            trained = [(p, self._trained(p, otherwise)) for p in group["params"]]
            group["params"] = [shard for _, shard in trained if shard is not None]
            self._refile((p, shard) for p, shard in trained if shard is not None)

    def _trained(self, p: nn.Parameter, otherwise: Callable[[nn.Parameter], nn.Parameter | None]) -> Any:
        found = self.sharder.find(p)
        if found is None:  # never trainable: it has no gradient and no shard
            return p
        shard = found[0].shards[found[1]]
        return otherwise(p) if shard is None else shard

    def _refile(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        state = self.optimizer.state
        for old, new in pairs:
            if old is not new and old in state:
                state[new] = state.pop(old)

    def _leave(self) -> None:
        if self._aside is None:
            return
        for group, parameters in zip(self.optimizer.param_groups, self._aside, strict=True):
            group["params"] = parameters
        pairs = [(p, self.sharder.find(p)) for p in self.parameters()]
        shards = [(found[0].shards[found[1]], p) for p, found in pairs if found is not None]
        self._aside = None
        self._refile((shard, p) for shard, p in shards if shard is not None)

    @contextmanager
    def on_shards(self) -> Iterator[None]:
        """Groups hold this rank's shards inside, and nothing of what other ranks own."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    # -------------------------------------------------------------- states
    def cut_states(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keeps this rank's part of states that exist before their parameter got a place (Adagrad makes them first)."""
        for p in parameters:
            found = self.sharder.find(p)
            if p not in self.optimizer.state or found is None:
                continue
            if found[0].shards[found[1]] is None:
                del self.optimizer.state[p]
                continue
            own = self.cut_state(p, self.optimizer.state[p])
            self.optimizer.state[p] = own

    def cut_state(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank keeps of a parameter's full state, of which it owns something."""
        found = self.sharder.find(parameter)
        assert found is not None, "only the state of a parameter with a place is cut"
        bucket, place = found
        own = {}
        for key, value in state.items():
            is_full = isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
            if is_full:
                part = bucket.cut(place, value)
                assert part is not None, "this rank owns something of the parameter"
                value = part.to(bucket.side, bucket.wide if value.is_floating_point() else part.dtype)
            own[key] = value
        return own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this rank's parts, as `cut_state` makes them."""
        buckets = self.sharder.buckets_of(self.parameters())
        self._swap_in(lambda p: p)
        for bucket in buckets:  # states get the dtype of what they belong to
            bucket.widen()
        try:
            self.optimizer.load_state_dict(state_dict)
        finally:
            for bucket in buckets:
                bucket.narrow()
            self._leave()

    def release(self) -> None:
        """Removes everything from the optimizer but its state, which stays in parts."""
        self._leave()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.optimizer.__dict__.pop("zero_grad", None)


def is_within_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that begins is called by a subclass's own (`super().step()`), around which hooks run already."""
    frame, steps = sys._getframe(1), 0
    while frame is not None and steps < 2:
        steps += frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return steps == 2
