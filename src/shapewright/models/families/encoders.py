"""Families with an encoder: BERT (with its masked language head) and T5.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type.
"""

from __future__ import annotations

from dataclasses import replace

from shapewright.core.errors import ConfigError, short_repr
from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import Family, Fields

BERT = Family(
    model_types=("bert",),
    defaults={
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "tie_word_embeddings": True,
    },
    keys={
        "hidden_dropout": ("hidden_dropout_prob",),
        "attention_dropout": ("attention_probs_dropout_prob",),
        "num_token_types": ("type_vocab_size",),
    },
    fixed={
        "stack": "encoder",
        "norm": "layernorm",
        "norm_bias": True,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "position_embedding": "learned",
        "embedding_norm": True,
        "has_final_norm": False,
        "head_transform": True,
        "lm_head_bias": True,
    },
)


# Positions start after the padding row; max_position_embeddings includes the unused rows.
ROBERTA = replace(
    BERT,
    model_types=("roberta",),
    defaults={**BERT.defaults, "vocab_size": 50265},
)
XLM_ROBERTA = replace(BERT, model_types=("xlm-roberta", "camembert"))


def _derive_t5(values: ConfigValues) -> Fields:
    gate, _, activation = values.text("feed_forward_proj").rpartition("-")
    is_gated = values.raw("is_gated_act")
    if is_gated not in (None, gate == "gated"):
        raise ConfigError(
            f"is_gated_act={short_repr(is_gated)} contradicts feed_forward_proj="
            f"{short_repr(values.text('feed_forward_proj'))}; give one of them, or values that agree"
        )
    num_encoder_layers = values.count("num_layers", "num_hidden_layers")
    return {
        "num_encoder_layers": num_encoder_layers,
        "num_layers": values.optional_count("num_decoder_layers") or num_encoder_layers,
        # transformers 5 always ties the logit matrix; tie_word_embeddings only selects a scale
        "tied_embeddings": True,
        "gated_mlp": gate == "gated",
        "activation": "gelu_new" if gate == "gated" and activation == "gelu" else activation,
    }


def _note_tied_logits(values: ConfigValues) -> list[str]:
    if values.raw("tie_word_embeddings") is False:
        return ["the checkpoint has a separate logit matrix; it is counted as tied, as in transformers 5"]
    return []


T5 = Family(
    model_types=("t5",),
    defaults={
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "dropout_rate": 0.1,
        "feed_forward_proj": "relu",
        # The longest sequence of pre-training (arXiv 1910.10683, section 3.1.2); relative positions set no limit.
        "n_positions": 512,
    },
    keys={
        "hidden_size": ("d_model", "hidden_size"),
        "num_layers": ("num_decoder_layers", "num_layers", "num_hidden_layers"),
        "num_encoder_layers": ("num_layers", "num_hidden_layers"),
        "num_heads": ("num_heads", "num_attention_heads"),
        "head_dim": ("d_kv", "head_dim"),
        "intermediate_size": ("d_ff",),
        "max_position_embeddings": ("n_positions",),
        "hidden_dropout": ("dropout_rate",),
        "attention_dropout": ("dropout_rate",),
        "num_relative_buckets": ("relative_attention_num_buckets",),
    },
    fixed={"stack": "encoder-decoder", "norm": "rmsnorm", "position_embedding": "relative"},
    derive=_derive_t5,
    notes=_note_tied_logits,
)

MT5 = replace(
    T5,
    model_types=("mt5",),
    defaults={**T5.defaults, "vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6}
    | {"feed_forward_proj": "gated-gelu"},
)

FAMILIES = (BERT, ROBERTA, XLM_ROBERTA, T5, MT5)
