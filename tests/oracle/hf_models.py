"""Small Hugging Face configs, one or more per model type, and the models that transformers builds from them.

The dimensions of one config differ from each other wherever the family allows it, so that a swapped pair shows. Keys
are ``model_type`` or ``model_type/variant``; values are what a ``config.json`` of that family would hold.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_VOCAB = 320  # rows of the embedding, larger than every other dimension
_POSITIONS = 96

# Spellings that most families since Llama share.
_COMMON: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": _POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA_LIKE: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 176}
_WIDE_HEADS: dict[str, Any] = {**_LLAMA_LIKE, "head_dim": 24}
_GPT2_LIKE: dict[str, Any] = {"vocab_size": _VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": _POSITIONS}
_MLA: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "intermediate_size": 176,
    "kv_lora_rank": 40,
    "q_lora_rank": 56,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_GLM4_MOE: dict[str, Any] = {
    **_WIDE_HEADS,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
_GRANITE_HYBRID: dict[str, Any] = {
    **_LLAMA_LIKE,
    "shared_intermediate_size": 112,
    "layer_types": ["full_attention"] * 3,
}
_LLAMA4_TEXT: dict[str, Any] = {
    **_WIDE_HEADS,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 144,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 32,
}
_GEMMA3_TEXT: dict[str, Any] = {
    **_WIDE_HEADS,
    "num_hidden_layers": 7,
    "sliding_window": 32,
    "sliding_window_pattern": 6,
}

_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
}
_NEMOTRON_H: dict[str, Any] = {
    **_WIDE_HEADS,
    "mamba_num_heads": 6,
    "mamba_head_dim": 20,
    "ssm_state_size": 28,
    "n_groups": 3,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 72,
    "num_experts_per_tok": 2,
}
_T5_GATED: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "d_model": 64,
    "d_kv": 24,
    "d_ff": 176,
    "num_layers": 3,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
_COMPRESSED: dict[str, Any] = {
    **_COMMON,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "q_lora_rank": 40,
    "partial_rotary_factor": 1 / 3,
    "o_groups": 2,
    "o_lora_rank": 28,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "index_n_heads": 6,
    "index_head_dim": 16,
    "index_topk": 4,
    "sliding_window": 12,
    "hc_mult": 3,
    "num_hash_layers": 1,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 10},
    "layer_types": [
        "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
}  # fmt: skip
HYBRID_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_WIDE_HEADS,
        "num_hidden_layers": 5,
        **_DELTA_NET,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 72,
        "mlp_only_layers": [1],
    },
    "qwen3_5_text": {**_WIDE_HEADS, "num_hidden_layers": 5, **_DELTA_NET},
    "qwen3_5_moe_text": {
        **_WIDE_HEADS,
        "num_hidden_layers": 5,
        **_DELTA_NET,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 72,
    },
    "olmo_hybrid": {**_LLAMA_LIKE, "num_hidden_layers": 5, **_DELTA_NET},
    "kimi_linear": {
        **_COMMON,
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "intermediate_size": 176,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "linear_attn_config": {
            "head_dim": 12,
            "num_heads": 6,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3, 5, 6],
        },
    },
    "minimax": {**_LLAMA_LIKE, "num_local_experts": 6, "num_experts_per_tok": 2},
    "bamba": {**_LLAMA_LIKE, **_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_LLAMA_LIKE, **_MAMBA, "mamba_d_ssm": 96, "mamba_rms_norm": True},
    "falcon_h1/plain": {**_LLAMA_LIKE, **_MAMBA, "mamba_d_ssm": 96},
    "granitemoehybrid/mamba": {
        **_LLAMA_LIKE,
        **_MAMBA,
        "shared_intermediate_size": 112,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "granitemoehybrid/mamba_dense": {
        **_LLAMA_LIKE,
        **_MAMBA,
        "shared_intermediate_size": 112,
        "num_local_experts": 0,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "nemotron_h": {**_NEMOTRON_H, "hybrid_override_pattern": "M-M*M-"},
    "nemotron_h/moe": {**_NEMOTRON_H, "hybrid_override_pattern": "MEM*EM-"},
    "jamba": {
        **_LLAMA_LIKE,
        "num_hidden_layers": 8,
        "mamba_d_state": 12,
        "mamba_d_conv": 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
    },
    "lfm2": {**_LLAMA_LIKE, "conv_L_cache": 3, "full_attn_idxs": [1], "block_multiple_of": 16},
    "lfm2_moe": {
        **_LLAMA_LIKE,
        "layer_types": ["conv", "conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "mamba2": {**_COMMON, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 20},
    "mamba": {**_COMMON, "state_size": 12},
    "falcon_mamba": {**_COMMON, "state_size": 12},
    "deepseek_v4": _COMPRESSED,
    "deepseek_v4/ratios": {**_COMPRESSED, "layer_types": None, "compress_ratios": [0, 4, 128, 4, 128]},
}

_SPARSE_MLA = {**_MLA, "index_n_heads": 4, "index_head_dim": 24, "index_topk": 16}
SPARSE_CONFIGS: dict[str, dict[str, Any]] = {"deepseek_v32": _SPARSE_MLA, "glm_moe_dsa": _SPARSE_MLA}
"""Configs with an indexer, which transformers runs in the forward pass alone."""

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    **HYBRID_CONFIGS,
    "gpt2": _GPT2_LIKE,
    "gpt2/inner": {**_GPT2_LIKE, "n_inner": 176},
    "gpt_bigcode": _GPT2_LIKE,
    "gpt_bigcode/heads": {**_GPT2_LIKE, "multi_query": False},
    "gpt_neo": {
        "vocab_size": _VOCAB,
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "max_position_embeddings": _POSITIONS,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 32,
    },
    "gptj": {**_GPT2_LIKE, "rotary_dim": 8},
    "gpt_neox": {**_COMMON, "intermediate_size": 176},
    "gpt_neox/sequential": {**_COMMON, "intermediate_size": 176, "use_parallel_residual": False},
    "opt": {**_COMMON, "ffn_dim": 176, "pad_token_id": 1, "word_embed_proj_dim": 64},
    "opt/projected": {
        **_COMMON,
        "ffn_dim": 176,
        "pad_token_id": 1,
        "word_embed_proj_dim": 40,
        "do_layer_norm_before": False,
    },
    "opt/no_final_norm": {**_COMMON, "ffn_dim": 176, "pad_token_id": 1, "_remove_final_layer_norm": True},
    "bloom": {"vocab_size": _VOCAB, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "mpt": {"vocab_size": _VOCAB, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": _POSITIONS},
    "falcon": {**_COMMON, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True},
    "falcon/new": {**_COMMON, "num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon/alibi": {**_COMMON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    "llama": _LLAMA_LIKE,
    "llama/biased": {**_WIDE_HEADS, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {**_WIDE_HEADS, "sliding_window": 32},
    "mixtral": {**_LLAMA_LIKE, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2": {**_LLAMA_LIKE, "use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2},
    "qwen2/windowed": {**_LLAMA_LIKE, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2},
    "qwen2_moe": {
        **_LLAMA_LIKE,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 112,
        "mlp_only_layers": [0],
    },
    "qwen3": _WIDE_HEADS,
    "qwen3_moe": {
        **_WIDE_HEADS,
        "num_hidden_layers": 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
    },
    "gemma": {**_WIDE_HEADS, "num_key_value_heads": 1},
    "gemma2": {**_WIDE_HEADS, "num_hidden_layers": 4, "sliding_window": 32},
    "gemma3_text": _GEMMA3_TEXT,
    "gemma3": {"text_config": {"model_type": "gemma3_text", **_GEMMA3_TEXT}},
    "phi": {**_COMMON, "intermediate_size": 176},
    "phi/qk_layernorm": {**_COMMON, "intermediate_size": 176, "qk_layernorm": True},
    "phi3": {**_LLAMA_LIKE, "sliding_window": 32},
    "olmo": {**_LLAMA_LIKE, "clip_qkv": 8.0},
    "olmo2": _LLAMA_LIKE,
    "olmo3": {**_LLAMA_LIKE, "num_hidden_layers": 4, "sliding_window": 32},
    "stablelm": {**_LLAMA_LIKE, "use_qkv_bias": True},
    "stablelm/parallel": {**_LLAMA_LIKE, "use_parallel_residual": True, "qk_layernorm": True},
    "starcoder2": {**_LLAMA_LIKE, "sliding_window": 32, "use_bias": True},
    "nemotron": {**_WIDE_HEADS, "partial_rotary_factor": 0.5},
    "nemotron/biased": {**_WIDE_HEADS, "attention_bias": True, "mlp_bias": True},
    "cohere": _LLAMA_LIKE,
    "cohere/qk_norm": {**_LLAMA_LIKE, "use_qk_norm": True},
    "cohere2": {**_WIDE_HEADS, "num_hidden_layers": 4, "sliding_window": 32},
    "granite": _LLAMA_LIKE,
    "deepseek_v2": {**_MLA, "topk_method": "group_limited_greedy"},
    "deepseek_v2/lite": {**_MLA, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": _MLA,
    "glm4_moe_lite": _MLA,
    "dots1": _GLM4_MOE,
    "glm4_moe": _GLM4_MOE,
    "glm4_moe/qk_norm": {**_GLM4_MOE, "use_qk_norm": True, "attention_bias": True},
    "dbrx": {
        "vocab_size": _VOCAB,
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 4,
        "max_seq_len": _POSITIONS,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 2},
    },
    "olmoe": {**_LLAMA_LIKE, "num_experts": 6, "num_experts_per_tok": 2},
    "phimoe": {**_WIDE_HEADS, "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True},
    "gpt_oss": {
        **_WIDE_HEADS,
        "num_hidden_layers": 4,
        "intermediate_size": 80,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
    },
    "llama4_text": _LLAMA4_TEXT,
    "llama4": {"text_config": {"model_type": "llama4_text", **_LLAMA4_TEXT}},
    "smollm3": {**_LLAMA_LIKE, "num_hidden_layers": 4},
    "seed_oss": _WIDE_HEADS,
    "seed_oss/biased": {**_WIDE_HEADS, "attention_out_bias": True, "mlp_bias": True},
    "hunyuan_v1_dense": _WIDE_HEADS,
    "ernie4_5": {**_WIDE_HEADS, "use_bias": True, "tie_word_embeddings": False},
    "glm": _WIDE_HEADS,
    "glm4": {**_WIDE_HEADS, "attention_bias": False},
    "exaone4": {**_LLAMA_LIKE, "num_hidden_layers": 5, "sliding_window": 32},
    "exaone4/full": {**_LLAMA_LIKE, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    "arcee": {**_WIDE_HEADS, "mlp_bias": True},
    "minimax_m2": {**_WIDE_HEADS, **_EXPERTS},
    "ernie4_5_moe": {
        **_WIDE_HEADS,
        "num_hidden_layers": 6,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 48,
        "moe_layer_end_index": 3,
        "moe_layer_interval": 2,
    },
    "hunyuan_v1_moe": {**_WIDE_HEADS, "num_experts": 6, "moe_topk": 2},
    "granitemoe": {**_LLAMA_LIKE, **_EXPERTS},
    "granitemoeshared": {**_LLAMA_LIKE, **_EXPERTS, "shared_intermediate_size": 112},
    "granitemoehybrid": {**_GRANITE_HYBRID, "num_local_experts": 0, "position_embedding_type": "rope"},
    "granitemoehybrid/experts": {**_GRANITE_HYBRID, **_EXPERTS},
    "bert": {**_COMMON, "intermediate_size": 176, "pad_token_id": 0},
    "roberta": {**_COMMON, "intermediate_size": 176, "pad_token_id": 1, "type_vocab_size": 1},
    "camembert": {**_COMMON, "intermediate_size": 176, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {**_COMMON, "intermediate_size": 176, "pad_token_id": 1, "type_vocab_size": 1},
    "mt5": _T5_GATED,
    "t5": {
        "vocab_size": _VOCAB,
        "d_model": 64,
        "d_kv": 24,
        "d_ff": 176,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
    },
    "t5/gated": _T5_GATED,
}


def model_type_of(key: str) -> str:
    """Model type of a key of TINY_CONFIGS: the part before the slash."""
    return key.partition("/")[0]


def tiny_config(key: str) -> dict[str, Any]:
    """Return what config.json would hold, model_type included."""
    return {"model_type": model_type_of(key), **{**TINY_CONFIGS, **SPARSE_CONFIGS}[key]}


def hf_config(config: dict[str, Any]) -> PreTrainedConfig:
    """Build the transformers config of a config.json dict; of a multimodal model, that of its text part."""
    from transformers import AutoConfig

    values = copy.deepcopy(config)
    whole = AutoConfig.for_model(values.pop("model_type"), **values)
    return whole.get_text_config()


def build_on_meta(config: dict[str, Any], attention: str = "eager", dtype: str = "float32") -> PreTrainedModel:
    """Build the model with its language head, without memory or weights.

    BERT and its kind are built with their masked language head and T5 as T5ForConditionalGeneration, all others as
    causal language models; of a multimodal config only the text model is built.

    Args:
        config: A config.json dict with its model_type.
        attention: Attention implementation, ``eager`` or ``sdpa``.
        dtype: Element format of the weights by its torch name.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    resolved = hf_config(config)
    builders = {
        "bert": AutoModelForMaskedLM,
        "roberta": AutoModelForMaskedLM,
        "camembert": AutoModelForMaskedLM,
        "xlm-roberta": AutoModelForMaskedLM,
        "t5": AutoModelForSeq2SeqLM,
        "mt5": AutoModelForSeq2SeqLM,
    }
    builder = builders.get(resolved.model_type, AutoModelForCausalLM)
    with torch.device("meta"):
        return builder.from_config(resolved, dtype=getattr(torch, dtype), attn_implementation=attention)


def count_built_parameters(model: PreTrainedModel) -> int:
    """Count the parameters of a built model, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
