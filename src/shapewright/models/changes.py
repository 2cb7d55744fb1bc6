"""Change fields of a TransformerConfig; fields derived from them follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from shapewright.core.errors import ConfigError, close_names, short_repr
from shapewright.models.transformer import TransformerConfig
from shapewright.models.validate import MAX_NUM_LAYERS

FIELD_NAMES = tuple(spec.name for spec in fields(TransformerConfig))


def with_changes(config: TransformerConfig, changes: Mapping[str, Any]) -> TransformerConfig:
    """Return a copy of the config with some fields changed.

    A derived field follows the changes if it has its default value: ``head_dim`` = hidden_size // num_heads,
    ``v_head_dim`` = head_dim, ``num_kv_heads`` = num_heads, ``intermediate_size`` = 4 * hidden_size, ``embedding_size``
    = hidden_size, ``moe_intermediate_size`` = intermediate_size (and vice versa if no layer has a dense MLP). Periodic
    patterns over layers are kept. Other patterns, such as "the first layers are dense", are truncated, or extended with
    their last value.

    Args:
        config: The config to change.
        changes: New values by field name.

    Raises:
        ConfigError: an unknown field, or values that contradict each other.

    >>> config = TransformerConfig(hidden_size=2560, num_layers=32, num_heads=32, vocab_size=50257)
    >>> with_changes(config, {"num_heads": 20}).head_dim
    128
    """
    check_field_names(changes)
    values = {name: getattr(config, name) for name in FIELD_NAMES}
    is_derived = {
        "head_dim": not config.is_mla and config.head_dim * config.num_heads == config.hidden_size,
        "v_head_dim": not config.is_mla and config.v_head_dim == config.head_dim,
        "num_kv_heads": config.num_kv_heads == config.num_heads,
        "intermediate_size": config.intermediate_size == 4 * config.hidden_size,
        "embedding_size": config.embedding_size == config.hidden_size,
        "moe_intermediate_size": config.is_moe and config.moe_intermediate_size == config.intermediate_size,
    }
    for name, derived in is_derived.items():
        if derived:
            values[name] = 0
    values.update(changes)
    if is_derived["moe_intermediate_size"] and all(group.is_moe for group in config.layer_groups()):
        # These configs have one width under both names; two values could not be written to a config.json.
        widths = [changes[name] for name in ("intermediate_size", "moe_intermediate_size") if name in changes]
        if len(widths) == 1:
            values["intermediate_size"] = values["moe_intermediate_size"] = widths[0]
    num_layers = values["num_layers"]
    if isinstance(num_layers, int):
        for name in ("attention_windows", "moe_layers", "rotary_layers"):
            if name not in changes:
                values[name] = _resize_pattern(values[name], config.num_layers, num_layers)
    return TransformerConfig(**values)


def check_field_names(changes: Mapping[str, Any]) -> None:
    """Check that all names are fields of TransformerConfig.

    Raises:
        ConfigError: an unknown field; the message suggests similar names.
    """
    for name in changes:
        if name not in FIELD_NAMES:
            hint = close_names(str(name), FIELD_NAMES) or "see the fields of TransformerConfig"
            raise ConfigError(f"{short_repr(name)} is not a field of a model; {hint}")


def _resize_pattern(pattern: Sequence[Any], old_num_layers: int, new_num_layers: int) -> tuple[Any, ...]:
    is_repeating = len(pattern) < old_num_layers
    if is_repeating or not pattern or not 0 < new_num_layers <= MAX_NUM_LAYERS:
        return tuple(pattern)
    return (*pattern[:new_num_layers], *[pattern[-1]] * (new_num_layers - len(pattern)))
