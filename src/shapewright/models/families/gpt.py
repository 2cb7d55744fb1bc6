"""Families older than Llama, with LayerNorm, ungated MLPs and biases.

Sources: configuration_*.py and modeling_*.py of transformers 5.23 for each model type; for MPT's biases, learned
positions and expansion ratio, which transformers ignores, mosaicml/llm-foundry.
"""

from __future__ import annotations

from shapewright.core.errors import ConfigError, short_repr
from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import Family, FieldKeys, Fields

_GPT2_KEYS: FieldKeys = {
    "hidden_size": ("n_embd", "hidden_size"),
    "num_layers": ("n_layer", "num_hidden_layers"),
    "num_heads": ("n_head", "num_attention_heads"),
    "vocab_size": ("vocab_size",),
    "intermediate_size": ("n_inner",),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
    "activation": ("activation_function",),
    "hidden_dropout": ("resid_pdrop",),
    "attention_dropout": ("attn_pdrop",),
    "tied_embeddings": ("tie_word_embeddings",),
}
_LAYERNORM = {"norm": "layernorm", "norm_bias": True}
_ALL_BIASES = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}

GPT2 = Family(
    model_types=("gpt2",),
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
    },
    keys=_GPT2_KEYS,
    fixed={**_LAYERNORM, **_ALL_BIASES, "fused_qkv": True, "position_embedding": "learned"},
)


def _derive_gpt_bigcode(values: ConfigValues) -> Fields:
    num_heads = values.count("n_head", "num_attention_heads")
    return {"num_kv_heads": 1 if values.flag("multi_query") else num_heads}


GPT_BIGCODE = Family(
    model_types=("gpt_bigcode",),
    defaults={**GPT2.defaults, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
    keys=_GPT2_KEYS,
    fixed=GPT2.fixed,
    derive=_derive_gpt_bigcode,
)

GPTJ = Family(
    model_types=("gptj",),
    defaults={
        "vocab_size": 50400,
        "n_positions": 2048,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "activation_function": "gelu_new",
        "tie_word_embeddings": False,
    },
    keys=_GPT2_KEYS,
    fixed={
        **_LAYERNORM,
        "mlp_bias": True,
        "lm_head_bias": True,
        "parallel_attention_mlp": True,
        "num_norms_per_layer": 1,
        "position_embedding": "rotary",
    },
)


def _derive_gpt_neo(values: ConfigValues) -> Fields:
    """Read windows from ``attention_types``, a list of [pattern, repeats]; local layers have a window."""
    names: list[object] = []
    num_layers = values.num_layers("num_layers", "num_hidden_layers")
    for item in values.list_of("attention_types") or []:
        pattern, repeats = item if isinstance(item, list) and len(item) == 2 else (None, None)
        if (
            not isinstance(pattern, list)
            or not isinstance(repeats, int)
            or not 0 <= repeats * len(pattern) <= num_layers
        ):
            raise ConfigError(
                f"attention_types holds {short_repr(item)}; each entry must be [list of layer types, repeats]"
            )
        names += pattern * repeats
    if len(names) != num_layers or any(name not in ("global", "local") for name in names):
        raise ConfigError(
            f"attention_types gives {len(names)} layers but num_layers={num_layers}; give 'global' or 'local' for each"
        )
    window = values.count("window_size")
    return {"attention_windows": tuple(window if name == "local" else 0 for name in names)}


GPT_NEO = Family(
    model_types=("gpt_neo",),
    defaults={
        "vocab_size": 50257,
        "max_position_embeddings": 2048,
        "hidden_size": 2048,
        "num_layers": 24,
        "attention_types": [[["global", "local"], 12]],
        "num_heads": 16,
        "window_size": 256,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    keys={
        "num_layers": ("num_layers", "num_hidden_layers"),
        "num_heads": ("num_heads", "num_attention_heads"),
        "activation": ("activation_function",),
        "hidden_dropout": ("resid_dropout",),
    },
    fixed={**_LAYERNORM, "attention_out_bias": True, "mlp_bias": True, "position_embedding": "learned"},
    derive=_derive_gpt_neo,
)

GPT_NEOX = Family(
    model_types=("gpt_neox",),
    defaults={
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    keys={
        "parallel_attention_mlp": ("use_parallel_residual",),
        "qkv_bias": ("attention_bias",),
        "attention_out_bias": ("attention_bias",),
        "hidden_dropout": ("hidden_dropout",),
    },
    fixed={**_LAYERNORM, "mlp_bias": True, "fused_qkv": True, "position_embedding": "rotary"},
)


def _derive_opt(values: ConfigValues) -> Fields:
    return {
        "norm_bias": values.flag("layer_norm_elementwise_affine"),
        "has_final_norm": values.flag("do_layer_norm_before") and not values.flag("_remove_final_layer_norm"),
    }


OPT = Family(
    model_types=("opt",),
    defaults={
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "num_attention_heads": 12,
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    },
    keys={
        "intermediate_size": ("ffn_dim",),
        "activation": ("activation_function",),
        "hidden_dropout": ("dropout",),
        "embedding_size": ("word_embed_proj_dim",),
        "qkv_bias": ("enable_bias",),
        "attention_out_bias": ("enable_bias",),
        "mlp_bias": ("enable_bias",),
        "norm_affine": ("layer_norm_elementwise_affine",),
    },
    # Positions start at row 2 of the embedding (modeling_opt.py, OPTLearnedPositionalEmbedding).
    fixed={"norm": "layernorm", "position_embedding": "learned", "position_offset": 2},
    derive=_derive_opt,
)

BLOOM = Family(
    model_types=("bloom",),
    defaults={"vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "tie_word_embeddings": True},
    keys={
        "hidden_size": ("hidden_size", "n_embed"),
        "num_layers": ("n_layer", "num_hidden_layers"),
        "num_heads": ("n_head", "num_attention_heads"),
        "max_position_embeddings": ("seq_length",),
        "hidden_dropout": ("hidden_dropout",),
    },
    fixed={
        **_LAYERNORM,
        **_ALL_BIASES,
        "activation": "gelu_tanh",
        "fused_qkv": True,
        "embedding_norm": True,
        "position_embedding": "alibi",
    },
)


def _derive_mpt(values: ConfigValues) -> Fields:
    attention = values.nested("attn_config", {"alibi": True, "attn_type": "multihead_attention"})
    hidden_size, num_heads = values.count("d_model", "hidden_size"), values.count("n_heads", "num_attention_heads")
    kinds = {
        "multihead_attention": num_heads,
        "multiquery_attention": 1,
        "grouped_query_attention": attention.optional_count("kv_n_heads") or num_heads,
    }
    kind = attention.text("attn_type")
    if kind not in kinds:
        raise ConfigError(f"attn_config.attn_type={short_repr(kind)} is not known; choose one of {', '.join(kinds)}")
    has_bias = not values.flag("no_bias")
    if attention.flag("alibi"):
        position = "alibi"
    elif attention.flag("rope"):
        position = "rotary"
    else:
        position = "learned" if values.flag("learned_pos_emb") else "none"
    return {
        "num_kv_heads": kinds[kind],
        "intermediate_size": values.count("expansion_ratio") * hidden_size,
        "attention_dropout": attention.probability("attn_pdrop"),
        "position_embedding": position,
        "qk_norm": "per-layer" if attention.flag("qk_ln") else "none",
        "qk_norm_bias": attention.flag("qk_ln") and has_bias,
        "norm_bias": has_bias,
        "qkv_bias": has_bias,
        "attention_out_bias": has_bias,
        "mlp_bias": has_bias,
    }


MPT = Family(
    model_types=("mpt",),
    defaults={
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 24,
        "expansion_ratio": 4,
        "max_seq_len": 2048,
        "vocab_size": 50368,
        "learned_pos_emb": True,
        "no_bias": True,
        "tie_word_embeddings": True,
    },
    keys={
        "hidden_size": ("d_model", "hidden_size"),
        "num_layers": ("n_layers", "num_hidden_layers"),
        "num_heads": ("n_heads", "num_attention_heads"),
        "max_position_embeddings": ("max_seq_len",),
        "hidden_dropout": ("resid_pdrop",),
    },
    fixed={"norm": "layernorm", "fused_qkv": True},
    derive=_derive_mpt,
)


def _derive_falcon(values: ConfigValues) -> Fields:
    num_heads = values.count("num_attention_heads", "n_head")
    is_new, is_parallel = values.flag("new_decoder_architecture"), values.flag("parallel_attn")
    if is_new:
        num_kv_heads = values.optional_count("num_kv_heads", "n_head_kv") or num_heads
    else:
        num_kv_heads = 1 if values.flag("multi_query") else num_heads
    # Parallel layers share one normalization; the new architecture has one per branch.
    num_norms = values.optional_count("num_ln_in_parallel_attn") or (2 if is_new else 1)
    return {
        "num_kv_heads": num_kv_heads,
        "parallel_attention_mlp": is_parallel or is_new,
        "num_norms_per_layer": 1 if is_parallel and num_norms != 2 else 2,
        "position_embedding": "alibi" if values.flag("alibi") else "rotary",
    }


FALCON = Family(
    model_types=("falcon",),
    defaults={
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "max_position_embeddings": 2048,
        "activation": "gelu",
        "tie_word_embeddings": True,
    },
    keys={
        "hidden_size": ("hidden_size", "n_embed"),
        "num_layers": ("num_hidden_layers", "n_layer"),
        "num_heads": ("num_attention_heads", "n_head"),
        "num_kv_heads": ("num_kv_heads", "n_head_kv"),
        "intermediate_size": ("ffn_hidden_size",),
        "activation": ("activation",),
        "hidden_dropout": ("hidden_dropout",),
        "qkv_bias": ("bias",),
        "attention_out_bias": ("bias",),
        "mlp_bias": ("bias",),
    },
    fixed={**_LAYERNORM, "fused_qkv": True},
    derive=_derive_falcon,
)

FAMILIES = (GPT2, GPT_BIGCODE, GPTJ, GPT_NEO, GPT_NEOX, OPT, BLOOM, MPT, FALCON)
