"""Glue: the user's hooks see the whole model while ranks hold parts of it, and decide for all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.whole_view import WholeView

__all__ = ["agree_on_epoch_end", "does_something", "hooks_of", "show_in_hooks", "wrap_hook"]

# Failed ranks run it alone; data hooks run for every batch and have no business with weights.
_LEFT_ALONE = frozenset({"on_exception", "on_before_batch_transfer", "on_after_batch_transfer"})
_MORE = ("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step")
_KNOWS_PARTS = frozenset({"lightning", "pytorch_lightning", "lightning_parallel"})


def _itself(value: Any) -> Any:
    return value


def show_in_hooks(trainer: Trainer, view: WholeView) -> Callable[[], None]:
    """Shows the whole model in every hook that the user wrote, in the module and in callbacks.

    Lightning's own callbacks work on the parts, as they did before.

    Returns:
        A function that undoes it.
    """
    undo: list[Callable[[], None]] = []
    holders = {id(holder) for holder, _, _ in _compat.module_copies(trainer)}
    for owner in (trainer.lightning_module, *_compat.callbacks_of(trainer)):
        if id(owner) in holders or id(getattr(owner, "_average_model", None)) in holders:
            continue  # averages the parts
        for name in hooks_of(owner):
            if not _sees_whole(owner, name, getattr(owner, name)):
                continue
            around: Callable[[], AbstractContextManager[None]] = partial(view.shown, name)
            if isinstance(owner, ModelSummary) and not view.runs_modules:
                around = partial(_without_example, trainer.lightning_module, around)
            undo.append(wrap_hook(owner, name, around))

    def undo_all() -> None:
        for step in reversed(undo):
            step()
        undo.clear()

    return undo_all


def hooks_of(owner: Any) -> Iterator[str]:
    """Names of the hooks that may look at the model."""
    kind: type = LightningModule if isinstance(owner, LightningModule) else Callback
    names = [name for name in dir(kind) if name.startswith("on_") and name not in _LEFT_ALONE]
    for name in names + [name for name in _MORE if hasattr(kind, name)]:
        if callable(getattr(owner, name)):
            yield name


def does_something(callback: Callback, hook: str) -> bool:
    """Whether a hook is more than the empty one that every callback has."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)


def wrap_hook(
    owner: Any,
    name: str,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    answer: Callable[[Any], Any] = _itself,
) -> Callable[[], None]:
    """Runs a hook inside of a context, and lets `answer` change what it returns. Returns a function that undoes it."""
    own = vars(owner).get(name)
    setattr(owner, name, _Wrapped(getattr(owner, name), around, answer))
    return partial(delattr, owner, name) if own is None else partial(setattr, owner, name, own)


def agree_on_epoch_end(module: LightningModule, vote: Callable[[bool], bool]) -> Callable[[], None]:
    """Lets every rank leave the epoch if `on_train_batch_start` of the module returns -1 on any.

    Args:
        module: the user's module; one without that hook is left alone, and takes no votes.
        vote: whether any rank says so. Collective over the world.

    Returns:
        A function that undoes it.
    """
    if not is_overridden("on_train_batch_start", module):
        return lambda: None

    def answer(given: Any) -> Any:
        return -1 if vote(bool(given == -1)) else given

    return wrap_hook(module, "on_train_batch_start", answer=answer)


@contextmanager
def _without_example(module: LightningModule, shown: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Keeps a summary from running the model, which computes only in steps, on its example input."""
    example = module.example_input_array
    if example is None:
        with shown():
            yield
        return
    rank_zero_info("The model summary has no sizes of inputs and outputs: a model that ranks share runs only in steps.")
    module.example_input_array = None
    try:
        with shown():
            yield
    finally:
        module.example_input_array = example


def _sees_whole(owner: Any, name: str, hook: Any) -> bool:
    """Whether a hook is the user's, or counts parameters."""
    if isinstance(owner, ModelSummary) and name == "on_fit_start":
        return True
    function = inspect.unwrap(hook)
    function = getattr(function, "__func__", function)
    return str(getattr(function, "__module__", "")).partition(".")[0] not in _KNOWS_PARTS


class _Wrapped:
    """A hook that runs inside of a context. Copies and pickles as the hook itself."""

    def __init__(
        self,
        hook: Callable[..., Any],
        around: Callable[[], AbstractContextManager[None]],
        answer: Callable[[Any], Any],
    ) -> None:
        update_wrapper(self, hook)
        # Lightning looks behind one wrapper only for what a user wrote.
        self.__wrapped__: Callable[..., Any] = hook.__wrapped__ if isinstance(hook, _Wrapped) else hook
        self.hook = hook
        self.around = around
        self.answer = answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.around():
            given = self.hook(*args, **kwargs)
        return self.answer(given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self.hook

    def __reduce__(self) -> Any:
        return _itself, (self.hook,)
