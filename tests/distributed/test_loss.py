"""Vocabulary-parallel cross entropy against ``F.cross_entropy`` of the whole logits in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from lightning_parallel.tensor_parallel.loss import vocab_parallel_cross_entropy
from tests.distributed.formulas import wave
from tests.harness import Ranks

worlds = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
TOKENS = 6


def targets(vocab: int, ignored: bool = True) -> Tensor:
    """Ids all over the vocabulary, first and last included, some ignored."""
    ids = torch.tensor([0, vocab - 1, vocab // 2, vocab // 3, 1, vocab - 2]).view(2, 3)
    return ids.masked_fill(torch.tensor([[False, False, True], [False, True, False]]), -100) if ignored else ids


def split(full: Tensor, sizes: list[int], rank: int) -> Tensor:
    return full.split(sizes, -1)[rank].detach().clone().requires_grad_()


def chunks(vocab: int, world_size: int) -> list[int]:
    step = -(-vocab // world_size)
    return [max(0, min(step, vocab - r * step)) for r in range(world_size)]


def reference(logits: Tensor, target: Tensor, z_loss: float = 0.0, **options: Any) -> Tensor:
    """F.cross_entropy, and the squared log normalizer averaged over the same tokens."""
    flat, ids = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    loss = F.cross_entropy(flat, ids, **options)
    if not z_loss:
        return loss
    squares = torch.logsumexp(flat, -1).square() * z_loss
    keep = ids != options.get("ignore_index", -100)
    reduction = options.get("reduction", "mean")
    if reduction == "none":
        return loss + squares * keep
    return loss + (squares * keep).sum() / (keep.sum() if reduction == "mean" else 1)


CASES: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"z_loss": 0.01},
    {"label_smoothing": 0.2, "z_loss": 0.05, "reduction": "sum"},
    {"reduction": "none", "label_smoothing": 0.3, "z_loss": 0.1},
    {"ignore_index": 1},
    {"ignore_index": 1, "label_smoothing": 0.2, "z_loss": 0.05},
]


def check_against_reference(rank: int, world_size: int, vocab: int, dtype: torch.dtype, atol: float) -> None:
    sizes = chunks(vocab, world_size)
    for options in CASES:
        full = wave(2, 3, vocab, scale=4, dtype=dtype).requires_grad_()
        target = targets(vocab, ignored="ignore_index" not in options)
        local = split(full, sizes, rank)
        actual = vocab_parallel_cross_entropy(local, target, dist.group.WORLD, **options)
        expected = reference(full, target, **options).view_as(actual)
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
        weight = wave(*actual.shape, phase=2, dtype=dtype)
        (actual * weight).sum().backward()
        (expected * weight).sum().backward()
        assert full.grad is not None
        torch.testing.assert_close(local.grad, full.grad.split(sizes, -1)[rank], rtol=0, atol=atol)


def check_sizes_and_precisions(rank: int, world_size: int) -> None:
    """13 over 4 leaves a rank with 1 column, 5 over 4 one with none."""
    for vocab in (12, 13, 5):
        check_against_reference(rank, world_size, vocab, torch.float64, 1e-13)
    check_against_reference(rank, world_size, 13, torch.float32, 2e-6)


@worlds
def test_equals_cross_entropy(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_sizes_and_precisions)


def check_split_model(rank: int, world_size: int) -> None:
    """From a split embedding to split logits that are never gathered; 11 words do not divide."""
    group = dist.group.WORLD
    words, head = nn.Embedding(11, 4, dtype=torch.float64), nn.Linear(4, 11, dtype=torch.float64)
    with torch.no_grad():
        for place, parameter in enumerate((words.weight, head.weight, head.bias)):
            parameter.copy_(wave(*parameter.shape, phase=float(place)))
    split_words = VocabParallelEmbedding.from_embedding(words, group)
    split_head = ColumnParallelLinear.from_linear(head, group)
    ids, target = targets(11, ignored=False), targets(11).flip(0)
    local = split_head(torch.tanh(split_words(ids)))
    assert local.shape[-1] == chunks(11, world_size)[rank]
    actual = vocab_parallel_cross_entropy(local, target, group, label_smoothing=0.1, z_loss=0.01)
    expected = reference(head(torch.tanh(words(ids))), target, z_loss=0.01, label_smoothing=0.1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    actual.backward()
    expected.backward()
    pairs = [(split_words.weight, words.weight), (split_head.weight, head.weight), (split_head.bias, head.bias)]
    for mine, whole in pairs:
        assert whole.grad is not None
        torch.testing.assert_close(mine.grad, whole.grad.split(chunks(11, world_size))[rank], rtol=0, atol=1e-13)


@worlds
def test_from_split_words_to_split_logits(ranks: Ranks, world_size: int) -> None:
    ranks(world_size, check_split_model)


def check_positional_contract(rank: int, world_size: int) -> float:
    full, target = wave(2, 3, 8, scale=2), targets(8)
    local = full.chunk(2, -1)[rank]
    return vocab_parallel_cross_entropy(local, target, dist.group.WORLD, -100, 0.1, 8).item()


def test_positional_contract(ranks: Ranks) -> None:
    expected = reference(wave(2, 3, 8, scale=2), targets(8), label_smoothing=0.1).item()
    assert ranks(2, check_positional_contract) == pytest.approx([expected, expected], abs=1e-14)


def check_padding(rank: int, world_size: int, vocab: int, padded: int, sizes: list[int]) -> None:
    """Padded columns hold large logits: they must enter neither the maximum, nor the sum, nor the smoothing."""
    for options in CASES[:5]:
        full = wave(2, 3, vocab, scale=4).requires_grad_()
        target = targets(vocab)
        junk = torch.full((2, 3, padded - vocab), 1e4, dtype=torch.float64)
        local = split(torch.cat([full, junk], -1), sizes, rank)
        actual = vocab_parallel_cross_entropy(local, target, dist.group.WORLD, vocab_size=vocab, **options)
        expected = reference(full, target, **options)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
        actual.backward()
        expected.backward()
        assert full.grad is not None
        grads = torch.cat([full.grad, torch.zeros_like(junk)], -1).split(sizes, -1)
        torch.testing.assert_close(local.grad, grads[rank], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("vocab", "padded", "sizes"),
    [
        (7, 8, [4, 4]),
        (5, 16, [8, 8]),  # the second rank holds nothing but padding
        (5, 12, [4, 4, 4]),
        (10, 11, [3, 3, 3, 2]),
        (12, 12, [3, 3, 3, 3]),
        (9, 9, [5, 1, 2, 1]),  # any contiguous split
    ],
)
def test_padding(ranks: Ranks, vocab: int, padded: int, sizes: list[int]) -> None:
    ranks(len(sizes), check_padding, vocab, padded, sizes)


def check_all_ignored(rank: int, world_size: int) -> tuple[float, float, bool]:
    local = wave(TOKENS, 4, phase=rank).requires_grad_()
    target = torch.full((TOKENS,), -100)
    loss = vocab_parallel_cross_entropy(local, target, dist.group.WORLD)
    loss.backward()
    total = vocab_parallel_cross_entropy(local, target, dist.group.WORLD, reduction="sum")
    assert local.grad is not None
    return loss.item(), total.item(), bool((local.grad == 0).all())


def test_all_ignored(ranks: Ranks) -> None:
    assert math.isnan(F.cross_entropy(wave(TOKENS, 8), torch.full((TOKENS,), -100)).item())
    for loss, total, no_gradient in ranks(2, check_all_ignored):
        assert math.isnan(loss)
        assert total == 0
        assert no_gradient


def check_extremes(rank: int, world_size: int) -> None:
    """Offsets far beyond the range of exp, and tokens for which one rank's columns are all -inf."""
    sizes = [4, 4]
    base = wave(3, 8, dtype=torch.float32, scale=3)
    offset = base + torch.tensor([[1e4], [-1e4], [0.0]])
    masked = base.clone()
    masked[0, :4], masked[1, 4:], masked[2, 1::2] = -torch.inf, -torch.inf, -torch.inf
    target = torch.tensor([6, 2, 4])
    for full in (offset.requires_grad_(), masked.requires_grad_()):
        local = split(full, sizes, rank)
        actual = vocab_parallel_cross_entropy(local, target, dist.group.WORLD)
        expected = F.cross_entropy(full, target)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        actual.backward()
        expected.backward()
        assert full.grad is not None
        torch.testing.assert_close(local.grad, full.grad.split(sizes, -1)[rank], rtol=0, atol=1e-6)


def test_extremes(ranks: Ranks) -> None:
    ranks(2, check_extremes)


def check_half(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Computed in fp32: equal to F.cross_entropy of the upcast logits, with the gradient rounded once."""
    full = wave(4, 8, scale=3, dtype=dtype)
    target = torch.tensor([0, 7, 3, 4])
    upcast = full.float().requires_grad_()
    expected = F.cross_entropy(upcast, target)
    expected.backward()
    local = split(full, [4, 4], rank)
    actual = vocab_parallel_cross_entropy(local, target, dist.group.WORLD)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    actual.backward()
    assert upcast.grad is not None
    torch.testing.assert_close(local.grad, upcast.grad.split(4, -1)[rank].to(dtype), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks(2, check_half, dtype)


def check_repeated_backward(rank: int, world_size: int) -> None:
    full = wave(TOKENS, 8)
    local = split(full, [4, 4], rank)
    before = local.detach().clone()
    loss = vocab_parallel_cross_entropy(local, torch.arange(TOKENS), dist.group.WORLD)
    loss.backward(retain_graph=True)
    assert local.grad is not None
    once = local.grad.clone()
    loss.backward()
    assert torch.equal(local.grad, 2 * once)
    assert torch.equal(local.detach(), before)


def test_backward_twice_and_logits_kept(ranks: Ranks) -> None:
    ranks(2, check_repeated_backward)


def check_outside(rank: int, world_size: int, target: int) -> str:
    try:
        vocab_parallel_cross_entropy(wave(1, 4), torch.tensor([target]), dist.group.WORLD)
    except (IndexError, RuntimeError) as error:
        comm.all_gather_dim(torch.zeros(1, 3, 1, dtype=torch.float64), dist.group.WORLD, 0)  # what the other waits for
        return str(error)
    return ""


@pytest.mark.parametrize(("target", "failing"), [(8, 1), (-1, 0)])
def test_target_outside_the_vocabulary_fails(ranks: Ranks, target: int, failing: int) -> None:
    """On the rank at that end of the vocabulary, as F.cross_entropy does."""
    assert "index" in ranks(2, check_outside, target)[failing]


def count_collectives(rank: int, world_size: int) -> tuple[int, int]:
    calls = []
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("gather")
        return gather(*args, **kwargs)

    setattr(dist, gather.__name__, counted)
    try:
        local = wave(TOKENS, 4, phase=rank).requires_grad_()
        loss = vocab_parallel_cross_entropy(local, torch.arange(TOKENS), dist.group.WORLD)
        forward = len(calls)
        loss.backward()
    finally:
        setattr(dist, gather.__name__, gather)
    return forward, len(calls) - forward


def test_two_small_collectives_forward_and_none_backward(ranks: Ranks) -> None:
    assert ranks(2, count_collectives) == [(2, 0), (2, 0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label_smoothing": 1.5}, "label_smoothing must lie in 0..1, got 1.5"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"reduction": "avg"}, 'reduction must be "mean", "sum" or "none", got \'avg\''),
        ({"target": torch.zeros(3, dtype=torch.long)}, r"logits of shape \(2, 4\) need a target .* got \(3,\)"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"logits": wave(2, 4), "target": torch.tensor([0, 1]), "group": None, **change}
    with pytest.raises(ValueError, match=message):
        vocab_parallel_cross_entropy(**arguments)
