"""Random streams of a step: equal where stages must agree, different where they must differ, put back afterwards."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_parallel.random_streams import StepRandom, mix_seed, random_state, set_random_state

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    """One number of each stream."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def stream(seed: int = 1, data_rank: int = 0, stage: int = 0) -> StepRandom:
    return StepRandom(seed, data_rank, stage, CPU)


# ------------------------------------------------------------------------------------------------ seeds
def test_seeds_differ_in_every_part() -> None:
    seeds = [mix_seed(*parts) for parts in [(1,), (2,), (1, 0), (0, 1), (1, 1), (11,), ("1",), (1, "train"), ()]]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix_seed(3, "a", 4) == mix_seed(3, "a", 4)


def test_seeds_are_the_same_in_every_process() -> None:
    """Not Python's hash, which differs from process to process."""
    assert mix_seed(1, "train", 2) == 0x4E1908C42A32474


# ------------------------------------------------------------------------------------------------ state
def test_state_is_taken_and_put_back() -> None:
    state = random_state(CPU)
    first = draw()
    assert draw() != first
    set_random_state(state, CPU)
    assert draw() == first


def test_a_state_without_numpy_leaves_numpy_alone() -> None:
    state = random_state(CPU)
    del state["numpy"]
    np.random.seed(5)
    expected = float(np.random.rand())
    np.random.seed(5)
    set_random_state(state, CPU)
    assert float(np.random.rand()) == expected


# ------------------------------------------------------------------------------------------------ scopes
def test_a_scope_repeats_and_leaves_the_surroundings() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    without = [draw() for _ in range(3)]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    streams, inside, found = stream(), [], []
    for _ in range(3):
        found.append(draw())
        with streams.scope("train", 7):
            inside.append(draw())
    assert found == without
    assert inside[0] == inside[1] == inside[2]


def test_kept_streams_are_put_back_once_for_all_scopes() -> None:
    streams = stream(stage=1)
    alone = [numbers(streams, "train", part) for part in range(2)]
    state = random_state(CPU)
    expected = draw()
    set_random_state(state, CPU)
    np.random.standard_normal()  # leaves a second number behind, which must come back too
    odd = float(np.random.standard_normal())
    set_random_state(state, CPU)
    np.random.standard_normal()
    with streams.kept():
        found = [numbers(streams, "train", part) for part in range(2)]
        draw()
        with streams.scope("train", 0):
            with streams.scope("inner"):
                draw()
            assert draw() == alone[0], "a scope inside a scope comes back to it"
    assert found == alone
    assert float(np.random.standard_normal()) == odd
    set_random_state(state, CPU)
    with pytest.raises(KeyError), streams.kept():
        raise KeyError
    assert draw() == expected


def numbers(streams: StepRandom, *scope: Any) -> tuple[float, float, float]:
    with streams.scope(*scope):
        return draw()


def test_what_makes_streams_equal_and_different() -> None:
    expected = numbers(stream(), "train", 0, 0)
    for other in (
        numbers(stream(seed=2), "train", 0, 0),
        numbers(stream(data_rank=1), "train", 0, 0),
        numbers(stream(), "train", 0, 1),
        numbers(stream(), "train", 1, 0),
        numbers(stream(), "validation_step", 0, 0),
    ):
        assert all(a != b for a, b in zip(other, expected, strict=True))
    assert numbers(stream(stage=3), "train", 0, 0) == expected, "stages agree outside of the blocks"


def test_later_stages_leave_for_streams_of_their_own() -> None:
    drawn: list[list[tuple[float, float]]] = []
    for stage in (0, 1, 2):
        streams = stream(stage=stage)
        drawn.append([])
        for _ in range(2):
            with streams.scope("train", 4):
                before = float(torch.rand(()))
                streams.enter_blocks()
                drawn[-1].append((before, float(torch.rand(()))))
    assert all(first == again for first, again in drawn), "a stage's stream repeats"
    assert len({before for (before, _), _ in drawn}) == 1, "stages agree outside of the blocks"
    assert len({inside for (_, inside), _ in drawn}) == 3, "stages differ inside"


def test_a_recomputed_block_draws_the_same_again() -> None:
    """As torch.utils.checkpoint does it: it puts the generator back to where the block started."""
    streams = stream(stage=1)
    with streams.scope("train", 4):
        saved = torch.get_rng_state()
        streams.enter_blocks()
        expected = float(torch.rand(()))
        torch.set_rng_state(saved)
        streams.enter_blocks()
        assert float(torch.rand(())) == expected


def test_an_exception_puts_the_streams_back_too() -> None:
    state = random_state(CPU)
    expected = draw()
    set_random_state(state, CPU)
    streams = stream(stage=1)

    def fail() -> None:
        with streams.scope("train"):
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert draw() == expected


def test_scopes_may_be_nested() -> None:
    streams = stream(stage=1)
    with streams.scope("outer"):
        with streams.scope("inner"):
            pass
        streams.enter_blocks()
        found = float(torch.rand(()))
    with streams.scope("outer"):
        streams.enter_blocks()
        assert float(torch.rand(())) == found
