"""Mixtures of experts after Llama and DeepSeek, most with an expert that every token uses.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type.
"""

from __future__ import annotations

from shapewright.config.families.experts import MIXTRAL, moe_layers
from shapewright.config.families.family import ATTENTION_BIAS, HEAD_DIM, RMSNORM_GATED, Family, Fields
from shapewright.config.families.refused import refuse_other_layers
from shapewright.config.hf_values import HfValues


def _left_out_predictors(values: HfValues) -> list[str]:
    num_left_out = values.optional_count("num_mtp_modules") if values.flag("use_mtp") else 0
    return [f"{num_left_out} multi-token-prediction layer(s) left out, as in transformers"] if num_left_out else []


MINIMAX_M2 = Family(
    model_types=("minimax_m2",),
    defaults={
        **MIXTRAL.defaults,
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
    },
    spellings=MIXTRAL.spellings,
    facts={**RMSNORM_GATED, "qk_norm": "per-layer"},
    remark=_left_out_predictors,
)


def _ernie_rest(values: HfValues) -> Fields:
    """Experts in every ``moe_layer_interval``-th layer from ``moe_layer_start_index`` to ``moe_layer_end_index``."""
    num_layers = values.num_layers("num_hidden_layers")
    first, step = values.optional_count("moe_layer_start_index"), values.count("moe_layer_interval")
    end = values.raw("moe_layer_end_index")
    last = num_layers - 1 if end in (-1, None) else values.optional_count("moe_layer_end_index")
    width = values.optional_count("moe_intermediate_size")
    return {
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": values.optional_count("moe_num_shared_experts") * width,
        **moe_layers(values, [first <= index <= last and (index + 1) % step == 0 for index in range(num_layers)]),
    }


ERNIE4_5_MOE = Family(
    model_types=("ernie4_5_moe",),
    defaults={
        "vocab_size": 103424,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    spellings={
        **HEAD_DIM,
        "num_experts": ("moe_num_experts", "num_experts"),
        "num_experts_per_token": ("moe_k", "num_experts_per_tok"),
        "qkv_bias": ("use_bias",),
        "attention_out_bias": ("use_bias",),
        "mlp_bias": ("use_bias",),
        "lm_head_bias": ("use_bias",),
    },
    facts={**RMSNORM_GATED, "router_bias": True},  # e_score_correction_bias, a parameter here and a buffer elsewhere
    derive=_ernie_rest,
)


def _hunyuan_rest(values: HfValues) -> Fields:
    # transformers gives all experts the dense width and one shared expert, whatever num_shared_expert says.
    width = values.count("intermediate_size")
    return {
        "num_experts": values.optional_count("num_experts"),
        "num_experts_per_token": values.optional_count("moe_topk"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }


HUNYUAN_MOE = Family(
    model_types=("hunyuan_v1_moe",),
    defaults={
        "vocab_size": 290943,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "num_experts": 1,
        "moe_topk": 1,
    },
    spellings={**HEAD_DIM, **ATTENTION_BIAS},
    facts={**RMSNORM_GATED, "qk_norm": "per-head"},
    derive=_hunyuan_rest,
)

_GRANITE_MOE_DEFAULTS = {
    **MIXTRAL.defaults,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
}

GRANITE_MOE = Family(
    model_types=("granitemoe",),
    defaults=_GRANITE_MOE_DEFAULTS,
    spellings={**ATTENTION_BIAS, **MIXTRAL.spellings},
    facts=RMSNORM_GATED,
)

GRANITE_MOE_SHARED = Family(
    model_types=("granitemoeshared",),
    defaults=_GRANITE_MOE_DEFAULTS,
    spellings={**GRANITE_MOE.spellings, "shared_expert_intermediate_size": ("shared_intermediate_size",)},
    facts={**RMSNORM_GATED, "fused_gate_up": True},
)


def _granite_hybrid_rest(values: HfValues) -> Fields:
    """Granite 4.0's type, whose layers may all be attention (granite-4.0-micro) and need not have experts.

    Raises:
        ConfigError: a layer is no attention.
    """
    num_layers = values.num_layers("num_hidden_layers")
    kinds = values.list_of("layer_types") or values.list_of("layers_block_type") or ["mamba"] * num_layers
    refuse_other_layers(values.model_type, {"layer_types": kinds})
    position = {"position_embedding": "rotary" if values.text("position_embedding_type") == "rope" else "none"}
    if values.optional_count("num_local_experts"):
        return position
    return {**position, **moe_layers(values, [])}


GRANITE_MOE_HYBRID = Family(
    model_types=("granitemoehybrid",),
    defaults={**_GRANITE_MOE_DEFAULTS, "shared_intermediate_size": 1024},
    # The expert that every token uses is the whole MLP where there are no others.
    spellings={**GRANITE_MOE_SHARED.spellings, "intermediate_size": ("shared_intermediate_size",)},
    facts=GRANITE_MOE_SHARED.facts,
    derive=_granite_hybrid_rest,
)

FAMILIES = (MINIMAX_M2, ERNIE4_5_MOE, HUNYUAN_MOE, GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_MOE_HYBRID)
