"""Family: the config.json keys, defaults and fixed fields of one or more model types."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, with_fields
from shapewright.models.families.config_values import ConfigValues

KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

Fields = dict[str, Any]
FieldKeys = Mapping[str, tuple[str, ...]]

ATTENTION_BIAS: FieldKeys = {"qkv_bias": ("attention_bias",), "attention_out_bias": ("attention_bias",)}
HEAD_DIM: FieldKeys = {"head_dim": ("head_dim",)}
RMSNORM_GATED = {"norm": "rmsnorm", "gated_mlp": True, "position_embedding": "rotary"}
LAYERNORM_GATED = {"norm": "layernorm", "norm_bias": True, "gated_mlp": True, "position_embedding": "rotary"}
LAYERNORM_GATED_WITHOUT_BIAS = {**LAYERNORM_GATED, "norm_bias": False}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One or more model types that are read in the same way.

    Attributes:
        model_types: Values of ``model_type``, including those of the text parts of multimodal models.
        defaults: Default by Hugging Face key, as in transformers.
        keys: Alternative Hugging Face keys by field of TransformerConfig, the usual one first.
        fixed: Values of fields that all models of the family share.
        derive: Computes fields that no single key holds; its results override those of keys and fixed.
        notes: Returns remarks for users, such as parts of the model that are omitted.
        unread: Keys that change the model in a way that is not read, with the one value that is accepted.
    """

    model_types: tuple[str, ...]
    defaults: Mapping[str, object] = field(default_factory=dict)
    keys: FieldKeys = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    derive: Callable[[ConfigValues], Fields] | None = None
    notes: Callable[[ConfigValues], list[str]] | None = None
    unread: Mapping[str, object] = field(default_factory=dict)


def refuse_unread(part: Mapping[str, object], unread: Mapping[str, object], model_type: str) -> None:
    """Check that keys that are not read have the value that is assumed.

    Raises:
        ConfigError: one has another value, which would be another model.
    """
    for key, value in unread.items():
        if part.get(key, value) != value:
            raise ConfigError(
                f"{key}={short_repr(part[key])} of model_type {short_repr(model_type)} changes its layers in a way "
                f"that is not read; only {key}={short_repr(value)} is"
            )


def windows_from_layer_types(values: ConfigValues, default: list[str] | None) -> Fields:
    """Convert ``layer_types`` to attention windows.

    Args:
        default: Layer types if the config has none; None or empty for full attention in all layers.

    Raises:
        ConfigError: an unknown layer type, or not one type per layer.
    """
    layer_types = values.list_of("layer_types")
    names = layer_types if layer_types is not None else default
    if not names:
        return {}
    num_layers = values.num_layers("num_hidden_layers")
    if layer_types is not None and len(names) != num_layers:
        raise ConfigError(
            with_fields("{layer_types} has {number} entries", number=len(names))
            + f" but num_hidden_layers={num_layers}; give one per layer"
        )
    sizes = {"full_attention": 0}
    kind = "sliding"
    if "sliding_attention" in names:
        # without a window, transformers masks nothing in sliding layers
        sizes["sliding_attention"] = values.optional_count("sliding_window")
    if "chunked_attention" in names:
        sizes["chunked_attention"] = values.optional_count("attention_chunk_size")
        kind = "chunked"
    require_known_types("layer_types", names, sizes, KNOWN_LAYER_TYPES)
    return {"attention_windows": tuple(sizes[str(name)] for name in names), "attention_window_kind": kind}


def require_known_types(key: str, names: Sequence[Any], known: Container[str], shown: Iterable[str]) -> None:
    """Refuse a list of layer types with an entry, null included, that is not known.

    Raises:
        ConfigError: there is one.
    """
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ConfigError(
                with_fields("{key} has {name}", key=FieldName(key), name=short_repr(name)),
                advice=f"known are {', '.join(shown)}",
            )


def sliding_from(values: ConfigValues, first: int) -> list[str]:
    """Return layer types with a sliding window in the layers from ``first`` on, and full attention before."""
    num_layers = values.num_layers("num_hidden_layers")
    return ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]


def full_attention_every(values: ConfigValues, period: int) -> list[str]:
    """Return layer types with full attention in the last layer of every ``period``, and a sliding window in others."""
    num_layers = values.num_layers("num_hidden_layers")
    return ["full_attention" if index % period == period - 1 else "sliding_attention" for index in range(num_layers)]


def rotary_layer_flags(values: ConfigValues) -> list[bool]:
    """Return whether each layer has rotary positions: 1 in ``no_rope_layers``, or else all layers but every nth."""
    listed = values.list_of("no_rope_layers")
    if listed:
        return [bool(each) for each in listed]
    interval = values.count("no_rope_layer_interval")
    return [(index + 1) % interval != 0 for index in range(values.num_layers("num_hidden_layers"))]


def window_on_every_layer(values: ConfigValues) -> Fields:
    """Read a sliding window that applies to all layers; no key means no window."""
    return {"attention_windows": (values.optional_count("sliding_window"),)}


def note_left_out_mtp(num_layers: int) -> list[str]:
    """Note layers of multi-token prediction, which a config names and transformers does not build."""
    if not num_layers:
        return []
    left_out = f"{num_layers} multi-token-prediction layer(s) omitted, as in transformers"
    return [f"{left_out}; " + with_fields("{num_mtp_layers} adds them to training")]
