"""Dense families that differ from Llama in normalization, biases, an ungated MLP or layers without rotary positions.

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
    full_attention_every,
    windows_from_layer_types,
)
from shapewright.models.families.llama import LLAMA

_USE_BIAS: FieldKeys = {
    "qkv_bias": ("use_bias",),
    "attention_out_bias": ("use_bias",),
    "mlp_bias": ("use_bias",),
}

SEED_OSS = Family(
    model_types=("seed_oss",),
    defaults={
        **LLAMA.defaults,
        "vocab_size": 155136,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    keys={
        **HEAD_DIM,
        "qkv_bias": ("attention_bias",),
        "attention_out_bias": ("attention_out_bias",),
        "mlp_bias": ("mlp_bias",),
        "hidden_dropout": ("residual_dropout",),
    },
    fixed=RMSNORM_GATED,
)

HUNYUAN_DENSE = Family(
    model_types=("hunyuan_v1_dense",),
    defaults={**LLAMA.defaults, "vocab_size": 290943},
    keys={**HEAD_DIM, **ATTENTION_BIAS},
    fixed={**RMSNORM_GATED, "qk_norm": "per-head"},
)

ERNIE4_5 = Family(
    model_types=("ernie4_5",),
    defaults={
        **LLAMA.defaults,
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    keys={**HEAD_DIM, **_USE_BIAS},
    fixed=RMSNORM_GATED,
)

_GLM_DEFAULTS = {
    **LLAMA.defaults,
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "attention_bias": True,
}
# attention_bias refers to queries, keys and values; the output projection never has a bias.
_GLM_KEYS: FieldKeys = {**HEAD_DIM, "qkv_bias": ("attention_bias",)}

GLM = Family(
    model_types=("glm",),
    defaults=_GLM_DEFAULTS,
    keys=_GLM_KEYS,
    fixed={**RMSNORM_GATED, "fused_gate_up": True},
)

GLM4 = Family(
    model_types=("glm4",),
    defaults=_GLM_DEFAULTS,
    keys=_GLM_KEYS,
    # Attention and MLP each have a normalization before and after.
    fixed={**GLM.fixed, "num_norms_per_layer": 4},
)

# EXAONE 3 to 3.5; their configs have layer_norm_epsilon, but the models use RMSNorm. Source: modeling_exaone.py in the
# model repository.
EXAONE3 = Family(
    model_types=("exaone",),
    defaults={
        **LLAMA.defaults,
        "vocab_size": 102400,
        "intermediate_size": 14336,
        "num_layers": 32,
        "num_key_value_heads": 8,
        "activation_function": "silu",
        "max_position_embeddings": 4096,
    },
    keys={
        **HEAD_DIM,
        "num_layers": ("num_layers", "num_hidden_layers"),
        "activation": ("activation_function", "hidden_act"),
    },
    fixed=RMSNORM_GATED,
)


def _derive_exaone4(values: ConfigValues) -> Fields:
    """Read windows and rotary layers: with sliding layers, those with full attention have no rotary positions."""
    if not values.optional_count("sliding_window"):
        return {}
    pattern = values.raw("sliding_window_pattern")
    # Configs on the hub spell out one period, such as LLLG; transformers has its length.
    period = len(pattern) if isinstance(pattern, str) and pattern else values.count("sliding_window_pattern")
    default = full_attention_every(values, period)
    listed = values.list_of("layer_types") or default
    windows = windows_from_layer_types(values, default)
    return {**windows, "rotary_layers": tuple(name == "sliding_attention" for name in listed)}


EXAONE4 = Family(
    model_types=("exaone4",),
    defaults={
        **LLAMA.defaults,
        "vocab_size": 102400,
        "intermediate_size": 16384,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    keys=HEAD_DIM,
    fixed={**RMSNORM_GATED, "qk_norm": "per-head"},
    derive=_derive_exaone4,
)

ARCEE = Family(
    model_types=("arcee",),
    defaults={
        **LLAMA.defaults,
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
    },
    keys={**HEAD_DIM, **ATTENTION_BIAS, "mlp_bias": ("mlp_bias",)},
    fixed={**RMSNORM_GATED, "gated_mlp": False},
)

FAMILIES = (SEED_OSS, HUNYUAN_DENSE, ERNIE4_5, GLM, GLM4, EXAONE3, EXAONE4, ARCEE)
