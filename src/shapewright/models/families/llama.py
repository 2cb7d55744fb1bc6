"""Dense families like Llama: rotary positions, RMSNorm and a gated MLP, or a few differences from these.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type.
"""

from __future__ import annotations

from dataclasses import replace

from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import (
    ATTENTION_BIAS,
    HEAD_DIM,
    RMSNORM_GATED,
    Family,
    FieldKeys,
    Fields,
    full_attention_every,
    rotary_layer_flags,
    sliding_from,
    window_on_every_layer,
    windows_from_layer_types,
)

_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}

LLAMA = Family(
    model_types=("llama",),
    defaults=_LLAMA_DEFAULTS,
    keys={**ATTENTION_BIAS, **HEAD_DIM, "mlp_bias": ("mlp_bias",)},
    fixed=RMSNORM_GATED,
)

GRANITE = Family(model_types=("granite",), defaults=LLAMA.defaults, keys=LLAMA.keys, fixed=LLAMA.fixed)

MISTRAL = Family(
    model_types=("mistral",),
    defaults={
        **_LLAMA_DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    keys=HEAD_DIM,
    fixed=RMSNORM_GATED,
    derive=window_on_every_layer,
)


def _derive_qwen(values: ConfigValues) -> Fields:
    """Read the windows: layers from ``max_window_layers`` on slide if ``use_sliding_window`` is true."""
    if not values.flag("use_sliding_window"):
        return {}
    default = sliding_from(values, values.optional_count("max_window_layers"))
    return windows_from_layer_types(values, default)


_QWEN2_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

QWEN2 = Family(
    model_types=("qwen2",),
    defaults=_QWEN2_DEFAULTS,
    keys=HEAD_DIM,
    fixed={**RMSNORM_GATED, "qkv_bias": True},
    derive=_derive_qwen,
)

# The language models of Qwen2-VL and Qwen2.5-VL, whose defaults are those of the models with 72 B parameters.
QWEN2_VL = replace(
    QWEN2,
    model_types=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
    defaults={
        **_QWEN2_DEFAULTS,
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_window_layers": 80,
    },
)

QWEN3 = Family(
    model_types=("qwen3",),
    defaults={**_QWEN2_DEFAULTS, "head_dim": 128},
    keys={**HEAD_DIM, **ATTENTION_BIAS},
    fixed={**RMSNORM_GATED, "qk_norm": "per-head"},
    derive=_derive_qwen,
)

QWEN3_VL = replace(
    QWEN3, model_types=("qwen3_vl_text",), defaults={**QWEN3.defaults, "max_position_embeddings": 128000}
)

_GEMMA_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA2_DEFAULTS = {
    **_GEMMA_DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}
_GEMMA_KEYS: FieldKeys = {**ATTENTION_BIAS, **HEAD_DIM, "activation": ("hidden_activation", "hidden_act")}

GEMMA = Family(
    model_types=("gemma",),
    defaults={**_GEMMA_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"},
    # Checkpoints of the first Gemma have hidden_act "gelu" for the tanh form; hidden_activation, if present, is right.
    keys=_GEMMA_KEYS,
    fixed=RMSNORM_GATED,
)

GEMMA2 = Family(
    model_types=("gemma2",),
    defaults=_GEMMA2_DEFAULTS,
    keys=_GEMMA_KEYS,
    # Attention and MLP each have a normalization before and after.
    fixed={**RMSNORM_GATED, "num_norms_per_layer": 4},
    derive=lambda values: windows_from_layer_types(values, full_attention_every(values, 2)),
)

GEMMA3 = Family(
    model_types=("gemma3_text", "gemma3"),
    defaults={**_GEMMA2_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
    keys=_GEMMA_KEYS,
    fixed={**RMSNORM_GATED, "num_norms_per_layer": 4, "qk_norm": "per-head"},
    derive=lambda values: windows_from_layer_types(
        values, full_attention_every(values, values.count("sliding_window_pattern", "_sliding_window_pattern"))
    ),
)


PHI3 = Family(
    model_types=("phi3",),
    defaults={
        **_LLAMA_DEFAULTS,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
    },
    keys={**HEAD_DIM, "hidden_dropout": ("resid_pdrop",)},
    fixed={**RMSNORM_GATED, "fused_qkv": True, "fused_gate_up": True},
    derive=window_on_every_layer,
)

_OLMO_DEFAULTS = {**_LLAMA_DEFAULTS, "vocab_size": 50304}

OLMO2 = Family(
    model_types=("olmo2",),
    defaults=_OLMO_DEFAULTS,
    keys={**ATTENTION_BIAS, **HEAD_DIM},
    fixed={**RMSNORM_GATED, "qk_norm": "per-layer"},
)

OLMO3 = Family(
    model_types=("olmo3",),
    defaults={**_OLMO_DEFAULTS, "sliding_window": 4096},
    keys=OLMO2.keys,
    fixed=OLMO2.fixed,
    derive=lambda values: windows_from_layer_types(values, full_attention_every(values, 4)),
)


def _derive_smollm3(values: ConfigValues) -> Fields:
    """Read rotary layers and windows: layers without rotary positions slide (SmolLM3Config of transformers)."""
    rotary = rotary_layer_flags(values)
    if not values.flag("use_sliding_window"):
        return {"rotary_layers": tuple(rotary)}
    default = ["full_attention" if has_rotary else "sliding_attention" for has_rotary in rotary]
    return {"rotary_layers": tuple(rotary), **windows_from_layer_types(values, default)}


SMOLLM3 = Family(
    model_types=("smollm3",),
    defaults={
        **_LLAMA_DEFAULTS,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    keys=LLAMA.keys,
    fixed=RMSNORM_GATED,
    derive=_derive_smollm3,
)

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

FAMILIES = (
    LLAMA,
    GRANITE,
    MISTRAL,
    QWEN2,
    QWEN2_VL,
    QWEN3,
    QWEN3_VL,
    GEMMA,
    GEMMA2,
    GEMMA3,
    PHI3,
    OLMO2,
    OLMO3,
    SMOLLM3,
    SEED_OSS,
    HUNYUAN_DENSE,
    ERNIE4_5,
    GLM,
    GLM4,
    EXAONE3,
    EXAONE4,
    ARCEE,
)
