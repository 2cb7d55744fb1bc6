"""Mixture-of-experts families of DeepSeek's form: the first layers dense, shared experts, with or without MLA.

DeepSeek-V4 has experts in all layers, attention to compressed tokens and several residual streams.
Source: configuration_*.py and modeling_*.py of transformers 5.23 (DeepSeek-V4: 5.24) for each model type.
"""

from __future__ import annotations

from collections.abc import Mapping

from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.texts import FieldName, with_fields
from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import (
    ATTENTION_BIAS,
    HEAD_DIM,
    RMSNORM_GATED,
    Family,
    FieldKeys,
    Fields,
    note_left_out_mtp,
    require_known_types,
    sliding_from,
    windows_from_layer_types,
)
from shapewright.models.families.moe import moe_layer_fields, sparse_layers
from shapewright.models.layers import HEAVILY_COMPRESSED, SPARSE_COMPRESSED, WINDOW_ATTENTION


def _derive_experts(values: ConfigValues) -> Fields:
    """Read routed and shared experts: in all layers but the first ``first_k_dense_replace``."""
    num_layers = values.num_layers("num_hidden_layers")
    num_shared = values.optional_count("n_shared_experts")
    is_moe = sparse_layers(values, num_layers, "first_k_dense_replace")
    return {
        "shared_expert_intermediate_size": num_shared * values.count("moe_intermediate_size"),
        **moe_layer_fields(values, is_moe),
    }


def _derive_deepseek(values: ConfigValues) -> Fields:
    return {
        "num_kv_heads": 0,  # no key-value heads in MLA; num_key_value_heads repeats num_attention_heads
        "head_dim": values.optional_count("qk_nope_head_dim") + values.count("qk_rope_head_dim"),
        **_derive_experts(values),
    }


_EXPERTS: FieldKeys = {
    "num_experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "num_experts_per_token": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size",),
}
_DEEPSEEK_KEYS: FieldKeys = {
    **ATTENTION_BIAS,
    "v_head_dim": ("v_head_dim",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    **_EXPERTS,
}
_INDEXER: FieldKeys = {
    "index_num_heads": ("index_n_heads",),
    "index_head_dim": ("index_head_dim",),
    "index_topk": ("index_topk",),
}
_DEEPSEEK_DEFAULTS = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

DEEPSEEK_V2 = Family(
    model_types=("deepseek_v2",),
    defaults={
        **_DEEPSEEK_DEFAULTS,
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    keys=_DEEPSEEK_KEYS,
    fixed=RMSNORM_GATED,
    derive=_derive_deepseek,
    unread={"mlp_bias": False},
)


def _note_omitted_mtp(values: ConfigValues) -> list[str]:
    num_left_out = values.optional_count("num_nextn_predict_layers")
    return note_left_out_mtp(num_left_out)


def _note_sparse_attention(values: ConfigValues) -> list[str]:
    """Note how DeepSeek sparse attention, in which an indexer selects positions, is modelled."""
    num_positions = values.count("index_topk")
    return [
        *_note_omitted_mtp(values),
        f"sparse attention selects index_topk={num_positions} positions in prefill and decode; training, whose kernels "
        f"are not measured, is priced as dense attention",
    ]


DEEPSEEK_V3 = Family(
    model_types=("deepseek_v3", "kimi_k2"),
    defaults={
        **_DEEPSEEK_DEFAULTS,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
    },
    keys=_DEEPSEEK_KEYS,
    fixed=RMSNORM_GATED,
    derive=_derive_deepseek,
    notes=_note_omitted_mtp,
)

DEEPSEEK_SPARSE = Family(
    model_types=("deepseek_v32",),
    defaults={
        **DEEPSEEK_V3.defaults,
        "max_position_embeddings": 163840,
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
    },
    keys={**_DEEPSEEK_KEYS, **_INDEXER},
    fixed=RMSNORM_GATED,
    derive=_derive_deepseek,
    notes=_note_sparse_attention,
)

GLM_SPARSE = Family(
    model_types=("glm_moe_dsa",),
    defaults={
        **DEEPSEEK_SPARSE.defaults,
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "max_position_embeddings": 202752,
        "q_lora_rank": 2048,
        "index_n_heads": 32,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    keys={**_DEEPSEEK_KEYS, **_INDEXER},
    fixed=RMSNORM_GATED,
    derive=_derive_deepseek,
    notes=_note_sparse_attention,
)

GLM4_MOE_LITE = Family(
    model_types=("glm4_moe_lite",),
    defaults={
        **_DEEPSEEK_DEFAULTS,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
    },
    keys=_DEEPSEEK_KEYS,
    fixed=RMSNORM_GATED,
    derive=_derive_deepseek,
    notes=_note_omitted_mtp,
)


def _derive_glm4_moe(values: ConfigValues) -> Fields:
    # Published models have head_dim (96 heads of 128 exceed hidden_size); its default in transformers rounds down.
    rounded = values.count("hidden_size") // values.count("num_attention_heads")
    return {
        "head_dim": values.optional_count("head_dim") or rounded,
        "qk_norm": "per-head" if values.flag("use_qk_norm") else "none",
        **_derive_experts(values),
    }


GLM4_MOE = Family(
    model_types=("glm4_moe",),
    defaults={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
    },
    # attention_bias refers to queries, keys and values; the output projection never has a bias.
    keys={**HEAD_DIM, "qkv_bias": ("attention_bias",), **_EXPERTS},
    fixed=RMSNORM_GATED,
    derive=_derive_glm4_moe,
    notes=_note_omitted_mtp,
)


def _derive_dots1(values: ConfigValues) -> Fields:
    """Read experts and windows: layers from ``max_window_layers`` on slide, unless ``sliding_window`` is null."""
    default = sliding_from(values, values.optional_count("max_window_layers"))
    return {**_derive_experts(values), **windows_from_layer_types(values, default)}


DOTS1 = Family(
    model_types=("dots1",),
    defaults={
        "vocab_size": 152064,
        "hidden_size": 4608,
        "intermediate_size": 10944,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1408,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    keys={**HEAD_DIM, **ATTENTION_BIAS, **_EXPERTS},
    fixed={**RMSNORM_GATED, "qk_norm": "per-head"},
    derive=_derive_dots1,
)

_KINDS = {
    "sliding_attention": WINDOW_ATTENTION,
    "compressed_sparse_attention": SPARSE_COMPRESSED,
    "heavily_compressed_attention": HEAVILY_COMPRESSED,
}
_KIND_OF_RATIO = {0: WINDOW_ATTENTION, 4: SPARSE_COMPRESSED, 128: HEAVILY_COMPRESSED}
"""Entries of ``compress_ratios``, the list of older configs, and the kinds that transformers takes them for."""
_RATIOS = {SPARSE_COMPRESSED: ("compress_rate_csa", 4), HEAVILY_COMPRESSED: ("compress_rate_hca", 128)}
"""Key of a ratio in older configs, and its default."""
_ROTARY_SHARE = 64 / 512
"""Share of a head that has rotary positions, by default."""


def _derive_compressed(values: ConfigValues) -> Fields:
    kinds = _layer_kinds(values)
    ratios = {kind: _read_ratio(values, kind) if kind in kinds else 0 for kind in _RATIOS}
    has_indexer = SPARSE_COMPRESSED in kinds
    return {
        "layer_types": kinds,
        "sparse_compress_ratio": ratios[SPARSE_COMPRESSED],
        "heavy_compress_ratio": ratios[HEAVILY_COMPRESSED],
        "qk_rope_head_dim": _rotary_width(values),
        "shared_expert_intermediate_size": values.count("moe_intermediate_size"),
        "index_num_heads": values.count("index_n_heads") if has_indexer else 0,
        "index_head_dim": values.count("index_head_dim") if has_indexer else 0,
        "index_topk": values.count("index_topk") if has_indexer else 0,
    }


def _layer_kinds(values: ConfigValues) -> tuple[str, ...]:
    """Read the kind of each layer: its name, its ratio, or two heavily compressed ones and then every other one."""
    num_layers = values.num_layers("num_hidden_layers")
    names, ratios = values.list_of("layer_types"), values.list_of("compress_ratios")
    key, listed = ("compress_ratios", ratios) if names is None and ratios is not None else ("layer_types", names)
    if listed is None:
        return tuple(
            SPARSE_COMPRESSED if index > 1 and index % 2 else HEAVILY_COMPRESSED for index in range(num_layers)
        )
    # Layers of multi-token prediction may follow in the list of ratios, and are not built.
    is_long_enough = len(listed) >= num_layers if key == "compress_ratios" else len(listed) == num_layers
    if not is_long_enough:
        raise ConfigError(
            with_fields("{key} has {number} entries", key=FieldName(key), number=len(listed))
            + f" but num_hidden_layers={num_layers}; give one per layer",
            field=key,
        )
    if key == "layer_types":
        require_known_types(key, listed, _KINDS, _KINDS)
        return tuple(_KINDS[str(name)] for name in listed)
    for ratio in listed:
        if not isinstance(ratio, int) or isinstance(ratio, bool) or ratio not in _KIND_OF_RATIO:
            raise ConfigError(
                with_fields("{compress_ratios} has {ratio}", ratio=short_repr(ratio)),
                advice=with_fields(
                    "known are {known}; others are given by {compress_rates} and {layer_types}",
                    known=", ".join(map(str, _KIND_OF_RATIO)),
                ),
                field="compress_ratios",
            )
    return tuple(_KIND_OF_RATIO[ratio] for ratio in listed[:num_layers] if isinstance(ratio, int))


def _read_ratio(values: ConfigValues, kind: str) -> int:
    """Read the tokens of an entry."""
    old_key, default = _RATIOS[kind]
    if values.present_key((old_key,)):
        return values.count(old_key)
    rates = values.raw("compress_rates")
    if isinstance(rates, Mapping) and kind not in rates:
        raise ConfigError(
            with_fields("{compress_rates} lacks ") + f"{kind}, which {short_repr(dict(rates))} must give",
            field="compress_rates",
        )
    return values.nested("compress_rates", {kind: default}).count(kind)


def _rotary_width(values: ConfigValues) -> int:
    """Read the width of the rotary part of a head, or its share."""
    share, head_dim = values.raw("partial_rotary_factor"), values.count("head_dim")
    if share is None:
        return values.optional_count("qk_rope_head_dim") or int(_ROTARY_SHARE * head_dim)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"partial_rotary_factor={short_repr(share)} must be a number from 0 to 1")
    return int(share * head_dim)


def _note_compressed(values: ConfigValues) -> list[str]:
    notes = note_left_out_mtp(values.optional_count("num_nextn_predict_layers"))
    if SPARSE_COMPRESSED in _layer_kinds(values):
        notes.append(
            f"compressed sparse attention selects index_topk={values.count('index_topk')} entries in prefill and "
            f"decode, priced by the kernels measured of DeepSeek's sparse attention; training attends to all entries, "
            f"as transformers does, and its indexer has no gradient"
        )
    return notes


DEEPSEEK_V4 = Family(
    model_types=("deepseek_v4",),
    defaults={
        "vocab_size": 129280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "num_experts_per_tok": 6,
        "n_routed_experts": 256,
        "max_position_embeddings": 1048576,
        "hc_mult": 4,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    keys={
        "head_dim": ("head_dim",),
        "q_lora_rank": ("q_lora_rank",),
        "intermediate_size": ("moe_intermediate_size",),
        "moe_intermediate_size": ("moe_intermediate_size",),
        "num_experts": ("n_routed_experts", "num_local_experts"),
        "num_experts_per_token": ("num_experts_per_tok",),
        "compressed_window": ("sliding_window",),
        "out_groups": ("o_groups",),
        "out_lora_rank": ("o_lora_rank",),
        "residual_streams": ("hc_mult",),
    },
    fixed={**RMSNORM_GATED, "attention_sinks": True, "expert_clamp": True},
    derive=_derive_compressed,
    notes=_note_compressed,
    unread={"mlp_bias": False, "n_shared_experts": 1},
)

FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_SPARSE, GLM_SPARSE, GLM4_MOE_LITE, GLM4_MOE, DOTS1, DEEPSEEK_V4)
