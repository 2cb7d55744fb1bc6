"""Fallback reader for model types without a table, and rejection of models with unsupported layers.

A model type without a table is read by common field names. Models that are not stacks of softmax attention and MLP
layers are rejected, by model type or by their keys: read by field names, the parameter counts of the types below
differed by 2 to 800,000 % from those of transformers 5.23.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.texts import FieldName, with_fields
from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import (
    KNOWN_LAYER_TYPES,
    Family,
    FieldKeys,
    Fields,
    refuse_unread,
    window_on_every_layer,
    windows_from_layer_types,
)
from shapewright.models.families.moe import sparse_layers

# Unsupported parts of model types that cannot be recognized by the keys of their config.
# Source: modeling_*.py of transformers 5.23 for each model type, or else the code published with the model.
_UNSUPPORTED_TYPES = {
    "FluxTransformer2DModel": "two streams of tokens with weights of their own that attend to each other",
    "SD3Transformer2DModel": "two streams of tokens with weights of their own that attend to each other",
    "albert": "layers that share their weights",
    "arctic": "layers with both a dense MLP and experts",
    "bailing_moe_linear": "linear attention",
    "bitnet": "ternary weights, and normalization inside attention and MLP",
    "blt": "byte-patch encoders and decoders",
    "doge": "experts selected by product keys",
    "gemma3n": "per-layer embeddings, parallel residual streams and KV caches shared between layers",
    "gemma3n_text": "per-layer embeddings, parallel residual streams and KV caches shared between layers",
    "gemma4": "per-layer embeddings and several head widths",
    "gemma4_text": "per-layer embeddings and several head widths",
    "gemma4_unified": "several head widths",
    "gemma4_unified_text": "several head widths",
    "hrm_text": "recurrent passes over the same layers",
    "jetmoe": "mixture-of-experts attention",
    "longcat_flash": "layers with two attention blocks, dense MLPs and experts, and zero-computation experts",
    "mimo_v2_flash": "a number of key-value heads that differs between sliding-window and full layers",
    "modernbert-decoder": "several kinds of layers",
    "moshi": "a second decoder (depth transformer)",
    "nemotron-nas": "layers of different widths, some without attention",
    "step3_text": "factorised query projections, and a list of MoE layers as text",
    "xlstm": "recurrent layers",
}
# Prefixes of keys that belong to layers without softmax attention (Mamba, RWKV, linear attention, convolutions).
_UNSUPPORTED_KEY_PREFIXES = (
    "mamba_",
    "ssm_",
    "state_size",
    "linear_attn_",
    "linear_num_",
    "linear_key_",
    "conv_",
    "attn_layer_",
    "rwkv",
    "lru_",
    "kda_",
    "hybrid_override_pattern",
)
# Keys that list the type of each layer, and the entries that mean softmax attention (MiniMax uses 1, and 0 for
# lightning attention).
_LAYER_TYPE_KEYS = ("layer_types", "layers_block_type", "block_types", "attn_type_list")
_SOFTMAX_ATTENTION = (*KNOWN_LAYER_TYPES, "attention", 1)
# Keys that are non-zero if layers reuse the keys and values of another layer (Hunyuan-Large, Gemma 3n).
_SHARED_CACHE_KEYS = ("use_cla", "num_kv_shared_layers")


def reject_unsupported_layers(model_type: str, part: Mapping[str, object]) -> None:
    """Check that all layers of a model are supported.

    Raises:
        ConfigError: the model type or a key belongs to an unsupported layer; the message names it.
    """
    quoted = f"model_type {short_repr(model_type)}" if model_type else "the config"
    supported = (
        "give a transformer of softmax attention and MLP layers, or trace the model ('shapewright predict --trace')"
    )
    if model_type in _UNSUPPORTED_TYPES:
        raise ConfigError(f"{quoted} is not supported: it has {_UNSUPPORTED_TYPES[model_type]}; {supported}")
    sharing = next((key for key in _SHARED_CACHE_KEYS if part.get(key)), None)
    if sharing:
        raise ConfigError(
            f"{quoted} has layers that share the keys and values of other layers ({sharing}="
            f"{short_repr(part[sharing])}), which is not supported; {supported}"
        )
    if part.get("residual_moe"):  # Grok-2
        raise ConfigError(
            f"{quoted} has layers with both a dense MLP and experts (residual_moe), which is not supported; {supported}"
        )
    evidence = _find_unsupported_layers(part)
    if evidence:
        raise ConfigError(
            f"{quoted} has layers without softmax attention ({', '.join(evidence[:3])}); state-space, linear-attention "
            f"and convolution layers are not supported; {supported}"
        )


def _find_unsupported_layers(part: Mapping[str, object]) -> list[str]:
    """List the layer types, then the keys (sorted), that belong to layers without softmax attention."""
    types = []
    for key in _LAYER_TYPE_KEYS:
        listed = part.get(key)
        others = [each for each in listed if each not in _SOFTMAX_ATTENTION] if isinstance(listed, list) else []
        if others:
            types.append(f"{key}={short_repr(others[0])}")
    return types + sorted(
        key for key in part if isinstance(key, str) and key.startswith(_UNSUPPORTED_KEY_PREFIXES) and part[key]
    )


_KEYS: FieldKeys = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "model_dim", "dim", "hidden_dim", "n_embed"),
    "num_layers": (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "num_decoder_layers",
        "num_transformer_layers",
        "decoder_layers",
    ),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "vocab_size": ("vocab_size", "n_vocab", "padded_vocab_size"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels", "d_kv", "attention_head_dim"),
    "v_head_dim": ("v_head_dim",),
    "intermediate_size": (
        "intermediate_size",
        "ffn_hidden_size",
        "ffn_dim",
        "n_inner",
        "d_ff",
        "inner_dim",
        "decoder_ffn_dim",
    ),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "activation": ("hidden_act", "hidden_activation", "activation_function", "activation"),
    "hidden_dropout": ("hidden_dropout", "resid_pdrop", "dropout", "hidden_dropout_prob"),
    "attention_dropout": ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
    "parallel_attention_mlp": ("use_parallel_residual", "parallel_attn"),
    "qkv_bias": ("attention_bias", "qkv_bias", "add_qkv_bias", "use_qkv_bias", "use_bias", "bias"),
    "attention_out_bias": ("attention_bias", "use_bias", "bias"),
    "mlp_bias": ("mlp_bias", "use_bias", "bias"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_intermediate_size"),
    "shared_expert_intermediate_size": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "embedding_size": ("word_embed_proj_dim", "embedding_size"),
    "num_token_types": ("type_vocab_size",),
}
_NUM_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_UNGATED_ACTIVATIONS = ("relu", "relu2", "xielu", "gelu", "gelu_new")
_GATED_ACTIVATIONS = ("silu", "swish", "swiglu", "geglu")
_RMSNORM_KEYS = ("rms_norm_eps", "rms_norm", "rmsnorm", "norm_eps")
_ROTARY_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rotary_dim", "rotary_pct", "partial_rotary_factor")
_ENCODER_LAYERS = ("encoder_layers", "num_encoder_layers", "num_layers", "num_hidden_layers")
_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers")
_DENSE_LAYERS = ("first_k_dense_replace", "num_dense_layers")
# Fields that an encoder and a decoder have each, and that must be equal.
_EQUAL_IN_STACKS = ("ffn_dim", "attention_heads")
_OTHER_KEYS = (
    "encoder_ffn_dim",
    "encoder_attention_heads",
    *_DENSE_LAYERS,
    "sliding_window",
    "use_sliding_window",
    "is_encoder_decoder",
    "qk_nope_head_dim",
    "tie_word_embeddings",
    "relative_attention_num_buckets",
    "alibi",
)

READ_KEYS = frozenset(
    {key for keys in _KEYS.values() for key in keys}
    | {*_NUM_SHARED_EXPERTS, *_RMSNORM_KEYS, *_ROTARY_KEYS, *_ENCODER_LAYERS, *_DECODER_LAYERS, *_OTHER_KEYS}
)
"""Keys that may decide how a model type without a table is read."""


@cache
def transformers_types() -> dict[str, dict[str, Any]]:
    """Compare model types without a table with transformers, as ``scripts/write_type_table.py`` found.

    By model type: ``error_fraction``, the parameters counted here over those of the default model, minus 1; and, for
    types that are read, ``defaults`` of transformers, ``unread``, the fields that change its model in ways not read,
    with their defaults, and ``needed``, the fields that transformers derives from others.
    """
    path = Path(__file__).with_name("transformers_types.json")
    types: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["types"]
    return types


def _with_defaults(model_type: str, part: Mapping[str, object]) -> tuple[Mapping[str, object], str]:
    """Add the defaults of transformers for absent keys, and describe how its parameter count differs.

    Raises:
        ConfigError: field names do not describe this type, or a field that is not read has another value.
    """
    known = transformers_types().get(model_type)
    if known is None:
        return part, ""
    error, quoted = known["error_fraction"], f"model_type {short_repr(model_type)}"
    if "defaults" not in known:
        raise ConfigError(
            f"{quoted} is not supported: read by field names it would have {abs(error):.0%} "
            f"{'more' if error > 0 else 'fewer'} parameters than transformers builds; give a model of another type, "
            "or describe it by its sizes"
        )
    refuse_unread(part, known["unread"], model_type)
    for key in known["needed"]:
        if key not in part and not (key == "mlp_layer_types" and any(part.get(each) for each in _DENSE_LAYERS)):
            raise ConfigError(
                with_fields("{key} is missing in the config of {quoted}", key=FieldName(key), quoted=quoted),
                advice="give it as transformers writes it",
            )
    counted = "" if abs(error) < _EXACT else f"; {abs(error):.2%} {'more' if error > 0 else 'fewer'} parameters counted"
    return {**known["defaults"], **part}, counted


# Difference of parameter counts that is not worth a remark: a few biases.
_EXACT = 1e-4


def unknown_family(model_type: str, part: Mapping[str, object]) -> tuple[Family, str]:
    """Build a family for a model type without a table.

    Returns:
        The family, and a description of what it assumes beyond the field names.

    Raises:
        ConfigError: the model has unsupported layers.
    """
    reject_unsupported_layers(model_type, part)
    given = part
    part, counted = _with_defaults(model_type, given)
    activation = next((part[key] for key in _KEYS["activation"] if part.get(key) is not None), None)
    has_rmsnorm = any(part.get(key) is not None for key in _RMSNORM_KEYS)
    is_gated = activation in _GATED_ACTIVATIONS or (has_rmsnorm and activation not in _UNGATED_ACTIVATIONS)
    if part.get("is_encoder_decoder") is True:
        stack = "encoder-decoder"
    else:
        stack = "encoder" if "type_vocab_size" in part and part.get("is_decoder") is not True else "decoder"
    if "relative_attention_num_buckets" in part:
        position = "relative"
    elif has_rmsnorm or any(key in part for key in _ROTARY_KEYS):
        position = "rotary"
    else:
        position = "alibi" if part.get("alibi") is True else "learned"
    fixed = {
        "stack": stack,
        "norm": "rmsnorm" if has_rmsnorm else "layernorm",
        "norm_bias": not has_rmsnorm,
        "gated_mlp": is_gated,
        "position_embedding": position,
        "qkv_bias": not has_rmsnorm,
        "attention_out_bias": not has_rmsnorm,
        "mlp_bias": not has_rmsnorm,
    }
    words = [
        f"{'an' if stack[0] == 'e' else 'a'} {stack}",
        "RMSNorm" if has_rmsnorm else "LayerNorm",
        "a gated MLP" if is_gated else "a plain MLP",
        f"{position} positions",
        "no biases unless named" if has_rmsnorm else "biases",
    ]
    defaults = {key: value for key, value in part.items() if key not in given}
    family = Family(model_types=(), keys=_KEYS, fixed=fixed, defaults=defaults, derive=_derive)
    return family, ", ".join(words) + counted


def _derive(values: ConfigValues) -> Fields:
    read = {**_latent_attention(values), **_experts(values), **_windows(values)}
    if values.raw("is_encoder_decoder") is True:
        for name in _EQUAL_IN_STACKS:
            ours, theirs = values.raw(f"decoder_{name}"), values.raw(f"encoder_{name}")
            if ours is not None and theirs is not None and ours != theirs:
                raise ConfigError(
                    f"encoder_{name}={short_repr(theirs)} must equal decoder_{name}={short_repr(ours)}: stacks of "
                    "different widths are not supported"
                )
        read["num_layers"] = values.num_layers(*_DECODER_LAYERS)
        read["num_encoder_layers"] = values.num_layers(*_ENCODER_LAYERS)
    return read


def _latent_attention(values: ConfigValues) -> Fields:
    if not values.optional_count("kv_lora_rank"):
        return {"q_lora_rank": 0, "qk_rope_head_dim": 0}
    without_position = values.optional_count("qk_nope_head_dim")
    if not without_position:
        return {"num_kv_heads": 0}
    return {"num_kv_heads": 0, "head_dim": without_position + values.optional_count("qk_rope_head_dim")}


def _experts(values: ConfigValues) -> Fields:
    dense = dict.fromkeys(
        ("num_experts", "num_experts_per_token", "moe_intermediate_size", "shared_expert_intermediate_size"), 0
    )
    num_experts = values.optional_count(*_KEYS["num_experts"])
    if num_experts <= 1:  # a single expert is a dense MLP (Hunyuan-7B)
        return dense
    is_moe = sparse_layers(values, values.num_layers(*_KEYS["num_layers"]), *_DENSE_LAYERS)
    if not any(is_moe):
        return dense
    read: Fields = {"moe_layers": tuple(is_moe)}
    if not values.optional_count(*_KEYS["num_experts_per_token"]):
        read["num_experts_per_token"] = min(2, num_experts)
    num_shared = values.optional_count(*_NUM_SHARED_EXPERTS)
    width = values.optional_count(*_KEYS["moe_intermediate_size"]) or values.optional_count(*_KEYS["intermediate_size"])
    if num_shared and not values.optional_count("shared_expert_intermediate_size"):
        read["shared_expert_intermediate_size"] = num_shared * width
    return read


def _windows(values: ConfigValues) -> Fields:
    """Read the windows of sliding layers; layer types without a known name are full attention."""
    names = values.list_of("layer_types")
    if not names:
        slides = values.present_key(("sliding_window",)) and values.raw("use_sliding_window") is not False
        return window_on_every_layer(values) if slides else {}
    if values.present_key(("num_hidden_layers",)) and all(name in KNOWN_LAYER_TYPES for name in names):
        return windows_from_layer_types(values, None)
    return {}
