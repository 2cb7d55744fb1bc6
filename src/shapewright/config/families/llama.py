"""Dense families built as Llama is: rotary positions, RMSNorm and a gated MLP.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type.
"""

from __future__ import annotations

from shapewright.config.families.family import (
    ATTENTION_BIAS,
    HEAD_DIM,
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
    spellings={**ATTENTION_BIAS, **HEAD_DIM, "mlp_bias": ("mlp_bias",)},
    facts=RMSNORM_GATED,
)

GRANITE = Family(model_types=("granite",), defaults=LLAMA.defaults, spellings=LLAMA.spellings, facts=LLAMA.facts)

MISTRAL = Family(
    model_types=("mistral",),
    defaults={
        **_LLAMA_DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    spellings=HEAD_DIM,
    facts=RMSNORM_GATED,
    derive=window_on_every_layer,
)


def _qwen_windows(values: HfValues) -> Fields:
    """Only layers from ``max_window_layers`` on slide, and only if ``use_sliding_window`` says so."""
    if not values.flag("use_sliding_window"):
        return {}
    first = values.optional_count("max_window_layers")
    num_layers = values.num_layers("num_hidden_layers")
    default = ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]
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
    model_types=("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
    defaults=_QWEN2_DEFAULTS,
    spellings=HEAD_DIM,
    facts={**RMSNORM_GATED, "qkv_bias": True},
    derive=_qwen_windows,
)

QWEN3 = Family(
    model_types=("qwen3", "qwen3_vl_text"),
    defaults={**_QWEN2_DEFAULTS, "head_dim": 128},
    spellings={**HEAD_DIM, **ATTENTION_BIAS},
    facts={**RMSNORM_GATED, "qk_norm": "per-head"},
    derive=_qwen_windows,
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
_GEMMA_SPELLINGS: Spellings = {**ATTENTION_BIAS, **HEAD_DIM, "activation": ("hidden_activation", "hidden_act")}

GEMMA = Family(
    model_types=("gemma",),
    defaults={**_GEMMA_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"},
    # The first Gemma's checkpoints say hidden_act "gelu" and mean the tanh form, which hidden_activation then says.
    spellings=_GEMMA_SPELLINGS,
    facts=RMSNORM_GATED,
)

GEMMA2 = Family(
    model_types=("gemma2",),
    defaults=_GEMMA2_DEFAULTS,
    spellings=_GEMMA_SPELLINGS,
    # Attention and MLP have a normalisation before and one after.
    facts={**RMSNORM_GATED, "num_norms_per_layer": 4},
    derive=lambda values: windows_from_layer_types(values, every_nth_is_full(values, 2)),
)

GEMMA3 = Family(
    model_types=("gemma3_text", "gemma3"),
    defaults={**_GEMMA2_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
    spellings=_GEMMA_SPELLINGS,
    facts={**RMSNORM_GATED, "num_norms_per_layer": 4, "qk_norm": "per-head"},
    derive=lambda values: windows_from_layer_types(
        values, every_nth_is_full(values, values.count("sliding_window_pattern", "_sliding_window_pattern"))
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
    spellings={**HEAD_DIM, "hidden_dropout": ("resid_pdrop",)},
    facts={**RMSNORM_GATED, "fused_qkv": True, "fused_gate_up": True},
    derive=window_on_every_layer,
)

_OLMO_DEFAULTS = {**_LLAMA_DEFAULTS, "vocab_size": 50304}

OLMO2 = Family(
    model_types=("olmo2",),
    defaults=_OLMO_DEFAULTS,
    spellings={**ATTENTION_BIAS, **HEAD_DIM},
    facts={**RMSNORM_GATED, "qk_norm": "per-layer"},
)

OLMO3 = Family(
    model_types=("olmo3",),
    defaults={**_OLMO_DEFAULTS, "sliding_window": 4096},
    spellings=OLMO2.spellings,
    facts=OLMO2.facts,
    derive=lambda values: windows_from_layer_types(values, every_nth_is_full(values, 4)),
)


def _smollm3_layers(values: HfValues) -> Fields:
    """As transformers' SmolLM3Config has it: layers without rotary positions are those that slide."""
    rotary = layers_with_rotary(values)
    if not values.flag("use_sliding_window"):
        return {"rotary_layers": tuple(rotary)}
    default = ["full_attention" if turns else "sliding_attention" for turns in rotary]
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
    spellings=LLAMA.spellings,
    facts=RMSNORM_GATED,
    derive=_smollm3_layers,
)

FAMILIES = (
    LLAMA,
    GRANITE,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    PHI3,
    OLMO2,
    OLMO3,
    SMOLLM3,
)
