"""Mixture-of-experts families; see also ``deepseek`` and ``moe_shared``.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type.
"""

from __future__ import annotations

from dataclasses import replace

from shapewright.core.errors import ConfigError, short_repr
from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import (
    ATTENTION_BIAS,
    HEAD_DIM,
    LAYERNORM_GATED,
    LAYERNORM_GATED_WITHOUT_BIAS,
    RMSNORM_GATED,
    Family,
    FieldKeys,
    Fields,
    full_attention_every,
    refuse_unread,
    rotary_layer_flags,
    window_on_every_layer,
    windows_from_layer_types,
)

_EXPERTS: FieldKeys = {
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
    keys={**HEAD_DIM, **_EXPERTS, "moe_intermediate_size": ("intermediate_size",)},
    fixed=RMSNORM_GATED,
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
    keys={**ATTENTION_BIAS, **MIXTRAL.keys, "num_experts": ("num_experts", "num_local_experts")},
    fixed={**RMSNORM_GATED, "qk_norm": "per-layer"},
)


def _derive_phimoe(values: ConfigValues) -> Fields:
    """Read the windows; the router takes the best expert twice, whatever the config says."""
    key = "num_experts_per_tok"
    refuse_unread({key: values.optional_count(key)}, {key: 2}, "phimoe")
    return window_on_every_layer(values)


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
    keys={**ATTENTION_BIAS, **MIXTRAL.keys, "lm_head_bias": ("lm_head_bias",)},
    fixed=LAYERNORM_GATED,
    derive=_derive_phimoe,
)


def derive_sparse_layers(values: ConfigValues) -> Fields:
    """Read which layers have experts: every ``decoder_sparse_step``-th, except those in ``mlp_only_layers``."""
    step = values.count("decoder_sparse_step")
    dense = values.list_of("mlp_only_layers") or []
    num_layers = values.num_layers("num_hidden_layers")
    is_moe = [(index + 1) % step == 0 for index in range(num_layers)]
    for index in dense:
        if isinstance(index, bool) or not isinstance(index, int):
            raise ConfigError(f"mlp_only_layers holds {short_repr(index)}; each entry must be a layer index")
        if 0 <= index < num_layers:
            is_moe[index] = False
    return moe_layer_fields(values, is_moe)


def sparse_layers(values: ConfigValues, num_layers: int, *num_dense: str) -> list[bool]:
    """Read which layers have experts: those that ``mlp_layer_types`` calls sparse, or all but the first few.

    Args:
        values: The config.
        num_layers: Layers of the model.
        num_dense: Keys of the number of first layers without experts.

    Raises:
        ConfigError: an unknown kind of layer, or not one per layer.
    """
    kinds = values.list_of("mlp_layer_types")  # written by recent transformers versions
    if kinds is None:
        first = values.optional_count(*num_dense)
        return [index >= first for index in range(num_layers)]
    if len(kinds) != num_layers:
        raise ConfigError(
            f"mlp_layer_types has {len(kinds)} entries but num_hidden_layers={num_layers}; give one per layer"
        )
    for kind in kinds:
        if kind not in ("dense", "sparse"):
            raise ConfigError(f"mlp_layer_types holds {short_repr(kind)}; each entry must be 'dense' or 'sparse'")
    return [kind == "sparse" for kind in kinds]


def moe_layer_fields(values: ConfigValues, is_moe: list[bool]) -> Fields:
    """Return the field moe_layers, or the fields of a dense model if no layer has experts."""
    if any(is_moe) and values.optional_count("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        return {"moe_layers": tuple(is_moe)}
    return {
        "num_experts": 0,
        "num_experts_per_token": 0,
        "moe_intermediate_size": 0,
        "shared_expert_intermediate_size": 0,
        "shared_expert_gate": False,
    }


_QWEN_EXPERTS: FieldKeys = {
    "num_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_token": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size",),
}


def _derive_qwen2_moe(values: ConfigValues) -> Fields:
    windows: Fields = {}
    if values.flag("use_sliding_window"):
        first_full = values.optional_count("max_window_layers")
        num_layers = values.num_layers("num_hidden_layers")
        # Unlike in Qwen2, every other layer below max_window_layers slides.
        slides = [index % 2 == 0 and index < first_full for index in range(num_layers)]
        windows = windows_from_layer_types(
            values, ["sliding_attention" if sliding else "full_attention" for sliding in slides]
        )
    return {**windows, **derive_sparse_layers(values)}


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
    keys={
        **HEAD_DIM,
        **_QWEN_EXPERTS,
        "shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
        "qkv_bias": ("qkv_bias",),
    },
    fixed={**RMSNORM_GATED, "shared_expert_gate": True},
    derive=_derive_qwen2_moe,
)


def _derive_qwen3_moe(values: ConfigValues) -> Fields:
    windows = window_on_every_layer(values) if values.flag("use_sliding_window") else {}
    return {**windows, **derive_sparse_layers(values)}


QWEN3_MOE = Family(
    model_types=("qwen3_moe",),
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
    keys={
        **HEAD_DIM,
        **ATTENTION_BIAS,
        **_QWEN_EXPERTS,
    },
    fixed={**RMSNORM_GATED, "qk_norm": "per-head"},
    derive=_derive_qwen3_moe,
)

# Its default sizes in transformers are those of Qwen2-MoE. Whether embeddings are tied is a field of the whole model.
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    model_types=("qwen3_vl_moe_text",),
    defaults={
        **QWEN3_MOE.defaults,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
    },
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
    keys={**HEAD_DIM, **ATTENTION_BIAS, **_EXPERTS, "moe_intermediate_size": ("intermediate_size",)},
    fixed={**RMSNORM_GATED, "attention_sinks": True, "router_bias": True, "expert_bias": True, "expert_clamp": True},
    derive=lambda values: windows_from_layer_types(values, full_attention_every(values, 2)),
)


def _derive_llama4(values: ConfigValues) -> Fields:
    num_layers = values.num_layers("num_hidden_layers")
    moe_indices = values.list_of("moe_layers")
    if moe_indices is None:
        step = values.count("interleave_moe_layer_step")
        is_moe = [index % step == step - 1 for index in range(num_layers)]
    else:
        is_moe = [index in moe_indices for index in range(num_layers)]
    rotary = rotary_layer_flags(values)
    # Layers without rotary positions attend to all positions, the others to their chunk only.
    default = ["chunked_attention" if has_rotary else "full_attention" for has_rotary in rotary]
    expert_width = values.count("intermediate_size")
    return {
        "intermediate_size": values.count("intermediate_size_mlp"),
        "moe_intermediate_size": expert_width,
        "shared_expert_intermediate_size": expert_width,
        "qk_norm": "l2" if values.flag("use_qk_norm") else "none",
        "rotary_layers": tuple(rotary),
        **windows_from_layer_types(values, default),
        **moe_layer_fields(values, is_moe),
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
    keys={
        **HEAD_DIM,
        **ATTENTION_BIAS,
        **_EXPERTS,
        "intermediate_size": ("intermediate_size_mlp",),
        "moe_intermediate_size": ("intermediate_size",),
    },
    fixed=RMSNORM_GATED,
    derive=_derive_llama4,
)


def _derive_dbrx(values: ConfigValues) -> Fields:
    attention = values.nested("attn_config", {"kv_n_heads": 1, "attn_pdrop": 0.0})
    experts = values.nested(
        "ffn_config", {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1, "ffn_act_fn": {"name": "silu"}}
    )
    width = experts.count("ffn_hidden_size")
    return {
        "num_kv_heads": attention.count("kv_n_heads"),
        "attention_dropout": attention.probability("attn_pdrop"),
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
    keys={
        "hidden_size": ("d_model", "hidden_size"),
        "num_layers": ("n_layers", "num_hidden_layers"),
        "num_heads": ("n_heads", "num_attention_heads"),
        "max_position_embeddings": ("max_seq_len", "max_position_embeddings"),
        "hidden_dropout": ("resid_pdrop",),
    },
    fixed={**LAYERNORM_GATED_WITHOUT_BIAS, "fused_qkv": True},
    derive=_derive_dbrx,
)

FAMILIES = (MIXTRAL, OLMOE, PHIMOE, QWEN2_MOE, QWEN3_MOE, QWEN3_VL_MOE, GPT_OSS, LLAMA4, DBRX)
