"""Dense families since Llama: rotary positions, grouped keys and values, in most a gated MLP.

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


def _phi_rest(values: HfValues) -> Fields:
    has_qk_norm = values.flag("qk_layernorm")
    return {"qk_norm": "per-head" if has_qk_norm else "none", "qk_norm_bias": has_qk_norm}


PHI = Family(
    model_types=("phi",),
    defaults={
        **_LLAMA_DEFAULTS,
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

OLMO = Family(
    model_types=("olmo",),
    defaults=_OLMO_DEFAULTS,
    spellings={**ATTENTION_BIAS, **HEAD_DIM},
    facts={**LAYERNORM_GATED_WITHOUT_BIAS, "norm_affine": False},
)

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


def _stablelm_rest(values: HfValues) -> Fields:
    return {
        # one LayerNorm without bias for each head
        "qk_norm": "per-layer" if values.flag("qk_layernorm") else "none",
        "num_norms_per_layer": 1 if values.flag("use_parallel_residual") else 2,
    }


STABLELM = Family(
    model_types=("stablelm",),
    defaults={
        **_OLMO_DEFAULTS,
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
    **_LLAMA_DEFAULTS,
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
    PHI,
    PHI3,
    OLMO,
    OLMO2,
    OLMO3,
    STABLELM,
    STARCODER2,
    NEMOTRON,
    COHERE,
    COHERE2,
    SMOLLM3,
)
