"""Dense families with rotary positions and LayerNorm, some with ungated MLPs or parallel attention and MLP.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type.
"""

from __future__ import annotations

from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import (
    ATTENTION_BIAS,
    HEAD_DIM,
    LAYERNORM_GATED,
    LAYERNORM_GATED_WITHOUT_BIAS,
    Family,
    Fields,
    full_attention_every,
    window_on_every_layer,
    windows_from_layer_types,
)
from shapewright.models.families.llama import LLAMA, OLMO2


def _derive_phi(values: ConfigValues) -> Fields:
    has_qk_norm = values.flag("qk_layernorm")
    return {"qk_norm": "per-head" if has_qk_norm else "none", "qk_norm_bias": has_qk_norm}


PHI = Family(
    model_types=("phi",),
    defaults={
        **LLAMA.defaults,
        "vocab_size": 51200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "hidden_act": "gelu_new",
    },
    keys={**HEAD_DIM, "hidden_dropout": ("resid_pdrop",)},
    fixed={
        "norm": "layernorm",
        "norm_bias": True,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "lm_head_bias": True,
        "parallel_attention_mlp": True,
        "num_norms_per_layer": 1,
        "position_embedding": "rotary",
    },
    derive=_derive_phi,
)

OLMO = Family(
    model_types=("olmo",),
    defaults=OLMO2.defaults,
    keys={**ATTENTION_BIAS, **HEAD_DIM},
    fixed={**LAYERNORM_GATED_WITHOUT_BIAS, "norm_affine": False},
)


def _derive_stablelm(values: ConfigValues) -> Fields:
    return {
        # one LayerNorm without bias for each head
        "qk_norm": "per-layer" if values.flag("qk_layernorm") else "none",
        "num_norms_per_layer": 1 if values.flag("use_parallel_residual") else 2,
    }


STABLELM = Family(
    model_types=("stablelm",),
    defaults={
        **OLMO2.defaults,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
    keys={
        "qkv_bias": ("use_qkv_bias",),
        "parallel_attention_mlp": ("use_parallel_residual",),
        "hidden_dropout": ("hidden_dropout",),
    },
    fixed=LAYERNORM_GATED,
    derive=_derive_stablelm,
)

STARCODER2 = Family(
    model_types=("starcoder2",),
    defaults={
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    keys={
        **HEAD_DIM,
        "qkv_bias": ("use_bias",),
        "attention_out_bias": ("use_bias",),
        "mlp_bias": ("use_bias",),
        "hidden_dropout": ("residual_dropout",),
    },
    fixed={"norm": "layernorm", "norm_bias": True, "position_embedding": "rotary"},
    derive=window_on_every_layer,
)

NEMOTRON = Family(
    model_types=("nemotron",),
    defaults={
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 32,
        "num_attention_heads": 48,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    keys=LLAMA.keys,
    # the MLP is ungated
    fixed={"norm": "layernorm", "norm_bias": True, "position_embedding": "rotary"},
)

_COHERE_DEFAULTS = {
    **LLAMA.defaults,
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_COHERE_FIXED = {**LAYERNORM_GATED_WITHOUT_BIAS, "parallel_attention_mlp": True, "num_norms_per_layer": 1}

COHERE = Family(
    model_types=("cohere",),
    defaults=_COHERE_DEFAULTS,
    keys={**ATTENTION_BIAS, **HEAD_DIM},
    fixed=_COHERE_FIXED,
    derive=lambda values: {"qk_norm": "per-layer" if values.flag("use_qk_norm") else "none"},
)


def _derive_cohere2(values: ConfigValues) -> Fields:
    """Read windows and rotary layers: sliding layers have rotary positions, full-attention layers have none."""
    windows = windows_from_layer_types(values, full_attention_every(values, values.count("sliding_window_pattern")))
    return {**windows, "rotary_layers": tuple(window > 0 for window in windows.get("attention_windows", ()))}


COHERE2 = Family(
    model_types=("cohere2",),
    defaults={**_COHERE_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
    keys={**ATTENTION_BIAS, **HEAD_DIM},
    fixed=_COHERE_FIXED,
    derive=_derive_cohere2,
)


FAMILIES = (
    PHI,
    OLMO,
    STABLELM,
    STARCODER2,
    NEMOTRON,
    COHERE,
    COHERE2,
)
