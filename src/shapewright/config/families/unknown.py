"""Reader of last resort: a model type without a table, read by the names of its fields."""

from __future__ import annotations

from collections.abc import Mapping

from shapewright.config.families.family import (
    KNOWN_LAYER_TYPES,
    Family,
    Fields,
    Spellings,
    window_on_every_layer,
    windows_from_layer_types,
)
from shapewright.config.families.refused import refuse_other_layers
from shapewright.config.hf_values import HfValues

_SPELLINGS: Spellings = {
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
    "shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
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


def unknown_family(model_type: str, part: Mapping[str, object]) -> tuple[Family, str]:
    """Make a family for a model type without a table.

    Returns:
        The family, and in words what it assumes beyond the field names.

    Raises:
        ConfigError: the model has layers that are not modelled.
    """
    refuse_other_layers(model_type, part)
    activation = next((part[key] for key in _SPELLINGS["activation"] if part.get(key) is not None), None)
    has_rmsnorm = any(key in part for key in _RMSNORM_KEYS)
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
    facts = {
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
    return Family(model_types=(), spellings=_SPELLINGS, facts=facts, derive=_rest), ", ".join(words)


def _rest(values: HfValues) -> Fields:
    read = {**_latent_attention(values), **_experts(values), **_windows(values)}
    if values.raw("is_encoder_decoder") is True:
        read["num_layers"] = values.num_layers(*_DECODER_LAYERS)
        read["num_encoder_layers"] = values.num_layers(*_ENCODER_LAYERS)
    return read


def _latent_attention(values: HfValues) -> Fields:
    if not values.optional_count("kv_lora_rank"):
        return {"q_lora_rank": 0, "qk_rope_head_dim": 0}
    without_position = values.optional_count("qk_nope_head_dim")
    if not without_position:
        return {"num_kv_heads": 0}
    return {"num_kv_heads": 0, "head_dim": without_position + values.optional_count("qk_rope_head_dim")}


def _experts(values: HfValues) -> Fields:
    num_experts = values.optional_count(*_SPELLINGS["num_experts"])
    if num_experts <= 1:  # one expert for all is an MLP (Hunyuan-7B)
        return dict.fromkeys(
            ("num_experts", "num_experts_per_token", "moe_intermediate_size", "shared_expert_intermediate_size"), 0
        )
    read: Fields = {}
    if not values.optional_count(*_SPELLINGS["num_experts_per_token"]):
        read["num_experts_per_token"] = min(2, num_experts)
    num_shared = values.optional_count(*_NUM_SHARED_EXPERTS)
    width = values.optional_count(*_SPELLINGS["moe_intermediate_size"], *_SPELLINGS["intermediate_size"])
    if num_shared and not values.optional_count("shared_expert_intermediate_size"):
        read["shared_expert_intermediate_size"] = num_shared * width
    num_layers = values.num_layers(*_SPELLINGS["num_layers"])
    kinds = values.list_of("mlp_layer_types")  # what transformers writes of late: dense or sparse
    if kinds is not None and len(kinds) == num_layers and "sparse" in kinds:
        read["moe_layers"] = tuple(kind == "sparse" for kind in kinds)
        return read
    num_dense = values.optional_count("first_k_dense_replace", "num_dense_layers")
    if num_dense < num_layers:
        read["moe_layers"] = tuple(index >= num_dense for index in range(num_layers))
    return read


def _windows(values: HfValues) -> Fields:
    """Windows of the layers that slide; kinds that say no more than that they attend count as full attention."""
    names = values.list_of("layer_types")
    if not names:
        slides = values.spelled(("sliding_window",)) and values.raw("use_sliding_window") is not False
        return window_on_every_layer(values) if slides else {}
    if values.spelled(("num_hidden_layers",)) and all(name in KNOWN_LAYER_TYPES for name in names):
        return windows_from_layer_types(values, None)
    return {}
