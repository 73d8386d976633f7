"""Metrics of language models in one process, and how their sums pass through a checkpoint."""

from __future__ import annotations

import doctest
import importlib
import itertools
import math

import pytest
import torch

from lightning_parallel.metrics import BitsPerByte, ModelFlopsUtilization, PerplexityFromLoss, TokensSeen
from lightning_parallel.metrics.sums import SumsMetric


@pytest.mark.parametrize("module", ["language", "utilization"])
def test_docstring_examples(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"lightning_parallel.metrics.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_tokens_are_counted_exactly() -> None:
    seen, every = TokensSeen(), TokensSeen(ignore_index=None)
    labels = torch.tensor([[1, -100, 3], [-100, -100, 6]])
    for metric in (seen, every):
        metric.update(labels)
        metric.update(2**40)
    assert seen.compute().item() == 3 + 2**40
    assert every.compute().item() == 6 + 2**40
    assert seen.compute().dtype == torch.long


def test_means_are_weighted_by_tokens() -> None:
    perplexity, bits = PerplexityFromLoss(), BitsPerByte()
    batches = [(2.0, 10, 40), (1.0, 30, 90)]
    for loss, tokens, num_bytes in batches:
        perplexity.update(torch.tensor(loss, dtype=torch.bfloat16), torch.tensor(tokens))
        bits.update(loss, tokens, num_bytes)
    assert float(perplexity.compute()) == pytest.approx(math.exp(50 / 40))
    assert float(bits.compute()) == pytest.approx(50 / 130 / math.log(2))
    bytewise = BitsPerByte()
    bytewise.update(math.log(4), 7)
    assert float(bytewise.compute()) == pytest.approx(2.0)
    for empty in (PerplexityFromLoss(), BitsPerByte()):
        empty.update(1.0, 0)
        assert math.isnan(float(empty.compute()))


def test_utilization_is_that_of_the_whole_time() -> None:
    mfu = ModelFlopsUtilization(10.0, 1000.0)
    mfu.update(50, 1.0)
    mfu.update(torch.tensor(10), torch.tensor(3.0))
    assert float(mfu.compute()) == pytest.approx(60 * 10 / 1000 / 4)


def test_half_precision_modules_keep_exact_sums() -> None:
    seen = torch.nn.ModuleDict({"seen": TokensSeen(), "bits": BitsPerByte()}).bfloat16()
    seen["seen"].update(2**30 + 1)
    seen["bits"].update(math.log(2), 2**30 + 1)
    assert seen["seen"].compute().item() == 2**30 + 1
    assert float(seen["bits"].compute()) == pytest.approx(1.0, rel=1e-12)


class Replica(TokensSeen):
    """As on one rank of many, without processes: syncing is left to the test."""

    count = 3

    @property
    def replicas(self) -> int:
        return self.count


def test_a_checkpoint_holds_what_all_replicas_counted_and_counts_once_after_it() -> None:
    rank = Replica()
    rank.update(10)
    state = rank.state_dict()
    assert state == {"counted_by": torch.tensor(3), "tokens": torch.tensor(0), "tokens_before": torch.tensor(30)}
    ranks = [Replica() for _ in range(2)]
    for metric in ranks:
        metric.load_state_dict(state)
        metric.update(5)
    # What a sync does: sums are added, what was before is the same everywhere.
    assert [(int(m.tokens), int(m.tokens_before)) for m in ranks] == [(5, 30), (5, 30)]
    again = ranks[0].state_dict()
    resumed = Replica()
    resumed.load_state_dict(again)
    assert int(resumed.total("tokens")) == 30 + 3 * 5
    resumed.reset()
    assert int(resumed.total("tokens")) == 0


def test_a_state_within_a_module_is_found_by_its_prefix() -> None:
    module, other = (torch.nn.ModuleDict({"a": Replica(), "b": TokensSeen()}) for _ in range(2))
    module["a"].update(4)
    module["b"].update(4)
    state = module.state_dict()
    counts = {name: int(value) for name, value in state.items() if "counted_by" not in name}
    assert counts == {
        "a.tokens": 0,
        "a.tokens_before": 12,
        "b.tokens": 0,
        "b.tokens_before": 4,
    }
    other.load_state_dict(state)
    assert [int(other[name].total("tokens")) for name in "ab"] == [12, 4]
    assert dict(module.named_buffers()) == {}, "DDP would broadcast what it finds here"


def test_a_state_may_be_restored_one_tensor_after_the_other() -> None:
    """As torch.distributed.checkpoint does, with what the metric holds for the rest; also one that is in use."""
    source = PerplexityFromLoss()
    source.update(1.5, 100)
    state, order = source.state_dict(), [name for name, _ in source.named_buffers(recurse=False)]
    used = PerplexityFromLoss()
    used.update(9.0, 7)
    for metric, names in [(used, order), *((PerplexityFromLoss(), some) for some in itertools.permutations(order))]:
        for name in names:
            metric.load_state_dict({**dict(metric.named_buffers(recurse=False)), name: state[name]})
        assert (float(metric.total("nats")), float(metric.total("tokens"))) == (150.0, 100.0)


@pytest.mark.parametrize(
    ("metric", "arguments", "message"),
    [
        (TokensSeen(), (-1,), "tokens=-1 must be a whole number of at least 0"),
        (TokensSeen(), (2.5,), "tokens=2.5 must be a whole number"),
        (PerplexityFromLoss(), (1.0, math.inf), "tokens=inf is not within"),
        (PerplexityFromLoss(), (torch.ones(3), 3), r"loss must be the mean over tokens, got a tensor of shape \(3,\)"),
        (BitsPerByte(), ("2", 1), "loss='2' must be a number"),
        (PerplexityFromLoss(), (1.0, torch.ones(2)), r"tokens must be a single number, got a tensor of shape \(2,\)"),
        (BitsPerByte(), (1.0, 1, -2), "num_bytes=-2 is not within"),
        (ModelFlopsUtilization(1.0, 1.0), (torch.ones(3), 1.0), "tokens must be a single number"),
        (ModelFlopsUtilization(1.0, 1.0), (math.nan, 1.0), "tokens=nan is not within"),
        (ModelFlopsUtilization(1.0, 1.0), (1, -1.0), "seconds=-1.0 is not within"),
    ],
)
def test_bad_counts_are_refused(metric: SumsMetric, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric.update(*arguments)


def test_bad_rates_are_refused() -> None:
    for wrong in (0, math.inf, "1e15"):
        with pytest.raises(ValueError, match="peak_flops=.* is not within .* such as 1e15"):
            ModelFlopsUtilization(1.0, wrong)  # type: ignore[arg-type]


def test_a_batch_without_a_token_adds_nothing() -> None:
    """Its mean loss is NaN, as that of `cross_entropy` where every label is ignored."""
    for loss, tokens in ((torch.tensor(math.nan), torch.tensor(0)), (math.nan, torch.tensor(0)), (math.nan, 0)):
        perplexity, bits = PerplexityFromLoss(), BitsPerByte()
        perplexity.update(loss, tokens)
        bits.update(loss, tokens)
        perplexity.update(1.0, 5)
        bits.update(math.log(2), 5)
        assert float(perplexity.compute()) == pytest.approx(math.e)
        assert float(bits.compute()) == pytest.approx(1.0)
