"""Mixture-of-experts families of DeepSeek's form: the first layers dense, shared experts, with or without MLA.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type.
"""

from __future__ import annotations

from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import (
    ATTENTION_BIAS,
    HEAD_DIM,
    RMSNORM_GATED,
    Family,
    FieldKeys,
    Fields,
    note_left_out_mtp,
)
from shapewright.models.families.moe import moe_layer_fields, sparse_layers


def _derive_experts(values: ConfigValues) -> Fields:
    """Read routed and shared experts: in all layers but the first ``first_k_dense_replace``."""
    num_layers = values.num_layers("num_hidden_layers")
    num_shared = values.optional_count("n_shared_experts")
    is_moe = sparse_layers(values, num_layers, "first_k_dense_replace")
    return {
        "shared_expert_intermediate_size": num_shared * values.count("moe_intermediate_size"),
        **moe_layer_fields(values, is_moe),
    }


def _derive_deepseek(values: ConfigValues) -> Fields:
    return {
        "num_kv_heads": 0,  # no key-value heads in MLA; num_key_value_heads repeats num_attention_heads
        "head_dim": values.optional_count("qk_nope_head_dim") + values.count("qk_rope_head_dim"),
        **_derive_experts(values),
    }


_EXPERTS: FieldKeys = {
    "num_experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "num_experts_per_token": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size",),
}
_DEEPSEEK_KEYS: FieldKeys = {
    **ATTENTION_BIAS,
    "v_head_dim": ("v_head_dim",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    **_EXPERTS,
}
_INDEXER: FieldKeys = {
    "index_num_heads": ("index_n_heads",),
    "index_head_dim": ("index_head_dim",),
    "index_topk": ("index_topk",),
}
_DEEPSEEK_DEFAULTS = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

DEEPSEEK_V2 = Family(
    model_types=("deepseek_v2",),
    defaults={
        **_DEEPSEEK_DEFAULTS,
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    keys=_DEEPSEEK_KEYS,
    fixed=RMSNORM_GATED,
    derive=_derive_deepseek,
    unread={"mlp_bias": False},
)


def _note_omitted_mtp(values: ConfigValues) -> list[str]:
    num_left_out = values.optional_count("num_nextn_predict_layers")
    return note_left_out_mtp(num_left_out)


def _note_sparse_attention(values: ConfigValues) -> list[str]:
    """Note how DeepSeek sparse attention, in which an indexer selects positions, is modelled."""
    num_positions = values.count("index_topk")
    return [
        *_note_omitted_mtp(values),
        f"sparse attention selects index_topk={num_positions} positions in prefill and decode; training, whose kernels "
        f"are not measured, is priced as dense attention",
    ]


DEEPSEEK_V3 = Family(
    model_types=("deepseek_v3", "kimi_k2"),
    defaults={
        **_DEEPSEEK_DEFAULTS,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
    },
    keys=_DEEPSEEK_KEYS,
    fixed=RMSNORM_GATED,
    derive=_derive_deepseek,
    notes=_note_omitted_mtp,
)

DEEPSEEK_SPARSE = Family(
    model_types=("deepseek_v32",),
    defaults={
        **DEEPSEEK_V3.defaults,
        "max_position_embeddings": 163840,
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
    },
    keys={**_DEEPSEEK_KEYS, **_INDEXER},
    fixed=RMSNORM_GATED,
    derive=_derive_deepseek,
    notes=_note_sparse_attention,
)

GLM_SPARSE = Family(
    model_types=("glm_moe_dsa",),
    defaults={
        **DEEPSEEK_SPARSE.defaults,
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "max_position_embeddings": 202752,
        "q_lora_rank": 2048,
        "index_n_heads": 32,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    keys={**_DEEPSEEK_KEYS, **_INDEXER},
    fixed=RMSNORM_GATED,
    derive=_derive_deepseek,
    notes=_note_sparse_attention,
)

GLM4_MOE_LITE = Family(
    model_types=("glm4_moe_lite",),
    defaults={
        **_DEEPSEEK_DEFAULTS,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
    },
    keys=_DEEPSEEK_KEYS,
    fixed=RMSNORM_GATED,
    derive=_derive_deepseek,
    notes=_note_omitted_mtp,
)


def _derive_glm4_moe(values: ConfigValues) -> Fields:
    # Published models have head_dim (96 heads of 128 exceed hidden_size); its default in transformers rounds down.
    rounded = values.count("hidden_size") // values.count("num_attention_heads")
    return {
        "head_dim": values.optional_count("head_dim") or rounded,
        "qk_norm": "per-head" if values.flag("use_qk_norm") else "none",
        **_derive_experts(values),
    }


GLM4_MOE = Family(
    model_types=("glm4_moe",),
    defaults={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
    },
    # attention_bias refers to queries, keys and values; the output projection never has a bias.
    keys={**HEAD_DIM, "qkv_bias": ("attention_bias",), **_EXPERTS},
    fixed=RMSNORM_GATED,
    derive=_derive_glm4_moe,
    notes=_note_omitted_mtp,
)

DOTS1 = Family(
    model_types=("dots1",),
    defaults={
        "vocab_size": 152064,
        "hidden_size": 4608,
        "intermediate_size": 10944,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1408,
    },
    keys={**HEAD_DIM, **ATTENTION_BIAS, **_EXPERTS},
    fixed={**RMSNORM_GATED, "qk_norm": "per-head"},
    derive=_derive_experts,
)

FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_SPARSE, GLM_SPARSE, GLM4_MOE_LITE, GLM4_MOE, DOTS1)
