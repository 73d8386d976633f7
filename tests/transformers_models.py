"""Tiny models of the transformers library with the step that a user would write; weights by formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from tests.models import CLASSES, VOCABULARY, Batch, Task, fill

LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class HuggingFaceTask(Task):
    """A model of the library; `inputs` names what it gets from the batch."""

    def __init__(self, model: Any, pattern: str, labels: str = "ids", **inputs: str) -> None:
        super().__init__()
        self.model = model
        self.pattern = pattern
        self.labels = labels
        self.inputs = inputs

    def step(self, batch: Batch) -> Tensor:
        return self.model(**{name: batch[key] for name, key in self.inputs.items()}, labels=batch[self.labels]).loss


def llama(attention: str = "sdpa", cache: bool = False, mask: bool = False, tied: bool = False) -> HuggingFaceTask:
    """Llama with grouped key and value heads."""
    sizes = {**SIZES, "num_key_value_heads": 1, "attn_implementation": attention}
    config = hf.LlamaConfig(**sizes, use_cache=cache, tie_word_embeddings=tied)
    inputs = {"input_ids": "ids", **({"attention_mask": "mask"} if mask else {})}
    return HuggingFaceTask(hf.LlamaForCausalLM(config), "model.model.layers.*", **inputs)


class HiddenStatesTask(HuggingFaceTask):
    """Uses the outputs of all layers, which the library collects."""

    def __init__(self) -> None:
        task = llama()
        super().__init__(task.model, task.pattern)

    def step(self, batch: Batch) -> Tensor:
        output = self.model(batch["ids"], labels=batch["ids"], output_hidden_states=True)
        return output.loss + torch.stack(output.hidden_states).mean()


def llama_with_checkpoints() -> HuggingFaceTask:
    """Llama that recomputes its layers in the backward pass."""
    task = llama()
    task.model.gradient_checkpointing_enable()
    return task


def qwen3() -> HuggingFaceTask:
    """Qwen 3: norms of queries and keys."""
    config = hf.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=4)
    return HuggingFaceTask(hf.Qwen3ForCausalLM(config), "model.model.layers.*", input_ids="ids")


def mixtral(auxiliary: bool = False) -> HuggingFaceTask:
    """Mixtral: routed experts; with an auxiliary loss over all layers' router logits."""
    config = hf.MixtralConfig(
        **SIZES, num_key_value_heads=1, num_local_experts=4, output_router_logits=auxiliary, head_dim=4
    )
    return HuggingFaceTask(hf.MixtralForCausalLM(config), "model.model.layers.*", input_ids="ids")


def gemma2() -> HuggingFaceTask:
    """Gemma 2: scaled tied embedding, sliding windows in every other layer."""
    config = hf.Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=4, sliding_window=4)
    return HuggingFaceTask(hf.Gemma2ForCausalLM(config), "model.model.layers.*", input_ids="ids")


def gpt2() -> HuggingFaceTask:
    """GPT-2: tied embedding, learned positions."""
    no_dropout: dict[str, Any] = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=LAYERS, n_head=2, n_positions=16, **no_dropout)
    return HuggingFaceTask(hf.GPT2LMHeadModel(config), "model.transformer.h.*", input_ids="ids")


def bert() -> HuggingFaceTask:
    """BERT with a padding mask and a tied decoder."""
    model = hf.BertForMaskedLM(hf.BertConfig(**SIZES, **NO_DROPOUT))
    return HuggingFaceTask(model, "model.bert.encoder.layer.*", input_ids="ids", attention_mask="mask")


def vit() -> HuggingFaceTask:
    """A vision transformer."""
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"} | {"num_labels": CLASSES}
    config = hf.ViTConfig(**sizes, **NO_DROPOUT, image_size=8, patch_size=4)
    model = hf.ViTForImageClassification(config)
    layers = next(name for name, module in model.named_modules() if type(module).__name__ == "ViTLayer")
    return HuggingFaceTask(model, f"model.{layers.removesuffix('0')}*", labels="labels", pixel_values="image")


def convnext() -> HuggingFaceTask:
    """ConvNeXt: layers of several widths, and layers that change the shape between them."""
    sizes: dict[str, Any] = {"depths": [1, 1, 1], "hidden_sizes": [4, 6, 8], "num_stages": 3, "num_labels": CLASSES}
    config = hf.ConvNextConfig(**sizes, patch_size=1)
    model = hf.ConvNextForImageClassification(config)
    return HuggingFaceTask(model, "model.convnext.encoder.stages.*.layers.*", labels="labels", pixel_values="image")


def t5() -> HuggingFaceTask:
    """T5: the position bias that its first decoder layer computes travels from layer to layer."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2}
    config = hf.T5Config(**sizes, num_layers=1, num_decoder_layers=LAYERS, dropout_rate=0)
    config.decoder_start_token_id = config.pad_token_id = 0
    return HuggingFaceTask(hf.T5ForConditionalGeneration(config), "model.decoder.block.*", input_ids="ids")


ACCEPTED: dict[str, Callable[[], HuggingFaceTask]] = {
    "llama": llama,
    "llama eager": lambda: llama("eager"),
    "llama cache": lambda: llama(cache=True),
    "llama mask": lambda: llama(mask=True),
    "llama tied": lambda: llama(tied=True),
    "llama checkpoints": llama_with_checkpoints,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "gemma2": gemma2,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "convnext": convnext,
    "t5": t5,
}

REFUSED: dict[str, tuple[Callable[[], HuggingFaceTask], str]] = {
    "hidden states": (HiddenStatesTask, "the code after the last block uses a value of"),
    "mixtral auxiliary": (lambda: mixtral(auxiliary=True), "the code after the last block uses a value of"),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> HuggingFaceTask:
    """A model of either kind, filled by formula, in training mode."""
    factory = ACCEPTED.get(name) or REFUSED[name][0]
    task = factory()
    fill(task, dtype)
    return task.train()
