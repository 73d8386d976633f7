"""Micro-batches, schedules, stages and weights of unequal parts: loss curve and weights of one plain process (1e-5)."""

from __future__ import annotations

import math
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.glue.oracle import Layout, Site, check, observe, set_by_formula, weights
from tests.glue.training import EVERY, GPT, VOCABULARY, Notes, Record, Tokens, fit
from tests.harness import Ranks


# ------------------------------------------------------------------------------------------------ batches
def odd_batches(site: Site) -> Any:
    """A last batch of 3 of 8 samples, and one of a single sample of 6, which leaves nothing for a second replica."""
    return [fit(site, GPT(), Tokens(35)), fit(site, Mapped(), Tokens(31), 6, max_epochs=1)]


class Mapped(GPT):
    """Returns a mapping that is no dict, and a loss that is no scalar; Lightning takes both."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return UserDict(loss=super().training_step(batch, batch_idx)[None])


@pytest.mark.parametrize("layout", EVERY)
def test_odd_and_last_batches(ranks: Ranks, layout: Layout) -> None:
    check(ranks, odd_batches, layout, plan="auto", micro_batches=3 if layout[1] > 1 else 1)


def short(site: Site) -> Any:
    """One epoch with a last batch of a single sample."""
    return fit(site, GPT(), Tokens(17), max_epochs=1)


@pytest.mark.parametrize(
    ("layout", "micro_batches"),
    [((1, 1, 1), 4), ((2, 1, 1), 3), ((1, 1, 2), 2), ((1, 2, 1), 1), ((1, 2, 1), 2), ((1, 2, 1), 50), ((1, 2, 2), 4)],
)
def test_any_number_of_micro_batches(ranks: Ranks, layout: Layout, micro_batches: int) -> None:
    check(ranks, short, layout, plan="auto", micro_batches=micro_batches)


@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 2, 1)])
def test_gpipe_equals_1f1b(ranks: Ranks, layout: Layout) -> None:
    check(ranks, short, layout, plan="auto", schedule="gpipe", micro_batches=5)
    size = math.prod(layout)
    both = [
        ranks(size, observe, short, layout, {"plan": "auto", "schedule": name, "micro_batches": 4}, launch="lightning")
        for name in ("gpipe", "1f1b")
    ]
    for one, other in zip(*both, strict=True):
        assert one["batches"] == other["batches"]
        assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])


class WithAdamW(GPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def tied_in_windows(site: Site) -> Any:
    """One weight on the first and the last stage, a frozen layer, windows, a clipped norm, an odd batch."""
    module = WithAdamW()
    module.head.weight = module.tok.weight
    module.layers[1].mlp.fc1.requires_grad_(False)
    return fit(site, module, Tokens(35), accumulate_grad_batches=2, gradient_clip_val=0.5)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ((1, 2, 1), {}),
        ((2, 2, 1), {}),
        ((2, 2, 1), {"sequence_parallel": True}),
        ((1, 2, 2), {}),
        ((1, 2, 2), {"zero_stage": 1}),
        ((1, 2, 2), {"zero_stage": 2}),
    ],
)
def test_zero_bubble(ranks: Ranks, layout: Layout, options: dict[str, Any]) -> None:
    check(ranks, tied_in_windows, layout, plan="auto", schedule="zero-bubble", micro_batches=3, **options)


def clipped_windows(site: Site) -> Any:
    """Sums over tensor ranks are due once per window, before the norm is taken."""
    return fit(site, WithAdamW(), Tokens(35), accumulate_grad_batches=2, gradient_clip_val=0.5)


@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_sequence_parallel(ranks: Ranks, layout: Layout) -> None:
    check(ranks, clipped_windows, layout, plan="auto", sequence_parallel=True)


# ------------------------------------------------------------------------------------------------ repeated heads
class FewKeyHeads(WithAdamW):
    """Four heads of queries share one of keys and values, of which every tensor rank keeps a copy."""

    def __init__(self) -> None:
        super().__init__(2, 8, 4)
        for layer in self.layers:
            layer.attn = FewHeads()
        set_by_formula(self)


class FewHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = 4, 1
        self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.k_proj, self.v_proj = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        q = self.q_proj(x).view(samples, length, self.n_heads, 2).transpose(1, 2)
        k, v = (p(x).view(samples, length, self.n_kv_heads, 2).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        k, v = (t.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(samples, length, -1))


def few_key_heads(site: Site) -> Any:
    """A norm that counted the copies would clip too much."""
    return fit(site, FewKeyHeads(), Tokens(35), accumulate_grad_batches=2, gradient_clip_val=0.2)


@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_fewer_key_heads_than_tensor_ranks(ranks: Ranks, layout: Layout) -> None:
    check(ranks, few_key_heads, layout, plan="auto", zero_stage=layout[2] - 1)


# ------------------------------------------------------------------------------------------------ stages
def four_layers(site: Site) -> Any:
    return fit(site, GPT(4), Tokens(20), max_epochs=1)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_f13_fewer_micro_batches_than_stages(ranks: Ranks, stages: int, micro_batches: int) -> None:
    check(ranks, four_layers, (1, stages, 1), timeout=30, plan="auto", micro_batches=micro_batches)


def five_layers(site: Site) -> Any:
    return fit(site, GPT(5), Tokens(20), max_epochs=1)


def seven_layers(site: Site) -> Any:
    return fit(site, GPT(7), Tokens(20), max_epochs=1)


def test_uneven_layers(ranks: Ranks) -> None:
    check(ranks, five_layers, (1, 2, 1))
    check(ranks, five_layers, (1, 3, 1))
    check(ranks, seven_layers, (1, 4, 1))


class AddIndex(nn.Module):
    """Adds its own index, and notes that it ran."""

    def __init__(self, index: int, notes: Notes) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(float(index)))
        self.notes, self.index = notes, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.add("ran", self.index)
        return x + self.shift


class Sums(GPT):
    """Blocks whose output tells which of them ran, and notes of what ran on this rank."""

    def __init__(self, blocks: int) -> None:
        super().__init__(1)
        self.notes = Notes()
        self.layers = nn.ModuleList(AddIndex(i, self.notes) for i in range(blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) * 0
        for block in self.layers:
            x = block(x)
        self.notes.add("results", float(x.detach().mean()))
        return self.head(x)


def run_sums(site: Site, blocks: int) -> Any:
    module = Sums(blocks)
    site.trainer(max_steps=1).fit(module, site.loader(Tokens(4), 4))
    return module.notes.entries["ran"], module.notes.entries.get("results", [])


def five_sums(site: Site) -> Any:
    return run_sums(site, 5)


def seven_sums(site: Site) -> Any:
    return run_sums(site, 7)


def three_sums(site: Site) -> Any:
    with pytest.raises(ValueError, match="3 blocks cannot be split into 4") as error:
        run_sums(site, 3)
    return str(error.value)


def test_f17_uneven_layer_counts_lose_no_layer(ranks: Ranks) -> None:
    for scenario, blocks, stages in ((five_sums, 5, 2), (seven_sums, 7, 4)):
        found = ranks(stages, observe, scenario, (1, stages, 1), {"micro_batches": 1}, launch="lightning")
        assert [index for ran, _ in found for index in ran] == list(range(blocks))
        assert [len(results) for _, results in found] == [0] * (stages - 1) + [1]
        assert found[-1][1] == [sum(range(blocks))]
    for text in ranks(4, observe, three_sums, (1, 4, 1), {}, launch="lightning"):
        assert "pipeline_parallel_size 3 or less" in text


# ------------------------------------------------------------------------------------------------ layers of torch
class Encoded(GPT):
    """A causal `nn.TransformerEncoder`, which in validation would take a path of its own through its weights."""

    def __init__(self) -> None:
        super().__init__(1)
        self.layers = nn.ModuleList()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        set_by_formula(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.ln(self.encoder(x, mask, is_causal=True)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()))


class Decoded(Encoded):
    """`nn.TransformerDecoder` layers that look at what an encoder layer made of the sequence backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(self.encoder.layers[0], 1, enable_nested_tensor=False)  # type: ignore[arg-type]
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
        set_by_formula(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.ln(self.decoder(x, self.encoder(x.flip(1)), mask, tgt_is_causal=True)))


def trained_and_validated(site: Site, module: GPT) -> Any:
    trainer = site.trainer(max_epochs=1)
    trainer.fit(module, site.loader(Tokens(20), 8), site.loader(Tokens(8), 4))
    return {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}, weights(module)


def encoder(site: Site) -> Any:
    return trained_and_validated(site, Encoded())


def decoder(site: Site) -> Any:
    return trained_and_validated(site, Decoded())


def test_transformer_layers_of_torch(ranks: Ranks) -> None:
    check(ranks, encoder, (2, 2, 1), plan="auto")
    check(ranks, decoder, (2, 1, 2), plan="auto")


class Recurrent(GPT):
    """Recurrent layers as blocks and around them, samples first: they turn their results in place."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = (nn.GRU(8, 8, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(2))
        set_by_formula(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.start(self.tok(tokens))[0]
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(self.ln(self.end(x)[0]))


def recurrent(site: Site) -> Any:
    return fit(site, Recurrent(), Tokens(17), max_epochs=1)


def test_recurrent_layers(ranks: Ranks) -> None:
    check(ranks, recurrent, (1, 2, 1), micro_batches=2)


# ------------------------------------------------------------------------------------------------ weights of parts
class Labelled(Dataset[dict[str, torch.Tensor]]):
    """Tokens whose labels count in part only: of some samples all, of some none."""

    def __init__(self, count: int) -> None:
        self.tokens = Tokens(count)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        labels = tokens[1:].clone()
        labels[: index % 7] = -100
        return {"tokens": tokens[:-1], "labels": labels, "weight": torch.tensor(index % 5 + 0.5)}


class TokenMean(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return {"loss": loss}


class WeightedMean(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["tokens"]).flatten(0, 1)
        losses = F.cross_entropy(logits, batch["labels"].clamp(0).flatten(), reduction="none").view(
            len(batch["weight"]), -1
        )
        loss = (losses.mean(1) * batch["weight"]).sum() / batch["weight"].sum()
        self.log("loss", loss)
        return loss


def token_mean(site: Site) -> Any:
    return fit(site, TokenMean(), Labelled(35), accumulate_grad_batches=2)


def weighted_mean(site: Site) -> Any:
    return fit(site, WeightedMean(), Labelled(35))


def sum_of_weights(batch: Any) -> torch.Tensor:
    return batch["weight"].sum()


WEIGHTED: list[tuple[Layout, int]] = [((1, 1, 1), 5), ((1, 1, 2), 1), ((1, 2, 1), 8), ((1, 2, 2), 3), ((2, 1, 2), 2)]


@pytest.mark.parametrize(("layout", "micro_batches"), WEIGHTED)
def test_valid_labels_weigh_parts(ranks: Ranks, layout: Layout, micro_batches: int) -> None:
    check(ranks, token_mean, layout, plan="auto", micro_batches=micro_batches, loss_weight="valid_labels")


@pytest.mark.parametrize(("layout", "micro_batches"), WEIGHTED)
def test_a_function_of_the_batch_weighs_parts(ranks: Ranks, layout: Layout, micro_batches: int) -> None:
    check(ranks, weighted_mean, layout, plan="auto", micro_batches=micro_batches, loss_weight=sum_of_weights)


def test_labels_reach_every_kind_of_part() -> None:
    """The data above has parts without a valid label: single samples, and a replica's share of a batch of two."""
    valid = [int((Labelled(36)[i]["labels"] != -100).sum()) for i in range(36)]
    assert min(valid) == 0
    assert max(valid) == 6
    assert VOCABULARY > 1


class LogsTokens(TokenMean):
    """Logs every kind of value of training and validation per step and per epoch."""

    def log_all(self, name: str, batch: Any) -> torch.Tensor:
        logits = self(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)
        self.log(name, loss, on_step=True, on_epoch=True)
        self.log(f"{name}_late", loss, on_step=False, on_epoch=True)
        self.log(f"{name}_largest", logits.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log(f"{name}_samples", float(len(logits)), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.log_all("loss", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_all("val", batch)


class HalfLabelled(Labelled):
    """The second of two replicas has batches of two without any label."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        if index % 2 == 1 and 4 <= index < 12:
            sample["labels"] = torch.full_like(sample["labels"], -100)
        return sample


class WithoutLabels(Tokens):
    """Validation of something else: no labels to count."""

    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index).float()}


class LogsSums(LogsTokens):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch["x"][:, :-1].long()).square().mean())


def logged_tokens(site: Site) -> Any:
    """Batches of different numbers of labels, and a last one of three samples, in training and in validation."""
    record, module = Record(), LogsTokens()
    trainer = site.trainer(callbacks=[record], max_epochs=1)
    trainer.fit(module, site.loader(HalfLabelled(19), 4), site.loader(HalfLabelled(15), 4))
    other = site.trainer(logger=False).validate(LogsSums(), site.loader(WithoutLabels(15), 4), verbose=False)
    return record.batches, other, {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2)])
def test_valid_labels_weigh_what_is_logged(ranks: Ranks, layout: Layout) -> None:
    check(ranks, logged_tokens, layout, plan="auto", loss_weight="valid_labels")
