"""Validate the fields of a TransformerConfig and fill in defaults.

The functions take any object with the fields of TransformerConfig, to avoid a circular import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.fields import documented_fields
from shapewright.core.numeric import divisors, values_beside
from shapewright.core.ranges import check_integer, check_number
from shapewright.core.texts import FieldName, with_fields
from shapewright.models.layers import (
    ATTENTION,
    LAYER_TYPES,
    LINEAR_LAYERS,
    WITH_SOFTMAX,
    count_unlike_layers,
    mixers_of,
    number_layers,
    shortest_period,
)
from shapewright.models.mixer_checks import check_mixers

MAX_COUNT = 2**40  # far above any dimension; products of several such counts are still finite floats
MAX_NUM_LAYERS = 2**16  # some functions iterate over layers
MAX_TEXT_LENGTH = 200

MAX_LAYER_KINDS = 32
MAX_UNLIKE_LAYERS = 256
"""Bounds of the work that a few bytes of a config can cause: each kind of layer is lowered and priced, and each stage
whose layers differ from those of others is estimated. Published models have up to four kinds, and up to 130 layers
before they repeat."""

SCANS = tuple(kind for kind in LINEAR_LAYERS if kind != "short_convolution")
"""Layers with a scan over tokens."""


PLAIN_PATTERNS: dict[str, tuple[Any, ...]] = {
    "attention_windows": (0,),
    "moe_layers": (True,),
    "rotary_layers": (True,),
    "layer_types": (ATTENTION,),
    "mlp_layers": (True,),
}
"""Fields with one value per layer, and the value that all layers have by default."""

_AT_LEAST_ONE = (
    "hidden_size", "num_layers", "num_heads", "vocab_size", "max_position_embeddings", "residual_streams",
)  # fmt: skip


def check_and_resolve(config: Any) -> dict[str, Any]:
    """Check every field, and replace zeros by the default that they select.

    Returns:
        Checked field values, with the defaults filled in.

    Raises:
        ConfigError: a field is out of range, or fields contradict each other.
    """
    values: dict[str, Any] = {}
    for spec, doc in documented_fields(type(config)):
        value = getattr(config, spec.name)
        if spec.name == "vocab_size" and config.patches is not None:
            values[spec.name] = check_count(spec.name, value, high=0, hint="a model of images has no vocabulary")
        elif doc.choices:
            values[spec.name] = _choice(spec.name, value, doc.choices)
        else:
            values[spec.name] = _CHECKS[str(spec.type)](spec.name, value)
    _resolve_defaults(values)
    _check_together(values)
    return values


def check_count(name: str, value: object, low: int = 0, high: int = MAX_COUNT, hint: str = "") -> int:
    """Return a size or number of a model, an integer.

    Raises:
        ConfigError: not an integer (True, "8", 8.0, NaN, None), or out of range.
    """
    return check_integer(name, value, low, high, error=ConfigError, hint=hint)


def check_probability(name: str, value: object) -> float:
    """Return a dropout probability, from 0 to below 1.

    Raises:
        ConfigError: not a number, or out of range.
    """
    return float(check_number(name, value, 0, 1, exclude_high=True, error=ConfigError))


def check_flag(name: str, value: object) -> bool:
    """Return a boolean.

    Raises:
        ConfigError: not a boolean.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={short_repr(value)} must be true or false")
    return value


def check_text(name: str, value: object) -> str:
    """Return a short text.

    Raises:
        ConfigError: not a text, too long, or with characters that cannot be printed.
    """
    if not isinstance(value, str) or len(value) > MAX_TEXT_LENGTH or not value.isprintable():
        raise ConfigError(
            f"{name}={short_repr(value)} must be a text of at most {MAX_TEXT_LENGTH} printable characters"
        )
    return value


def _layer_counts(name: str, value: object) -> tuple[int, ...]:
    return tuple(check_count(f"{name}[{index}]", item) for index, item in enumerate(_layer_items(name, value)))


def _layer_flags(name: str, value: object) -> tuple[bool, ...]:
    return tuple(check_flag(f"{name}[{index}]", item) for index, item in enumerate(_layer_items(name, value)))


def _layer_types(name: str, value: object) -> tuple[str, ...]:
    return tuple(_choice(f"{name}[{i}]", item, LAYER_TYPES) for i, item in enumerate(_layer_items(name, value)))


def _layer_items(name: str, value: object) -> Sequence[object]:
    if not isinstance(value, tuple | list) or len(value) > MAX_NUM_LAYERS:
        raise ConfigError(
            f"{name}={short_repr(value)} must be a list with one value per layer, or one period of a repeating pattern"
        )
    return value


def _choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name}={short_repr(value)} is not known; choose one of {', '.join(choices)}")
    return value


# Another number of heads is suggested within this fraction of the given one.
_NEAR_HEADS_FRACTION = 0.25


def _count_field(name: str, value: object) -> int:
    largest = MAX_NUM_LAYERS if name in ("num_layers", "num_encoder_layers", "num_mtp_layers") else MAX_COUNT
    return check_count(name, value, low=1 if name in _AT_LEAST_ONE else 0, high=largest)


_CHECKS: dict[str, Any] = {
    "int": _count_field,
    "float": check_probability,
    "bool": check_flag,
    "str": check_text,
    "tuple[int, ...]": _layer_counts,
    "tuple[bool, ...]": _layer_flags,
    "tuple[str, ...]": _layer_types,
}


def _resolve_defaults(values: dict[str, Any]) -> None:
    hidden_size, num_heads = values["hidden_size"], values["num_heads"]
    values["num_kv_heads"] = values["num_kv_heads"] or num_heads
    if not values["head_dim"]:
        if hidden_size % num_heads:
            below = hidden_size // num_heads * num_heads
            tries = f"hidden_size={below} or {below + num_heads}" if below else f"hidden_size={num_heads}"
            near = min(divisors(hidden_size), key=lambda count: abs(count - num_heads))
            if abs(near - num_heads) <= _NEAR_HEADS_FRACTION * num_heads:
                tries = f"num_heads={near}, {tries}"
            raise ConfigError(
                f"hidden_size={hidden_size} is not divisible by num_heads={num_heads}",
                advice=with_fields("try {tries}, or give {head_dim}", tries=tries),
                field="hidden_size",
            )
        values["head_dim"] = hidden_size // num_heads
    values["v_head_dim"] = values["v_head_dim"] or values["head_dim"]
    values["intermediate_size"] = values["intermediate_size"] or 4 * hidden_size
    values["embedding_size"] = values["embedding_size"] or hidden_size
    if values["stack"] == "encoder-decoder":
        values["num_encoder_layers"] = values["num_encoder_layers"] or values["num_layers"]
    if values["num_experts"]:
        values["moe_intermediate_size"] = values["moe_intermediate_size"] or values["intermediate_size"]
    _resolve_linear(values)
    for name, plain in PLAIN_PATTERNS.items():
        pattern = values[name][: values["num_layers"]]
        if pattern and name in ("layer_types", "mlp_layers"):  # configs name every layer, so that none is left open
            pattern = tuple(pattern[index % len(pattern)] for index in range(values["num_layers"]))
        period = shortest_period(pattern)
        # A pattern shorter than the stack repeats as a whole: (4, 0, 4) continues with 4, (4, 0) would not.
        if len(pattern) == values["num_layers"] or not pattern or len(pattern) % len(period) == 0:
            pattern = period
        values[name] = () if pattern == plain else pattern


def _resolve_linear(values: dict[str, Any]) -> None:
    """Fill in the sizes of layers without softmax attention from those of attention."""
    mixers = {mixer for layer_type in values["layer_types"] for mixer in mixers_of(layer_type)}
    if mixers & set(SCANS):
        values["linear_num_value_heads"] = values["linear_num_value_heads"] or values["num_heads"]
        values["linear_num_key_heads"] = values["linear_num_key_heads"] or values["linear_num_value_heads"]
        values["linear_key_head_dim"] = values["linear_key_head_dim"] or values["head_dim"]
        values["linear_value_head_dim"] = values["linear_value_head_dim"] or values["linear_key_head_dim"]
    if mixers - {"lightning_attention", *WITH_SOFTMAX}:
        values["linear_conv_width"] = values["linear_conv_width"] or 4
    if "mamba" in mixers:
        values["linear_step_rank"] = values["linear_step_rank"] or -(-values["hidden_size"] // 16)


def _check_together(values: dict[str, Any]) -> None:
    num_heads, num_kv_heads = values["num_heads"], values["num_kv_heads"]
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}; "
            f"try num_kv_heads={values_beside(num_kv_heads, divisors(num_heads))}",
            field="num_kv_heads",
        )
    if values["stack"] != "encoder-decoder" and values["num_encoder_layers"]:
        raise ConfigError(
            f"num_encoder_layers={values['num_encoder_layers']} has no effect for stack={values['stack']!r}",
            advice=with_fields("leave it out or set {stack:encoder-decoder}"),
            field="num_encoder_layers",
        )
    if values["rotary_layers"] and values["position_embedding"] != "rotary":
        raise ConfigError(
            f"rotary_layers={short_repr(values['rotary_layers'])} needs position_embedding='rotary'; leave it out",
            field="rotary_layers",
        )
    _check_patterns(values)
    _check_mtp(values)
    _check_experts(values)
    check_mixers(values)


def _check_patterns(values: dict[str, Any]) -> None:
    """Check that layers are of few kinds, and that those of deep models repeat."""
    patterns = {name: values[name] for name in PLAIN_PATTERNS if values[name]}
    if max(map(len, patterns.values()), default=1) == 1:
        return
    kinds, layers = number_layers(tuple(patterns.values()), values["num_layers"])
    longest = max(patterns, key=lambda name: len(set(patterns[name])))
    if len(kinds) > MAX_LAYER_KINDS:
        raise ConfigError(
            f"{longest}={short_repr(values[longest])} gives {len(kinds)} kinds of layers; at most {MAX_LAYER_KINDS} "
            f"are supported",
            field=longest,
        )
    if values["num_layers"] > MAX_UNLIKE_LAYERS and count_unlike_layers(layers) > MAX_UNLIKE_LAYERS:
        longest = max(patterns, key=lambda name: len(patterns[name]))
        raise ConfigError(
            f"{longest}={short_repr(values[longest])} does not repeat within {MAX_UNLIKE_LAYERS} layers, which models "
            f"of more layers must (num_layers={values['num_layers']})",
            field=longest,
        )


def _check_mtp(values: dict[str, Any]) -> None:
    if values["num_mtp_layers"] and values["stack"] != "decoder":
        raise ConfigError(
            f"num_mtp_layers={values['num_mtp_layers']} needs stack='decoder', not {values['stack']!r}; leave it out",
            field="num_mtp_layers",
        )


def _check_experts(values: dict[str, Any]) -> None:
    num_experts, per_token = values["num_experts"], values["num_experts_per_token"]
    if not num_experts:
        for name in ("num_experts_per_token", "moe_intermediate_size", "shared_expert_intermediate_size", "moe_layers"):
            if values[name]:
                raise ConfigError(
                    f"{name}={short_repr(values[name])} needs " + with_fields("{num_experts} above 0"),
                    advice=with_fields("set it or leave {name} out", name=FieldName(name)),
                )
        return
    if not 1 <= per_token <= num_experts:
        raise ConfigError(
            f"num_experts_per_token={per_token} must be from 1 to num_experts={num_experts}",
            field="num_experts_per_token",
        )
    if values["moe_layers"] and not any(values["moe_layers"]):
        raise ConfigError(
            f"num_experts={num_experts} but " + with_fields("{moe_layers} has no true entry"),
            advice="set num_experts=0 or add one",
            field="num_experts",
        )
    if values["shared_expert_gate"] and not values["shared_expert_intermediate_size"]:
        raise ConfigError(
            with_fields("shared_expert_gate=True needs {shared_expert_intermediate_size}"),
            advice=with_fields("set it or leave {shared_expert_gate} out"),
        )
