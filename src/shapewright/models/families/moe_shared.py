"""Mixture-of-experts families derived from Llama, most of them with shared experts.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type.
"""

from __future__ import annotations

from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import (
    ATTENTION_BIAS,
    HEAD_DIM,
    RMSNORM_GATED,
    Family,
    Fields,
    note_left_out_mtp,
)
from shapewright.models.families.moe import MIXTRAL, moe_layer_fields


def _note_omitted_mtp(values: ConfigValues) -> list[str]:
    num_left_out = values.optional_count("num_mtp_modules") if values.flag("use_mtp") else 0
    return note_left_out_mtp(num_left_out)


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
    keys=MIXTRAL.keys,
    fixed={**RMSNORM_GATED, "qk_norm": "per-layer"},
    notes=_note_omitted_mtp,
)


def _derive_ernie(values: ConfigValues) -> Fields:
    """Read experts: every ``moe_layer_interval``-th layer from ``moe_layer_start_index`` to ``moe_layer_end_index``."""
    num_layers = values.num_layers("num_hidden_layers")
    first, step = values.optional_count("moe_layer_start_index"), values.count("moe_layer_interval")
    end = values.raw("moe_layer_end_index")
    last = num_layers - 1 if end in (-1, None) else values.optional_count("moe_layer_end_index")
    width = values.optional_count("moe_intermediate_size")
    return {
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": values.optional_count("moe_num_shared_experts") * width,
        **moe_layer_fields(values, [first <= index <= last and (index + 1) % step == 0 for index in range(num_layers)]),
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
    keys={
        **HEAD_DIM,
        "num_experts": ("moe_num_experts", "num_experts"),
        "num_experts_per_token": ("moe_k", "num_experts_per_tok"),
    },
    fixed={**RMSNORM_GATED, "router_bias": True},  # e_score_correction_bias, here a parameter and elsewhere a buffer
    derive=_derive_ernie,
    unread={"use_bias": False},
)


def _derive_hunyuan(values: ConfigValues) -> Fields:
    # transformers builds one shared expert and uses the dense width for all experts; it ignores num_shared_expert.
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
    keys={**HEAD_DIM, **ATTENTION_BIAS},
    fixed={**RMSNORM_GATED, "qk_norm": "per-head"},
    derive=_derive_hunyuan,
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
    keys={**ATTENTION_BIAS, **MIXTRAL.keys},
    fixed=RMSNORM_GATED,
)

GRANITE_MOE_SHARED = Family(
    model_types=("granitemoeshared",),
    defaults=_GRANITE_MOE_DEFAULTS,
    keys={**GRANITE_MOE.keys, "shared_expert_intermediate_size": ("shared_intermediate_size",)},
    fixed={**RMSNORM_GATED, "fused_gate_up": True},
)


FAMILIES = (MINIMAX_M2, ERNIE4_5_MOE, HUNYUAN_MOE, GRANITE_MOE, GRANITE_MOE_SHARED)
