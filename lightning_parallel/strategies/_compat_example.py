"""Glue: private names of Lightning by which a training batch is looked at before the run that trains on it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, Sampler

from lightning_parallel.strategies.kept_streams import KeptStreams, may_go_on

__all__ = ["example_before_resuming", "example_training_batch", "forget_training_data"]


def example_training_batch(trainer: Trainer) -> Any:
    """A batch of the kind that `training_step` will get, without consuming it.

    Sets the training data up earlier than usual, as `Trainer.estimated_stepping_batches` also does. Whoever calls
    keeps the process-wide generators; those that samplers and datasets own are kept here.
    """
    loop = trainer.fit_loop
    loop.setup_data()
    fetcher, loader = loop._data_fetcher, loop._combined_loader
    if loader is None or fetcher is None:
        return None
    prefetched = getattr(fetcher, "batches", [])
    if prefetched:
        return prefetched[0][0]
    if any(may_go_on(source) for source in loader.flattened):
        batches: Any = fetcher.iterator
        first = next(batches, None)
        if first is None:
            return None
        fetcher.iterator = _put_back(first, batches)
        return first[0]
    with _own_generators_kept(loader.flattened):
        if loader._mode == "sequential":
            return next(iter(loader.flattened[0]), None)
        return tree_map(lambda source: next(iter(source), None), loader.iterables)


def example_before_resuming(trainer: Trainer) -> tuple[Any, bool]:
    """A batch as above, of data that will be set up again with the loaded state.

    Returns:
        The batch, and whether the data may begin otherwise when it is set up again, although no state is loaded.
    """
    streams, loop, strategy = KeptStreams(), trainer.fit_loop, trainer.strategy
    process = strategy.process_dataloader

    def process_and_watch(dataloader: Any) -> Any:
        dataloader = process(dataloader)
        streams.watch(dataloader)
        return dataloader

    own = vars(strategy).get("process_dataloader")
    strategy.process_dataloader = process_and_watch  # type: ignore[method-assign]
    try:
        batch = example_training_batch(trainer)
    finally:
        if own is None:
            del strategy.process_dataloader
        else:
            strategy.process_dataloader = own  # type: ignore[method-assign]
    sources = [] if loop._combined_loader is None else loop._combined_loader.flattened
    goes_on = any(may_go_on(source) and not hasattr(source, "load_state_dict") for source in sources)
    if not forget_training_data(trainer):
        return batch, False
    streams.put_back()
    return batch, goes_on


def forget_training_data(trainer: Trainer) -> bool:
    """Undoes the early set-up, so that a resumed run sets the data up again with the loaded state.

    Returns:
        Whether it could: not if a batch would be lost by that.
    """
    loop = trainer.fit_loop
    if loop._combined_loader is not None and any(_is_used_up(source) for source in loop._combined_loader.flattened):
        return False
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
        loop._data_fetcher = None
    loop._combined_loader = None
    return True


def _put_back(first: Any, rest: Any) -> Iterator[Any]:
    """The batches again. Lightning's combined loader would start anew if it were asked for its iterator."""
    yield first
    while True:
        try:
            following = next(rest)
        except StopIteration:
            return
        yield following


def _is_used_up(source: Any) -> bool:
    """Whether what has been taken from the source would be lost; it has no state either that could be loaded."""
    return isinstance(source, Iterator) and not hasattr(source, "load_state_dict")


# ------------------------------------------------------------------------------------------------ generators
@contextmanager
def _own_generators_kept(loaders: Sequence[Any]) -> Iterator[None]:
    """Puts the random generators back that loaders, their samplers and datasets hold as attributes."""
    before = [(generator, _state(generator)) for loader in loaders for generator in _generators(loader)]
    try:
        yield
    finally:
        for generator, state in before:
            _set_state(generator, state)


def _generators(loader: Any) -> Iterator[Any]:
    """Those of the loader, its samplers and datasets, and of the samplers and datasets that these are made of."""
    waiting, seen = [loader, getattr(loader, "collate_fn", None)], set[int]()
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for value in getattr(owner, "__dict__", {}).values():
            if isinstance(value, Sampler | Dataset):
                waiting.append(value)
            elif _state(value) is not None:
                yield value


def _state(value: Any) -> Any:
    """State of a generator of torch, Python or NumPy; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if type(value).__module__.startswith("numpy.random"):
        if hasattr(value, "bit_generator"):
            return value.bit_generator.state
        return value.get_state() if hasattr(value, "get_state") else None
    return None


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)
