"""Mixture-of-experts families; those whose first layers are dense are in families.deepseek.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type.
"""

from __future__ import annotations

from shapewright.config.families.family import (
    ATTENTION_BIAS,
    HEAD_DIM,
    LAYERNORM_GATED,
    LAYERNORM_GATED_WITHOUT_BIAS,
    RMSNORM_GATED,
    Family,
    Fields,
    Spellings,
    every_nth_is_full,
    layers_with_rotary,
    window_on_every_layer,
    windows_from_layer_types,
)
from shapewright.config.hf_values import HfValues
from shapewright.config.validate import shown
from shapewright.errors import ConfigError

_EXPERTS: Spellings = {
    "num_experts": ("num_local_experts", "num_experts"),
    "num_experts_per_token": ("num_experts_per_tok",),
}

MIXTRAL = Family(
    model_types=("mixtral",),
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    spellings={**HEAD_DIM, **_EXPERTS, "moe_intermediate_size": ("intermediate_size",)},
    facts=RMSNORM_GATED,
    derive=window_on_every_layer,
)


OLMOE = Family(
    model_types=("olmoe",),
    defaults={
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "num_experts_per_tok": 8,
        "num_experts": 64,
    },
    spellings={**ATTENTION_BIAS, **MIXTRAL.spellings, "num_experts": ("num_experts", "num_local_experts")},
    facts={**RMSNORM_GATED, "qk_norm": "per-layer"},
)

PHIMOE = Family(
    model_types=("phimoe",),
    defaults={
        **MIXTRAL.defaults,
        "vocab_size": 32064,
        "intermediate_size": 6400,
        "num_local_experts": 16,
        "attention_bias": False,
        "lm_head_bias": False,
    },
    spellings={**ATTENTION_BIAS, **MIXTRAL.spellings, "lm_head_bias": ("lm_head_bias",)},
    facts=LAYERNORM_GATED,
    derive=window_on_every_layer,
)


def _every_nth_has_experts(values: HfValues) -> Fields:
    """Every ``decoder_sparse_step``-th layer has experts, except those in ``mlp_only_layers``."""
    step = values.count("decoder_sparse_step")
    dense = values.list_of("mlp_only_layers") or []
    num_layers = values.num_layers("num_hidden_layers")
    is_moe = [(index + 1) % step == 0 for index in range(num_layers)]
    for index in dense:
        if isinstance(index, bool) or not isinstance(index, int):
            raise ConfigError(f"mlp_only_layers holds {shown(index)}; each entry must be the number of a layer")
        if 0 <= index < num_layers:
            is_moe[index] = False
    return moe_layers(values, is_moe)


def moe_layers(values: HfValues, is_moe: list[bool]) -> Fields:
    """Which layers have experts, or that none has."""
    if any(is_moe) and values.optional_count("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        return {"moe_layers": tuple(is_moe)}
    # No layer has experts: a dense model in the spelling of its family.
    return {
        "num_experts": 0,
        "num_experts_per_token": 0,
        "moe_intermediate_size": 0,
        "shared_expert_intermediate_size": 0,
        "shared_expert_gate": False,
    }


_QWEN_EXPERTS: Spellings = {
    "num_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_token": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size",),
}


def _qwen2_moe_rest(values: HfValues) -> Fields:
    windows: Fields = {}
    if values.flag("use_sliding_window"):
        first_full = values.optional_count("max_window_layers")
        num_layers = values.num_layers("num_hidden_layers")
        # Unlike in Qwen2, the layers below max_window_layers slide, and of those every other one.
        slides = [index % 2 == 0 and index < first_full for index in range(num_layers)]
        windows = windows_from_layer_types(
            values, ["sliding_attention" if sliding else "full_attention" for sliding in slides]
        )
    return {**windows, **_every_nth_has_experts(values)}


QWEN2_MOE = Family(
    model_types=("qwen2_moe",),
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "qkv_bias": True,
    },
    spellings={
        **HEAD_DIM,
        **_QWEN_EXPERTS,
        "shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
        "qkv_bias": ("qkv_bias",),
    },
    facts={**RMSNORM_GATED, "shared_expert_gate": True},
    derive=_qwen2_moe_rest,
)


def _qwen3_moe_rest(values: HfValues) -> Fields:
    windows = window_on_every_layer(values) if values.flag("use_sliding_window") else {}
    return {**windows, **_every_nth_has_experts(values)}


QWEN3_MOE = Family(
    model_types=("qwen3_moe", "qwen3_vl_moe_text"),
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    spellings={
        **HEAD_DIM,
        **ATTENTION_BIAS,
        **_QWEN_EXPERTS,
    },
    facts={**RMSNORM_GATED, "qk_norm": "per-head"},
    derive=_qwen3_moe_rest,
)


GPT_OSS = Family(
    model_types=("gpt_oss",),
    defaults={
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "attention_bias": True,
    },
    spellings={**HEAD_DIM, **ATTENTION_BIAS, **_EXPERTS, "moe_intermediate_size": ("intermediate_size",)},
    facts={**RMSNORM_GATED, "attention_sinks": True, "router_bias": True, "expert_bias": True, "expert_clamp": True},
    derive=lambda values: windows_from_layer_types(values, every_nth_is_full(values, 2)),
)


def _llama4_rest(values: HfValues) -> Fields:
    num_layers = values.num_layers("num_hidden_layers")
    moe_indices = values.list_of("moe_layers")
    if moe_indices is None:
        step = values.count("interleave_moe_layer_step")
        is_moe = [index % step == step - 1 for index in range(num_layers)]
    else:
        is_moe = [index in moe_indices for index in range(num_layers)]
    rotary = layers_with_rotary(values)
    # Layers without rotary positions see everything, the others only their chunk.
    default = ["chunked_attention" if turns else "full_attention" for turns in rotary]
    expert_width = values.count("intermediate_size")
    return {
        "intermediate_size": values.count("intermediate_size_mlp"),
        "moe_intermediate_size": expert_width,
        "shared_expert_intermediate_size": expert_width,
        "qk_norm": "l2" if values.flag("use_qk_norm") else "none",
        "rotary_layers": tuple(rotary),
        **windows_from_layer_types(values, default),
        **moe_layers(values, is_moe),
    }


LLAMA4 = Family(
    model_types=("llama4_text", "llama4"),
    defaults={
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
    },
    spellings={
        **HEAD_DIM,
        **ATTENTION_BIAS,
        **_EXPERTS,
        "intermediate_size": ("intermediate_size_mlp",),
        "moe_intermediate_size": ("intermediate_size",),
    },
    facts=RMSNORM_GATED,
    derive=_llama4_rest,
)


def _dbrx_rest(values: HfValues) -> Fields:
    attention = values.nested("attn_config", {"kv_n_heads": 1, "attn_pdrop": 0.0})
    experts = values.nested(
        "ffn_config", {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1, "ffn_act_fn": {"name": "silu"}}
    )
    width = experts.count("ffn_hidden_size")
    return {
        "num_kv_heads": attention.count("kv_n_heads"),
        "attention_dropout": attention.fraction("attn_pdrop"),
        "activation": experts.nested("ffn_act_fn", {}).text("name") or "silu",
        "intermediate_size": width,
        "moe_intermediate_size": width,
        "num_experts": experts.count("moe_num_experts"),
        "num_experts_per_token": experts.count("moe_top_k"),
    }


DBRX = Family(
    model_types=("dbrx",),
    defaults={
        "vocab_size": 32000,
        "d_model": 2048,
        "n_layers": 24,
        "n_heads": 16,
        "max_seq_len": 2048,
        "tie_word_embeddings": False,
    },
    spellings={
        "hidden_size": ("d_model", "hidden_size"),
        "num_layers": ("n_layers", "num_hidden_layers"),
        "num_heads": ("n_heads", "num_attention_heads"),
        "max_position_embeddings": ("max_seq_len", "max_position_embeddings"),
        "hidden_dropout": ("resid_pdrop",),
    },
    facts={**LAYERNORM_GATED_WITHOUT_BIAS, "fused_qkv": True},
    derive=_dbrx_rest,
)

FAMILIES = (MIXTRAL, OLMOE, PHIMOE, QWEN2_MOE, QWEN3_MOE, GPT_OSS, LLAMA4, DBRX)
