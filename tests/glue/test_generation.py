"""Text that models of transformers generate in `predict_step`, with caches of keys and values, over tensor ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.glue.oracle import Site, check, observe, set_by_formula
from tests.harness import Ranks, RanksFailed

SPECIAL = {"bos_token_id": 0, "eos_token_id": 31, "pad_token_id": 31}
WAYS: list[dict[str, Any]] = [
    {"use_cache": True},
    {"use_cache": True, "num_beams": 2},
    {"use_cache": True, "cache_implementation": "static"},
    {"use_cache": False},
]


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=4, **SPECIAL))


def llama() -> Any:
    """Two heads of keys and values, one per rank."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32, num_attention_heads=4, num_key_value_heads=2, **sizes, **SPECIAL)
    )


class Writer(LightningModule):
    """Goes on with each prompt, without dropout."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        set_by_formula(self)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return [self.model.generate(batch, max_new_tokens=6, do_sample=False, **way) for way in WAYS]


def written(site: Site) -> Any:
    prompts = [(torch.arange(5) * (number + 3) + number) % 31 for number in range(6)]
    return [site.trainer().predict(Writer(make()), DataLoader(prompts, 2)) for make in (gpt2, llama)]


def test_every_rank_keeps_its_own_heads(ranks: Ranks) -> None:
    """Over three batches, of which the first two are watched for parts that would pass for the whole."""
    check(ranks, written, (2, 1, 1), plan="auto")


def test_a_pipeline_has_no_second_pass(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="must each run once, in order, but the step ran: .* Use pipeline_parallel"):
        ranks(2, observe, written, (1, 2, 1), {"plan": "auto"}, launch="lightning", timeout=20)
