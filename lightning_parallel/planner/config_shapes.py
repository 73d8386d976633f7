"""Pure: the shape of a model from a transformers configuration (``config.json``), exact to the last parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_parallel.patterns import close_names
from lightning_parallel.planner.model_shape import ModelShape

__all__ = ["FAMILIES", "ONLY_DENSE", "shape_from_config", "shape_from_file"]

ONLY_DENSE = (
    "tokens would be sent between ranks; plan a dense model, such as one with the parameters that a token meets"
)

Config = Mapping[str, Any]

# The longest sequence that is taken from a configuration unasked: many allow far more than they are trained with.
LONGEST_DEFAULT_SEQUENCE = 8192

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}


# Fields whose other values change the parameters in ways that are not counted here.
_ONLY: dict[str, dict[str, bool]] = {
    "gpt2": {"add_cross_attention": False},
    "opt": {"do_layer_norm_before": True, "enable_bias": True, "layer_norm_elementwise_affine": True},
    "phi": {"qk_layernorm": False},
}


def shape_from_config(config: Config, *, seq: int = 0, counted: bool = True) -> ModelShape:
    """The shape of the causal language model that a configuration describes.

    Args:
        config: the fields of a transformers configuration, with its ``model_type``.
        seq: tokens per sequence; 0 takes the positions of the configuration, at most 8192.
        counted: the parameters follow from the configuration, so that no field may change them in an unknown way.

    Raises:
        ValueError: a family whose parameters are not known here, or a field is missing.
    """
    family = config.get("model_type")
    if any((config.get(name) or 1) > 1 for name in _EXPERTS):
        raise ValueError(f"model_type {family!r} is a mixture of experts, which is not planned: {ONLY_DENSE}")
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(
            f"the parameters of model_type {family!r} are not known (closest: {close_names(str(family), FAMILIES)}); "
            f"known are {known}; for another model give its sizes, or build it on the meta device"
        )
    for name, usual in _ONLY.get(str(family), {}).items():
        if counted and bool(config.get(name, usual)) != usual:
            raise ValueError(
                f"{family} with {name}={config[name]} is not counted here; build it on the meta device instead"
            )
    sizes = {name: _first(config, name) for name in ("layers", "hidden", "heads", "vocab")}
    if family == "opt" and config.get("word_embed_proj_dim", sizes["hidden"]) != sizes["hidden"]:
        raise ValueError("an OPT whose embedding is narrower than its blocks is not known; give its sizes instead")
    positions = _first(config, "positions", default=2048)
    options = {
        "ffn": _first(config, "ffn", default=4 * sizes["hidden"]),
        "seq": seq or min(positions, LONGEST_DEFAULT_SEQUENCE),
        "kv_heads": config.get("num_key_value_heads") or 0,
        "head_dim": config.get("head_dim") or 0,
    }
    return ModelShape(**{**sizes, **options, **FAMILIES[family](config)})


def shape_from_file(path: Path, *, seq: int = 0) -> ModelShape:
    """The shape from a ``config.json`` or a folder that holds one.

    Raises:
        ValueError: no such file, not JSON, or a family that is not known.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}); name a config.json or its folder") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no configuration but a {type(config).__name__}")
    return shape_from_config(config, seq=seq)


def _first(config: Config, name: str, default: int | None = None) -> int:
    for key in _NAMES[name]:
        value = config.get(key)
        if isinstance(value, (int, float)):
            return int(value)
        if value is not None:
            raise ValueError(f"the configuration's {key} is {value!r}, which is no number")
    if default is None:
        raise ValueError(f"the configuration names no {name}; it needs {' or '.join(_NAMES[name])}")
    return default


def _llama(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "gated": True,
        "norm": "rms",
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "tied": bool(config.get("tie_word_embeddings", False)),
    }


def _qwen2(config: Config) -> dict[str, Any]:
    return {**_llama(config), "qkv_bias": True, "output_bias": False}


def _qwen3(config: Config) -> dict[str, Any]:
    return {**_llama(config), "query_key_norm": "head", "head_dim": config.get("head_dim") or 128}


def _olmo2(config: Config) -> dict[str, Any]:
    return {**_llama(config), "query_key_norm": "width"}


def _gemma(config: Config) -> dict[str, Any]:
    tied = bool(config.get("tie_word_embeddings", True))
    return {**_llama(config), "tied": tied, "head_dim": config.get("head_dim") or 256}


def _gemma2(config: Config) -> dict[str, Any]:
    return {**_gemma(config), "norms_per_layer": 4}


def _gemma3(config: Config) -> dict[str, Any]:
    return {**_gemma2(config), "query_key_norm": "head"}


def _gpt2(config: Config) -> dict[str, Any]:
    return {"tied": bool(config.get("tie_word_embeddings", True)), "learned_positions": _first(config, "positions")}


def _gpt_neox(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", True))
    return {"tied": bool(config.get("tie_word_embeddings", False)), "qkv_bias": bias, "output_bias": bias}


def _opt(config: Config) -> dict[str, Any]:
    # Positions start at 2: two rows more than positions.
    return {
        "tied": bool(config.get("tie_word_embeddings", True)),
        "learned_positions": _first(config, "positions") + 2,
    }


def _bloom(config: Config) -> dict[str, Any]:
    return {"tied": bool(config.get("tie_word_embeddings", True)), "embedding_norm": True}


def _falcon(config: Config) -> dict[str, Any]:
    newer = bool(config.get("new_decoder_architecture", False))
    kv_heads = config.get("num_kv_heads") or 0
    if not newer:
        kv_heads = int(bool(config.get("multi_query", True)))
    bias = bool(config.get("bias", False))
    parallel = bool(config.get("parallel_attn", True)) and not newer
    shared_norm = newer and config.get("num_ln_in_parallel_attn") == 1
    return {
        "tied": bool(config.get("tie_word_embeddings", True)),
        "kv_heads": kv_heads,
        "norms_per_layer": 1 if parallel or shared_norm else 2,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
    }


def _phi(config: Config) -> dict[str, Any]:
    return {"tied": bool(config.get("tie_word_embeddings", False)), "norms_per_layer": 1, "head_bias": True}


def _starcoder2(config: Config) -> dict[str, Any]:
    bias = bool(config.get("use_bias", True))
    return {
        "tied": bool(config.get("tie_word_embeddings", True)),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
    }


def _mpt(config: Config) -> dict[str, Any]:
    # MPT's layer norms and linear layers have no biases; transformers builds four hidden widths whatever is named.
    return {
        "tied": bool(config.get("tie_word_embeddings", True)),
        "ffn": 4 * _first(config, "hidden"),
        "norm": "rms",
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
    }


FAMILIES = {
    "bloom": _bloom,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "granite": _llama,
    "llama": _llama,
    "mistral": _llama,
    "mpt": _mpt,
    "olmo2": _olmo2,
    "opt": _opt,
    "phi": _phi,
    "phi3": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "starcoder2": _starcoder2,
}
