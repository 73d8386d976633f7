"""Models of transformers under the automatic plan against themselves in one process: fp32, loss and gradients 1e-5."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.blocks import find_blocks
from tests.distributed.tensor_models import Holder, compare_with_plain, split_model
from tests.harness import Ranks

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers: Any = pytest.importorskip("transformers")

BASE: dict[str, Any] = {
    "vocab_size": 98,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
GROUPED = BASE | {"num_key_value_heads": 4, "use_cache": False}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
BERT = BASE | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": 98, "n_embd": 32, "n_layer": 2, "n_head": 8, "n_positions": 64, "attn_pdrop": 0.0} | NO_DROPOUT
VIT = BERT | {"image_size": 16, "patch_size": 4, "num_labels": 5}
FALCON = {"vocab_size": 98, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8}
T5 = {
    "vocab_size": 98,
    "d_model": 32,
    "d_kv": 4,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 8,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
BART: dict[str, Any] = {
    "vocab_size": 98,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "max_position_embeddings": 64,
} | {
    f"{side}_{what}": size
    for side in ("encoder", "decoder")
    for what, size in (("attention_heads", 8), ("ffn_dim", 64))
}
BART |= {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
DEEPSEEK = {
    "use_cache": False,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}

# name: (prefix of the config and model classes, rest of the model class, options)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", GROUPED),
    "llama_bias": ("Llama", "ForCausalLM", BASE | {"attention_bias": True, "mlp_bias": True}),
    "llama_kv1": ("Llama", "ForCausalLM", GROUPED | {"num_key_value_heads": 1}),
    "llama_kv1_eager": ("Llama", "ForCausalLM", GROUPED | {"num_key_value_heads": 1, "attn_implementation": "eager"}),
    "llama_kv2": ("Llama", "ForCausalLM", GROUPED | {"num_key_value_heads": 2}),
    "llama_odd_vocabulary": ("Llama", "ForCausalLM", GROUPED | {"vocab_size": 99}),
    "llama_tied": ("Llama", "ForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", "ForCausalLM", GROUPED),
    "qwen3": ("Qwen3", "ForCausalLM", GROUPED | {"head_dim": 8}),
    "mistral": ("Mistral", "ForCausalLM", GROUPED),
    "gemma2": ("Gemma2", "ForCausalLM", GROUPED | {"head_dim": 8}),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", BASE | {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "gptj": ("GPTJ", "ForCausalLM", GPT2 | {"rotary_dim": 4}),
    "phi": ("Phi", "ForCausalLM", GROUPED | NO_DROPOUT),
    "phi3": ("Phi3", "ForCausalLM", GROUPED | NO_DROPOUT | {"pad_token_id": 0}),
    "olmo2": ("Olmo2", "ForCausalLM", GROUPED),
    "starcoder2": ("Starcoder2", "ForCausalLM", GROUPED | {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "cohere": ("Cohere", "ForCausalLM", GROUPED),
    "granite": ("Granite", "ForCausalLM", GROUPED),
    "glm4": ("Glm4", "ForCausalLM", GROUPED | {"head_dim": 4, "pad_token_id": 0}),
    "mixtral": ("Mixtral", "ForCausalLM", GROUPED | {"num_local_experts": 4}),
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "bert": ("Bert", "ForMaskedLM", BERT),
    "roberta": ("Roberta", "ForMaskedLM", BERT | {"max_position_embeddings": 64}),
    "vit": ("ViT", "ForImageClassification", VIT),
    "deepseek_v2": ("DeepseekV2", "ForCausalLM", BASE | DEEPSEEK),
    "llama4": (
        "Llama4Text",
        "Llama4ForCausalLM",
        GROUPED | {"head_dim": 4, "num_local_experts": 4, "intermediate_size_mlp": 64},
    ),
    "falcon": ("Falcon", "ForCausalLM", FALCON),
    "t5": ("T5", "ForConditionalGeneration", T5),
    "bart": ("Bart", "ForConditionalGeneration", BART),
    "opt": ("OPT", "ForCausalLM", BASE | {"ffn_dim": 64, "dropout": 0.0, "max_position_embeddings": 64}),
}


def make(kind: str) -> Holder:
    torch.manual_seed(0)
    prefix, head, options = FAMILIES[kind]
    config = getattr(transformers, f"{prefix}Config")(**options)
    return Holder(getattr(transformers, head if head.startswith("Llama4") else f"{prefix}{head}")(config))


def loss(holder: nn.Module) -> Tensor:
    model: Any = holder.model
    if model.config.model_type == "vit":
        pixels = (torch.arange(2 * 3 * 16 * 16) * 0.37).sin().view(2, 3, 16, 16)
        return model(pixel_values=pixels, labels=torch.tensor([1, 4])).loss
    ids = (torch.arange(24) * 29 % 97 + 1).view(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


def check_family(rank: int, world_size: int, kind: str) -> tuple[tuple[str, ...], float]:
    plain, split = make(kind), make(kind)
    plan, tags, undo = split_model(split, "auto")
    compare_with_plain(plain, split, tags, loss, tolerance=1e-5, plan=plan)
    held = sum(p.numel() for p in split.parameters()) / sum(p.numel() for p in plain.parameters())
    undo.restore()
    assert [type(m) for m in split.modules()] == [type(m) for m in plain.modules()]
    return plan.replicated, held


# With four ranks there are fewer key/value heads than ranks, or one expert or head count that was not split by two.
ON_FOUR = [
    "llama_kv1",
    "llama_kv2",
    "llama_odd_vocabulary",
    "qwen3",
    "gemma2",
    "mixtral",
    "gpt2",
    "bert",
    "deepseek_v2",
]


@pytest.mark.parametrize(("kind", "world_size"), [*((kind, 2) for kind in FAMILIES), *((kind, 4) for kind in ON_FOUR)])
def test_family_equals_plain(ranks: Ranks, kind: str, world_size: int) -> None:
    for replicated, held in ranks(world_size, check_family, kind):
        assert held < (0.8 if world_size == 2 else 0.62), f"only little is split: whole are {replicated}"


def check_shipped_plan_given_by_hand(rank: int, world_size: int, kind: str) -> set[str]:
    """The plan that transformers ships, as the user's own: nothing is taken on trust then."""
    plain, split = make(kind), make(kind)
    model: Any = split.model
    shipped = {name: style for name, style in model.tp_plan.items() if name != "lm_head"}
    plan, tags, _ = split_model(split, shipped)
    compare_with_plain(plain, split, tags, loss, tolerance=1e-5, plan=plan)
    return {region.evidence for region in plan.regions}


@pytest.mark.parametrize("kind", ["llama_kv1", "qwen3"])
def test_shipped_plan_given_by_hand_is_rehearsed(ranks: Ranks, kind: str) -> None:
    for evidence in ranks(4, check_shipped_plan_given_by_hand, kind):
        assert evidence == {"checked"}


def check_sequence_parallel(rank: int, world_size: int, kind: str) -> int:
    plain, split = make(kind), make(kind)
    lengths: list[int] = []
    blocks = find_blocks(split)
    split.get_submodule(blocks[1]).register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    _, tags, _ = split_model(split, "auto", sequence_parallel=True, blocks=blocks)
    compare_with_plain(plain, split, tags, loss, tolerance=1e-5)
    return lengths[0]


@pytest.mark.parametrize("kind", ["llama_kv1", "qwen3", "gemma2", "gpt2"])
def test_sequence_parallel_equals_plain(ranks: Ranks, kind: str) -> None:
    assert ranks(4, check_sequence_parallel, kind) == [3] * 4


def check_sequence_refused(rank: int, world_size: int, kind: str) -> None:
    model = make(kind)
    with pytest.raises(ValueError, match="sequence_parallel .* use sequence_parallel=False"):
        split_model(model, "auto", sequence_parallel=True, blocks=find_blocks(model))


@pytest.mark.parametrize("kind", ["mixtral", "olmo2", "bert"])
def test_sequence_parallel_is_refused(ranks: Ranks, kind: str) -> None:
    """Experts, gathered projections, and layers beside the residual."""
    ranks(2, check_sequence_refused, kind)
