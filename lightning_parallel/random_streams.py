"""Mechanism: random numbers of a step. Equal on every rank of a replica outside the blocks, different across replicas.

Every stage runs the user's step, so what the step draws outside the blocks (masking, mixup) must agree between stages,
while dropout inside blocks must differ from stage to stage. Each micro-batch therefore gets streams seeded from the
run's seed and its own number, and the process-wide streams are put back afterwards: data loading on every rank of a
replica stays in lockstep however many numbers a step drew.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["StepRandom", "mix_seed", "random_state", "set_random_state"]


def mix_seed(*parts: int | str) -> int:
    """A 63-bit seed from any numbers; neighbouring inputs give unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def random_state(device: torch.device) -> dict[str, Any]:
    """State of Python's, NumPy's (if loaded) and torch's default generators."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Sets what `random_state` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _seed_torch(seed: int, device: torch.device) -> None:
    # Not torch.manual_seed: for each backend that is not in use it keeps the call and a formatted traceback, forever.
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def _seed_all(seed: int, device: torch.device) -> None:
    random.seed(seed)
    _seed_torch(seed, device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


class StepRandom:
    """The random streams of one rank.

    Args:
        seed: the run's seed, the same on every rank.
        data_rank: replica of this rank.
        stage: pipeline stage of this rank.
        device: device whose generator is used besides the CPU's.
    """

    def __init__(self, seed: int, data_rank: int, stage: int, device: torch.device) -> None:
        self.seed = seed
        self.data_rank = data_rank
        self.stage = stage
        self.device = device
        self._restores = True

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restores the surrounding streams once, at the end, for all scopes inside: NumPy's takes long to read and set.

        What is drawn between the scopes, for example by a hook in the backward pass, goes on with the last scope's
        streams, so that it cannot move the surrounding ones on some stages only.
        """
        outside, before = random_state(self.device), self._restores
        self._restores = False
        try:
            yield
        finally:
            self._restores = before
            set_random_state(outside, self.device)

    @contextmanager
    def scope(self, *number: int | str) -> Iterator[None]:
        """Streams of one micro-batch of one step, named by `number`; the surrounding streams are restored."""
        restores, self._restores = self._restores, True  # a scope inside this one must come back to it
        outside = random_state(self.device) if restores else None
        _seed_all(mix_seed(self.seed, self.data_rank, *number), self.device)
        try:
            yield
        finally:
            self._restores = restores
            if outside is not None:
                set_random_state(outside, self.device)

    def enter_blocks(self) -> None:
        """Called before a stage's first block: later stages continue on streams of their own.

        Their seed is drawn from the CPU's generator, which is the same on all stages here, so that a recomputation of
        the block, which restores that generator, gets the same seed again.
        """
        if self.stage > 0:
            drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.default_generator))
            _seed_torch(mix_seed(drawn, "stage", self.stage), self.device)
