"""What makes a TransformerConfig sound: the range of each field, and which fields go together.

The functions take any object with the fields of TransformerConfig, so that this file needs to know nothing of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

from shapewright.errors import ConfigError
from shapewright.fields import noted_fields
from shapewright.integers import divisors

LARGEST_COUNT = 2**40  # far above any dimension, and low enough that products of a few stay finite as floats
LARGEST_NUM_LAYERS = 2**16  # layers are walked one by one in places
LONGEST_TEXT = 200

_AT_LEAST_ONE = ("hidden_size", "num_layers", "num_heads", "vocab_size", "max_position_embeddings")

Item = TypeVar("Item")


def check_and_resolve(config: Any) -> dict[str, Any]:
    """Check every field, then fill in zeros that stand for a default.

    Returns:
        Field values to set: checked, and with the defaults filled in.

    Raises:
        ConfigError: a field out of its range, or fields that contradict each other.
    """
    values: dict[str, Any] = {}
    for spec, field_note in noted_fields(type(config)):
        value = getattr(config, spec.name)
        if field_note.choices:
            values[spec.name] = _choice(spec.name, value, field_note.choices)
        else:
            values[spec.name] = _CHECKS[str(spec.type)](spec.name, value)
    _resolve_defaults(values)
    _check_together(values)
    return values


def shown(value: object, longest: int = 40) -> str:
    """Print a value the user gave on one line, shortened.

    >>> shown("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"  # its digits would cost quadratic time, and Python refuses them
    text = ascii(value)
    return text if len(text) <= longest else text[: longest - 4] + "..."


def shown_path(path: object) -> str:
    """Print a path on one line; long ones are shortened too, but not soon."""
    return shown(str(path), longest=250)


def checked_count(name: str, value: object, smallest: int = 0, largest: int = LARGEST_COUNT) -> int:
    """Return a whole number, refusing anything that only looks like one.

    Raises:
        ConfigError: no whole number (True, "8", 8.0, NaN, None), or out of range.
    """
    limit = "2**40" if largest == LARGEST_COUNT else str(largest)
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not smallest <= number <= largest:
        raise ConfigError(f"{name}={shown(value)} must be a whole number from {smallest} to {limit}")
    return number


def checked_fraction(name: str, value: object) -> float:
    """Return a number from 0 up to, not including, 1.

    Raises:
        ConfigError: no number, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"{name}={shown(value)} must be a number from 0 to below 1")
    return float(value)


def checked_flag(name: str, value: object) -> bool:
    """Return a truth value.

    Raises:
        ConfigError: anything but true or false.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)} must be true or false")
    return value


def checked_text(name: str, value: object) -> str:
    """Return a short text.

    Raises:
        ConfigError: no text, or a long one.
    """
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise ConfigError(f"{name}={shown(value)} must be a text of at most {LONGEST_TEXT} characters")
    return value


def shortest_period(items: Sequence[Item]) -> tuple[Item, ...]:
    """Cut a sequence to the shortest start that gives it when repeated and cut off.

    >>> shortest_period((4, 4, 0, 4, 4, 0, 4))
    (4, 4, 0)
    """
    if not items:
        return ()
    # Prefix function of Knuth, Morris and Pratt: the length less the longest border is the shortest period.
    borders = [0] * len(items)
    for index in range(1, len(items)):
        border = borders[index - 1]
        while border and items[index] != items[border]:
            border = borders[border - 1]
        borders[index] = border + (items[index] == items[border])
    return tuple(items[: len(items) - borders[-1]])


def _layer_counts(name: str, value: object) -> tuple[int, ...]:
    return tuple(checked_count(f"{name}[{index}]", item) for index, item in enumerate(_layer_items(name, value)))


def _layer_flags(name: str, value: object) -> tuple[bool, ...]:
    return tuple(checked_flag(f"{name}[{index}]", item) for index, item in enumerate(_layer_items(name, value)))


def _layer_items(name: str, value: object) -> Sequence[object]:
    if not isinstance(value, tuple | list) or len(value) > LARGEST_NUM_LAYERS:
        raise ConfigError(f"{name}={shown(value)} must be a list with one value per layer, or a part that repeats")
    return value


def _choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name}={shown(value)} is not known; choose one of {', '.join(choices)}")
    return value


def _count_field(name: str, value: object) -> int:
    largest = LARGEST_NUM_LAYERS if name in ("num_layers", "num_encoder_layers") else LARGEST_COUNT
    return checked_count(name, value, smallest=1 if name in _AT_LEAST_ONE else 0, largest=largest)


_CHECKS: dict[str, Any] = {
    "int": _count_field,
    "float": checked_fraction,
    "bool": checked_flag,
    "str": checked_text,
    "tuple[int, ...]": _layer_counts,
    "tuple[bool, ...]": _layer_flags,
}


def _resolve_defaults(values: dict[str, Any]) -> None:
    hidden_size, num_heads = values["hidden_size"], values["num_heads"]
    values["num_kv_heads"] = values["num_kv_heads"] or num_heads
    if not values["head_dim"]:
        if hidden_size % num_heads:
            near = min(divisors(hidden_size), key=lambda count: abs(count - num_heads))
            raise ConfigError(
                f"hidden_size={hidden_size} is not divisible by num_heads={num_heads}; "
                f"try num_heads={near}, or give head_dim"
            )
        values["head_dim"] = hidden_size // num_heads
    values["v_head_dim"] = values["v_head_dim"] or values["head_dim"]
    values["intermediate_size"] = values["intermediate_size"] or 4 * hidden_size
    values["embedding_size"] = values["embedding_size"] or hidden_size
    if values["stack"] == "encoder-decoder":
        values["num_encoder_layers"] = values["num_encoder_layers"] or values["num_layers"]
    if values["num_experts"]:
        values["moe_intermediate_size"] = values["moe_intermediate_size"] or values["intermediate_size"]
    for name, plain in (("attention_windows", (0,)), ("moe_layers", (True,)), ("rotary_layers", (True,))):
        pattern = values[name][: values["num_layers"]]
        period = shortest_period(pattern)
        # A pattern shorter than the stack repeats as a whole: (4, 0, 4) goes on with 4, (4, 0) would not.
        if len(pattern) == values["num_layers"] or not pattern or len(pattern) % len(period) == 0:
            pattern = period
        values[name] = () if pattern == plain else pattern


def _check_together(values: dict[str, Any]) -> None:
    num_heads, num_kv_heads = values["num_heads"], values["num_kv_heads"]
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}; "
            f"try num_kv_heads={math.gcd(num_heads, num_kv_heads)}"
        )
    if values["stack"] != "encoder-decoder" and values["num_encoder_layers"]:
        raise ConfigError(
            f"num_encoder_layers={values['num_encoder_layers']} has no meaning for stack={values['stack']!r}; "
            f"leave it out or set stack='encoder-decoder'"
        )
    if values["rotary_layers"] and values["position_embedding"] != "rotary":
        raise ConfigError(
            f"rotary_layers={shown(values['rotary_layers'])} needs position_embedding='rotary'; leave it out"
        )
    _check_mla(values)
    _check_experts(values)


def _check_mla(values: dict[str, Any]) -> None:
    if not values["kv_lora_rank"]:
        for name in ("q_lora_rank", "qk_rope_head_dim"):
            if values[name]:
                raise ConfigError(
                    f"{name}={values[name]} belongs to MLA and needs kv_lora_rank; set it or leave {name} out"
                )
        return
    if values["qk_rope_head_dim"] >= values["head_dim"]:
        raise ConfigError(
            f"qk_rope_head_dim={values['qk_rope_head_dim']} must be below head_dim={values['head_dim']}, the whole "
            f"width of a query head; head_dim is qk_nope_head_dim + qk_rope_head_dim"
        )
    if values["num_kv_heads"] != values["num_heads"]:
        raise ConfigError(
            f"num_kv_heads={values['num_kv_heads']} must equal num_heads={values['num_heads']} with kv_lora_rank "
            f"(MLA keeps no key-value heads); leave num_kv_heads out"
        )


def _check_experts(values: dict[str, Any]) -> None:
    num_experts, per_token = values["num_experts"], values["num_experts_per_token"]
    if not num_experts:
        for name in ("num_experts_per_token", "moe_intermediate_size", "shared_expert_intermediate_size", "moe_layers"):
            if values[name]:
                raise ConfigError(f"{name}={shown(values[name])} needs num_experts above 0; set it or leave {name} out")
        return
    if not 1 <= per_token <= num_experts:
        raise ConfigError(f"num_experts_per_token={per_token} must be from 1 to num_experts={num_experts}")
    if values["moe_layers"] and not any(values["moe_layers"]):
        raise ConfigError(f"num_experts={num_experts} but moe_layers names no layer; set num_experts=0 or name a layer")
    if values["shared_expert_gate"] and not values["shared_expert_intermediate_size"]:
        raise ConfigError("shared_expert_gate=True needs shared_expert_intermediate_size; set it or leave the gate out")
