"""Dense families with Llama's rotary positions that kept LayerNorm, some with plain MLPs or parallel layers.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type.
"""

from __future__ import annotations

from shapewright.config.families.family import (
    ATTENTION_BIAS,
    HEAD_DIM,
    LAYERNORM_GATED,
    LAYERNORM_GATED_WITHOUT_BIAS,
    Family,
    Fields,
    every_nth_is_full,
    window_on_every_layer,
    windows_from_layer_types,
)
from shapewright.config.families.llama import LLAMA, OLMO2
from shapewright.config.hf_values import HfValues


def _phi_rest(values: HfValues) -> Fields:
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
    spellings={**HEAD_DIM, "hidden_dropout": ("resid_pdrop",)},
    facts={
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
    derive=_phi_rest,
)

OLMO = Family(
    model_types=("olmo",),
    defaults=OLMO2.defaults,
    spellings={**ATTENTION_BIAS, **HEAD_DIM},
    facts={**LAYERNORM_GATED_WITHOUT_BIAS, "norm_affine": False},
)


def _stablelm_rest(values: HfValues) -> Fields:
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
    spellings={
        "qkv_bias": ("use_qkv_bias",),
        "parallel_attention_mlp": ("use_parallel_residual",),
        "hidden_dropout": ("hidden_dropout",),
    },
    facts=LAYERNORM_GATED,
    derive=_stablelm_rest,
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
    spellings={
        **HEAD_DIM,
        "qkv_bias": ("use_bias",),
        "attention_out_bias": ("use_bias",),
        "mlp_bias": ("use_bias",),
        "hidden_dropout": ("residual_dropout",),
    },
    facts={"norm": "layernorm", "norm_bias": True, "position_embedding": "rotary"},
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
    spellings=LLAMA.spellings,
    # the MLP has no gate; LayerNorm's scale is stored less one
    facts={"norm": "layernorm", "norm_bias": True, "position_embedding": "rotary"},
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
_COHERE_FACTS = {**LAYERNORM_GATED_WITHOUT_BIAS, "parallel_attention_mlp": True, "num_norms_per_layer": 1}

COHERE = Family(
    model_types=("cohere",),
    defaults=_COHERE_DEFAULTS,
    spellings={**ATTENTION_BIAS, **HEAD_DIM},
    facts=_COHERE_FACTS,
    derive=lambda values: {"qk_norm": "per-layer" if values.flag("use_qk_norm") else "none"},
)


def _cohere2_layers(values: HfValues) -> Fields:
    """Layers that slide have rotary positions, those that see everything none."""
    windows = windows_from_layer_types(values, every_nth_is_full(values, values.count("sliding_window_pattern")))
    return {**windows, "rotary_layers": tuple(window > 0 for window in windows.get("attention_windows", ()))}


COHERE2 = Family(
    model_types=("cohere2",),
    defaults={**_COHERE_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
    spellings={**ATTENTION_BIAS, **HEAD_DIM},
    facts=_COHERE_FACTS,
    derive=_cohere2_layers,
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
