"""Check the fields of mixers: latent, sparse and compressed attention, residual streams, linear attention.

The functions take the fields of a TransformerConfig by name, with defaults filled in.
"""

from __future__ import annotations

import math
from typing import Any

from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.texts import FieldName, joined, with_fields
from shapewright.models.layers import (
    COMPRESSED_LAYERS,
    HEAVILY_COMPRESSED,
    SPARSE_COMPRESSED,
    WITH_SOFTMAX,
    mixers_of,
)

LINEAR_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_width", "linear_step_rank",
)  # fmt: skip
"""Fields of layers without softmax attention that are 0 in models without them."""

COMPRESSED_SIZES = (
    "compressed_window", "out_groups", "out_lora_rank", "sparse_compress_ratio", "heavy_compress_ratio",
)  # fmt: skip
"""Fields of compressed attention that are 0 in models without it."""


def check_mixers(values: dict[str, Any]) -> None:
    """Check that the fields of each mixer are there, and fit each other.

    Raises:
        ConfigError: one is missing, has no effect, or contradicts another.
    """
    _check_compressed(values)
    _check_streams(values)
    _check_mla(values)
    _check_indexer(values)
    _check_linear(values)


def _check_compressed(values: dict[str, Any]) -> None:
    kinds = set(values["layer_types"]) & set(COMPRESSED_LAYERS)
    for name, kind in zip(COMPRESSED_SIZES, (None, None, None, SPARSE_COMPRESSED, HEAVILY_COMPRESSED), strict=True):
        is_needed = kind in kinds if kind else bool(kinds)
        if values[name] and not kinds:
            raise ConfigError(
                f"{name}={values[name]} needs layers of compressed attention",
                advice=with_fields("set {layer_types} or leave {name} out", name=FieldName(name)),
                field=name,
            )
        if is_needed and not values[name]:
            raise ConfigError(
                with_fields("{name} must be at least 1 for {layer_types} with ", name=FieldName(name))
                + (kind or ", ".join(sorted(kinds))),
                advice=with_fields("set {name}", name=FieldName(name)),
                field=name,
            )
    if not kinds:
        return
    if others := set(values["layer_types"]) - kinds:
        raise ConfigError(
            f"layer_types={short_repr(values['layer_types'])} has compressed attention beside {min(others)!r}, which "
            f"is not supported; give all layers one of {', '.join(COMPRESSED_LAYERS)}",
            field="layer_types",
        )
    if values["kv_lora_rank"] or values["num_kv_heads"] != 1 or not values["q_lora_rank"]:
        raise ConfigError(
            f"compressed attention has one key-value head and queries of low rank, not num_kv_heads="
            f"{values['num_kv_heads']}, q_lora_rank={values['q_lora_rank']} and kv_lora_rank={values['kv_lora_rank']}",
            advice=with_fields("set num_kv_heads=1, kv_lora_rank=0 and {q_lora_rank}"),
            field="num_kv_heads",
        )
    if SPARSE_COMPRESSED in kinds and not values["index_topk"]:
        raise ConfigError(
            with_fields("{index_topk} must be at least 1 for {layer_types} with ") + SPARSE_COMPRESSED,
            advice=with_fields("set {index_topk}"),
            field="index_topk",
        )
    if values["num_heads"] % values["out_groups"]:
        raise ConfigError(
            f"out_groups={values['out_groups']} must divide num_heads={values['num_heads']}; "
            f"try out_groups={math.gcd(values['num_heads'], values['out_groups'])}",
            field="out_groups",
        )


def _check_streams(values: dict[str, Any]) -> None:
    streams = values["residual_streams"]
    has_one_block = "none" in values["layer_types"] or not all(values["mlp_layers"] or (True,))
    if streams > 1 and (values["stack"] != "decoder" or values["parallel_attention_mlp"] or has_one_block):
        raise ConfigError(
            f"residual_streams={streams} needs a decoder whose layers have a mixer and then an MLP",
            advice=with_fields("leave {residual_streams} out"),
            field="residual_streams",
        )


def _check_mla(values: dict[str, Any]) -> None:
    if set(values["layer_types"]) & set(COMPRESSED_LAYERS):
        _check_rotary_width(values)
        return
    if not values["kv_lora_rank"]:
        for name in ("q_lora_rank", "qk_rope_head_dim"):
            if values[name]:
                raise ConfigError(
                    f"{name}={values[name]} is a field of MLA and needs " + with_fields("{kv_lora_rank}"),
                    advice=with_fields("set it or leave {name} out", name=FieldName(name)),
                )
        return
    _check_rotary_width(values)
    if values["num_kv_heads"] != values["num_heads"]:
        raise ConfigError(
            f"num_kv_heads={values['num_kv_heads']} must equal num_heads={values['num_heads']} with "
            + with_fields("{kv_lora_rank} (MLA has no separate key-value heads)"),
            advice=with_fields("leave {num_kv_heads} out"),
            field="num_kv_heads",
        )


def _check_rotary_width(values: dict[str, Any]) -> None:
    if values["qk_rope_head_dim"] >= values["head_dim"]:
        raise ConfigError(
            f"qk_rope_head_dim={values['qk_rope_head_dim']} must be below head_dim={values['head_dim']}, the total "
            f"width of a query head",
            advice=with_fields("{head_dim} is qk_nope_head_dim + {qk_rope_head_dim}"),
            field="qk_rope_head_dim",
        )


def _check_indexer(values: dict[str, Any]) -> None:
    names = ("index_num_heads", "index_head_dim", "index_topk")
    given = [name for name in names if values[name]]
    if given and len(given) < len(names):
        raise ConfigError(
            f"{given[0]}={values[given[0]]} needs "
            + joined(FieldName(name) for name in names if name not in given)
            + " as well",
            advice="set all three or none",
            field=given[0],
        )
    has_latents = values["kv_lora_rank"] and values["q_lora_rank"]
    if given and not has_latents and not set(values["layer_types"]) & set(COMPRESSED_LAYERS):
        raise ConfigError(
            f"index_topk={values['index_topk']} is sparse attention over latents and needs "
            + with_fields("{kv_lora_rank} and {q_lora_rank}"),
            advice="set them or leave it out",
            field="index_topk",
        )


def _check_linear(values: dict[str, Any]) -> None:
    mixers = {mixer for layer_type in values["layer_types"] for mixer in mixers_of(layer_type)}
    for name in LINEAR_SIZES:
        if values[name] and not mixers - set(WITH_SOFTMAX):
            raise ConfigError(
                f"{name}={values[name]} needs layers without softmax attention",
                advice=with_fields("set {layer_types} or leave {name} out", name=FieldName(name)),
                field=name,
            )
    heads, key_heads = values["linear_num_value_heads"], values["linear_num_key_heads"]
    if key_heads and heads % key_heads:
        raise ConfigError(
            f"linear_num_key_heads={key_heads} must divide linear_num_value_heads={heads}; "
            f"try linear_num_key_heads={math.gcd(heads, key_heads)}",
            field="linear_num_key_heads",
        )
    if "mamba" in mixers and (key_heads, values["linear_value_head_dim"]) != (1, 1):
        raise ConfigError(
            f"mamba layers have one group and heads of width 1, not linear_num_key_heads={key_heads} and "
            f"linear_value_head_dim={values['linear_value_head_dim']}; set both to 1, or use mamba2",
            field="linear_num_key_heads",
        )
    if values["layer_types"] and values["stack"] != "decoder":
        raise ConfigError(
            f"layer_types={short_repr(values['layer_types'])} needs stack='decoder', not {values['stack']!r}; leave it "
            f"out",
            field="layer_types",
        )
    if not values["layer_types"] and not any(values["mlp_layers"] or (True,)):
        raise ConfigError(
            with_fields("{mlp_layers} has no true entry, so that layers are attention alone"),
            advice="add one or leave it out",
        )
