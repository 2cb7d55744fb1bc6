"""DeepSeek-V4: attention to compressed tokens, several residual streams, and experts in all layers.

Source: configuration_deepseek_v4.py and modeling_deepseek_v4.py of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping

from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.texts import FieldName, with_fields
from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import (
    RMSNORM_GATED,
    Family,
    Fields,
    note_left_out_mtp,
    require_known_types,
)
from shapewright.models.layers import HEAVILY_COMPRESSED, SPARSE_COMPRESSED, WINDOW_ATTENTION

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


def _derive(values: ConfigValues) -> Fields:
    kinds = _layer_kinds(values)
    ratios = {kind: _ratio(values, kind) if kind in kinds else 0 for kind in _RATIOS}
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


def _ratio(values: ConfigValues, kind: str) -> int:
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


def _note_kinds(values: ConfigValues) -> list[str]:
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
    derive=_derive,
    notes=_note_kinds,
    unread={"mlp_bias": False, "n_shared_experts": 1},
)

FAMILIES = (DEEPSEEK_V4,)
