"""Mechanism: random numbers that agree where activations are replicated and differ where they are split.

Every rank of a tensor group starts from the same generator state, so dropout on replicated activations drops the same
elements. Between a column-parallel layer and the next row-parallel one the activations are split: there the device's
default generator continues from a seed of its own, derived from the outside state and the tensor rank. Nothing else
remembers where a rank is, so a checkpoint that restores generator states replays every mask, inside or outside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["RegionState"]

MASK = (1 << 64) - 1
SEED_TAG = 0x5EED1 << 43
"""Upper 20 of the 63 bits of every seed that a region sets: a generator that carries it is inside a region."""
PHILOX_STATE_BYTES = 16
PHILOX_STEP = 4
"""Counter based generators take offsets that are multiples of 4."""


class RegionState:
    """The generator states outside of a split region, one object per model.

    A rank is inside a region exactly while its generator carries a seed that entering set. Whatever restores the
    generator, such as a recompute that ends early, restores this knowledge with it.
    """

    def __init__(self) -> None:
        self._outside: dict[torch.device, tuple[int, Tensor]] = {}

    def enter_sharded_region(self, tensor_rank: int, device: torch.device) -> None:
        """Give this rank random numbers of its own; does nothing when it has them already.

        Args:
            tensor_rank: index of this rank in its tensor group.
            device: device of the activations.
        """
        generator = _default_generator(device)
        if is_region_seed(generator.initial_seed()):
            return
        if device.type == "cpu":
            # The draw itself moves the outside state on, so that the next region gets another seed.
            drawn = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
            outside = generator.get_state()
        else:
            outside = generator.get_state()
            drawn = advance_philox_(outside)
        seed = region_seed(drawn, tensor_rank)
        generator.manual_seed(seed)
        self._outside[device] = (seed, outside)

    def leave_sharded_region(self, device: torch.device) -> None:
        """Continue with the random numbers that are common to the group; does nothing outside of a region.

        Raises:
            RuntimeError: the region was entered before the checkpointed segment that is being recomputed, so that the
                outside state is unknown.
        """
        generator = _default_generator(device)
        seed = generator.initial_seed()
        if not is_region_seed(seed):
            return
        entered = self._outside.pop(device, None)
        if entered is None or entered[0] != seed:
            raise RuntimeError(
                "a checkpointed segment starts between a column-parallel and a row-parallel layer and leaves that "
                "region, so its dropout cannot be replayed; let the segment start before the column-parallel layer"
            )
        generator.set_state(entered[1])

    def reset(self) -> None:
        """Leave every region that is still open; for the end of a model's forward, and its start after an error."""
        for device, (seed, outside) in self._outside.items():
            generator = _default_generator(device)
            if generator.initial_seed() == seed:
                generator.set_state(outside)
        self._outside.clear()


def is_region_seed(seed: int) -> bool:
    """Whether a region set this seed."""
    return seed >> 43 == SEED_TAG >> 43


def region_seed(drawn: int, tensor_rank: int) -> int:
    """A tagged seed from a number that is equal on every rank and the tensor rank.

    >>> region_seed(1, 0) != region_seed(1, 1), is_region_seed(region_seed(1, 0))
    (True, True)
    """
    return SEED_TAG | (mix(drawn + tensor_rank * 0x9E3779B97F4A7C15) >> 21)


def mix(number: int) -> int:
    """64 well mixed bits: one step of splitmix64 (Steele et al. 2014)."""
    z = (number + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def advance_philox_(state: Tensor) -> int:
    """Read seed and offset of a counter based generator as one number, and move the offset of ``state`` on.

    ``state`` lies on the host on every device, so reading it waits for nothing.

    Raises:
        RuntimeError: the state is not a seed and an offset of 8 bytes each.
    """
    if state.numel() != PHILOX_STATE_BYTES:
        raise RuntimeError(f"expected a generator state of {PHILOX_STATE_BYTES} bytes, got {state.numel()}")
    words = state.view(torch.int64)
    seed, offset = words.tolist()
    words[1] += PHILOX_STEP
    return mix(seed) ^ offset


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]
