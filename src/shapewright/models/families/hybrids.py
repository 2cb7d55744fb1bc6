"""Families with layers of linear attention or short convolutions between attention layers; see also state_spaces.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type.
"""

from __future__ import annotations

from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.numeric import round_up
from shapewright.core.texts import FieldName, with_fields
from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.deepseek import DEEPSEEK_V3
from shapewright.models.families.family import (
    ATTENTION_BIAS,
    HEAD_DIM,
    RMSNORM_GATED,
    Family,
    Fields,
    note_left_out_mtp,
    require_known_types,
    window_on_every_layer,
)
from shapewright.models.families.moe import MIXTRAL, QWEN3_MOE, derive_sparse_layers, moe_layer_fields, sparse_layers
from shapewright.models.layers import ATTENTION, mixers_of

# Names of layers in configs: softmax attention, and the other mixer of the family.
ATTENTION_NAMES = ("full_attention", "attention")
_LINEAR_NAMES = ("linear_attention", "mamba", "conv")


def layer_names(values: ConfigValues, default: list[str]) -> list[str]:
    """Return the name of each layer: attention, or the family's other mixer.

    Raises:
        ConfigError: an unknown name, or not one per layer.
    """
    key = values.present_key(("layer_types", "layers_block_type")) or "layer_types"
    names = values.list_of(key)
    known = (*ATTENTION_NAMES, *_LINEAR_NAMES)
    if names is None:
        return default
    num_layers = values.num_layers("num_hidden_layers")
    if len(names) != num_layers:
        raise ConfigError(
            with_fields("{key} has {number} entries", key=FieldName(key), number=len(names))
            + f" but num_hidden_layers={num_layers}; give one per layer"
        )
    require_known_types(key, names, known, known)
    return [str(name) for name in names]


def attention_every(values: ConfigValues, period: int, place: int) -> list[str]:
    """Return names with attention in one layer of every ``period``, at a place."""
    num_layers = values.num_layers("num_hidden_layers")
    return ["full_attention" if index % period == place else "linear_attention" for index in range(num_layers)]


def mixer_fields(names: list[str], kind: str, sizes: Fields) -> Fields:
    """Return the mixer of each layer, and its sizes if any layer has it."""
    layer_types = tuple(ATTENTION if name in ATTENTION_NAMES else kind for name in names)
    has_linear = any(mixers_of(layer_type) != (ATTENTION,) for layer_type in layer_types)
    return {"layer_types": layer_types, **(sizes if has_linear else {})}


def _delta_sizes(values: ConfigValues) -> Fields:
    return {
        "linear_num_key_heads": values.count("linear_num_key_heads"),
        "linear_num_value_heads": values.count("linear_num_value_heads"),
        "linear_key_head_dim": values.count("linear_key_head_dim"),
        "linear_value_head_dim": values.count("linear_value_head_dim"),
        "linear_conv_width": values.count("linear_conv_kernel_dim"),
    }


def _derive_gated_delta_net(values: ConfigValues) -> Fields:
    period = values.count("full_attention_interval")
    return mixer_fields(
        layer_names(values, attention_every(values, period, period - 1)), "gated_delta_net", _delta_sizes(values)
    )


_QWEN_LINEAR = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_FIXED = {**RMSNORM_GATED, "qk_norm": "per-head", "attention_output_gate": True}


def note_omitted_mtp(values: ConfigValues) -> list[str]:
    """Note layers that predict further tokens, which transformers does not build."""
    count = values.optional_count("mtp_num_hidden_layers", "num_nextn_predict_layers")
    return note_left_out_mtp(count)


QWEN3_NEXT = Family(
    model_types=("qwen3_next",),
    defaults={
        **QWEN3_MOE.defaults,
        **_QWEN_LINEAR,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
    },
    keys={**QWEN3_MOE.keys, "shared_expert_intermediate_size": ("shared_expert_intermediate_size",)},
    fixed={**_QWEN_FIXED, "shared_expert_gate": True},
    derive=lambda values: {**_derive_gated_delta_net(values), **derive_sparse_layers(values)},
)

_QWEN3_5_DEFAULTS = {
    **_QWEN_LINEAR,
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
QWEN3_5 = Family(
    model_types=("qwen3_5_text", "qwen3_5"),
    defaults=_QWEN3_5_DEFAULTS,
    keys={**HEAD_DIM, **ATTENTION_BIAS},
    fixed={**_QWEN_FIXED, "linear_projections": "qkv"},
    derive=_derive_gated_delta_net,
    notes=note_omitted_mtp,
)
QWEN3_5_MOE = Family(
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    defaults={
        **_QWEN3_5_DEFAULTS,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    keys={**QWEN3_NEXT.keys, "intermediate_size": ()},  # no layer is dense
    fixed={**QWEN3_5.fixed, "shared_expert_gate": True},
    derive=_derive_gated_delta_net,
    notes=note_omitted_mtp,
)


def _derive_olmo_hybrid(values: ConfigValues) -> Fields:
    heads = values.count("num_attention_heads")
    key_heads = values.optional_count("linear_num_key_heads") or heads
    key_dim = values.optional_count("linear_key_head_dim") or int(0.75 * values.count("hidden_size") / key_heads)
    sizes = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": values.optional_count("linear_num_value_heads") or heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": values.optional_count("linear_value_head_dim") or 2 * key_dim,
        "linear_conv_width": values.count("linear_conv_kernel_dim"),
    }
    names = layer_names(values, attention_every(values, 4, 3))
    if "full_attention" not in names:
        names[-1] = "full_attention"
    has_no_rope = values.present_key(("rope_parameters",)) is not None and values.raw("rope_parameters") is None
    position = "none" if has_no_rope else "rotary"
    return {**mixer_fields(names, "gated_delta_net", sizes), "position_embedding": position}


OLMO_HYBRID = Family(
    model_types=("olmo_hybrid",),
    defaults={
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "hidden_act": "silu",
        "max_position_embeddings": 65536,
        "tie_word_embeddings": False,
        "linear_conv_kernel_dim": 4,
    },
    keys={**HEAD_DIM, **ATTENTION_BIAS},
    fixed={**RMSNORM_GATED, "qk_norm": "per-layer", "linear_projections": "separate"},
    derive=_derive_olmo_hybrid,
)


def _derive_kimi_linear(values: ConfigValues) -> Fields:
    num_layers = values.num_layers("num_hidden_layers")
    linear = values.nested("linear_attn_config", {})
    listed = linear.list_of("full_attn_layers")  # counted from 1
    default = ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(num_layers)]
    if listed is not None:
        default = ["full_attention" if index + 1 in listed else "linear_attention" for index in range(num_layers)]
    heads = linear.optional_count("num_heads") or values.count("linear_num_heads")
    head_dim = linear.optional_count("head_dim") or values.count("linear_head_dim")
    sizes = {
        "linear_num_value_heads": heads,
        "linear_key_head_dim": head_dim,
        "linear_conv_width": linear.optional_count("short_conv_kernel_size") or values.count("linear_conv_kernel_dim"),
    }
    is_moe = sparse_layers(values, num_layers, "first_k_dense_replace")
    shared = values.optional_count("n_shared_experts", "num_shared_experts") * values.count("moe_intermediate_size")
    return {
        "num_kv_heads": 0,
        "head_dim": values.optional_count("qk_nope_head_dim") + values.count("qk_rope_head_dim"),
        "shared_expert_intermediate_size": shared,
        **mixer_fields(layer_names(values, default), "kimi_delta_attention", sizes),
        **moe_layer_fields(values, is_moe),
    }


KIMI_LINEAR = Family(
    model_types=("kimi_linear",),
    defaults={
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "n_shared_experts": 1,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 1,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    },
    keys={
        **DEEPSEEK_V3.keys,
        "max_position_embeddings": ("max_position_embeddings", "model_max_length"),
        "num_experts": ("num_experts", "num_local_experts"),
        "num_experts_per_token": ("num_experts_per_tok", "num_experts_per_token"),
    },
    fixed={**RMSNORM_GATED, "position_embedding": "none"},
    derive=_derive_kimi_linear,
)


def _derive_minimax(values: ConfigValues) -> Fields:
    kinds = values.list_of("attn_type_list")  # 1 for softmax attention, 0 for lightning attention
    default = attention_every(values, 2, 0)
    if kinds is not None:
        default = ["full_attention" if kind == 1 else "linear_attention" for kind in kinds]
    heads, hidden = values.count("num_attention_heads"), values.count("hidden_size")
    sizes = {
        "linear_num_value_heads": heads,
        "linear_key_head_dim": values.optional_count("head_dim") or hidden // heads,
    }
    windows = window_on_every_layer(values)  # of those with softmax attention
    return {**mixer_fields(layer_names(values, default), "lightning_attention", sizes), **windows}


MINIMAX = Family(
    model_types=("minimax", "minimax_text_01"),
    defaults=MIXTRAL.defaults,
    keys=MIXTRAL.keys,
    fixed=RMSNORM_GATED,
    derive=_derive_minimax,
)


def _derive_lfm2(values: ConfigValues) -> Fields:
    num_layers = values.num_layers("num_hidden_layers")
    listed = values.list_of("full_attn_idxs")
    default = ["full_attention" if listed is None or index in listed else "conv" for index in range(num_layers)]
    sizes = {
        "linear_conv_width": values.count("conv_L_cache"),
        "linear_conv_bias": values.flag("conv_bias"),
        "linear_bias": values.flag("conv_bias"),
    }
    read = mixer_fields(layer_names(values, default), "short_convolution", sizes)
    tied = values.raw("tie_embedding", "tie_word_embeddings")
    return {**read, "tied_embeddings": tied is not False, **_lfm2_width(values)}


def _lfm2_width(values: ConfigValues) -> Fields:
    """Return the inner width of the MLP: two thirds of the given one, rounded up, unless it is given as it is."""
    width = values.count("block_ff_dim", "intermediate_size")
    if not values.flag("block_auto_adjust_ff_dim"):
        return {"intermediate_size": width}
    width = int(2 * width / 3)
    factor = values.raw("block_ffn_dim_multiplier")
    if factor is not None:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1e6:
            raise ConfigError(f"block_ffn_dim_multiplier={short_repr(factor)} must be a positive number")
        multiple = values.count("block_multiple_of")
        width = round_up(int(factor * width), multiple)
    return {"intermediate_size": width}


_LFM2_DEFAULTS = {
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "conv_bias": False,
    "conv_L_cache": 3,
}
LFM2 = Family(
    model_types=("lfm2",),
    defaults={
        **_LFM2_DEFAULTS,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    keys={**HEAD_DIM, "intermediate_size": ("block_ff_dim", "intermediate_size")},
    fixed={**RMSNORM_GATED, "activation": "silu", "qk_norm": "per-head"},
    derive=_derive_lfm2,
)


def _derive_lfm2_moe(values: ConfigValues) -> Fields:
    num_dense = values.optional_count("num_dense_layers")
    is_moe = [index >= num_dense for index in range(values.num_layers("num_hidden_layers"))]
    return {**_derive_lfm2(values), **moe_layer_fields(values, is_moe)}


LFM2_MOE = Family(
    model_types=("lfm2_moe",),
    defaults={
        **_LFM2_DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
    keys={
        **HEAD_DIM,
        "num_experts": ("num_experts", "num_local_experts"),
        "num_experts_per_token": ("num_experts_per_tok",),
        "moe_intermediate_size": ("moe_intermediate_size",),
    },
    fixed=LFM2.fixed,
    derive=_derive_lfm2_moe,
)


FAMILIES = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, OLMO_HYBRID, KIMI_LINEAR, MINIMAX, LFM2, LFM2_MOE)
