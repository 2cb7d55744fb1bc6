"""Family: how one kind of model spells its shape in config.json, and what its architecture fixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shapewright.config.hf_values import HfValues
from shapewright.config.validate import shown
from shapewright.errors import ConfigError

KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

Fields = dict[str, Any]
Spellings = Mapping[str, tuple[str, ...]]

ATTENTION_BIAS: Spellings = {"qkv_bias": ("attention_bias",), "attention_out_bias": ("attention_bias",)}
HEAD_DIM: Spellings = {"head_dim": ("head_dim",)}
RMSNORM_GATED = {"norm": "rmsnorm", "gated_mlp": True, "position_embedding": "rotary"}
LAYERNORM_GATED = {"norm": "layernorm", "norm_bias": True, "gated_mlp": True, "position_embedding": "rotary"}
LAYERNORM_GATED_WITHOUT_BIAS = {**LAYERNORM_GATED, "norm_bias": False}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One or more model types that share a reader.

    Attributes:
        model_types: The values of ``model_type`` that it reads; also ``*_text`` parts of multimodal models.
        defaults: What transformers assumes for absent keys, by Hugging Face key.
        spellings: By field of TransformerConfig: the Hugging Face keys that hold it as it is, the usual one first.
        facts: Fields that the architecture fixes.
        derive: Reads the fields that no single key holds; its result wins over the others.
        remark: Says what of a config is left out or taken otherwise than a reader might expect.
    """

    model_types: tuple[str, ...]
    defaults: Mapping[str, object] = field(default_factory=dict)
    spellings: Spellings = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    derive: Callable[[HfValues], Fields] | None = None
    remark: Callable[[HfValues], list[str]] | None = None


def windows_from_layer_types(values: HfValues, default: list[str] | None) -> Fields:
    """Turn ``layer_types`` into windows, given the pattern that the family assumes where it is absent.

    Raises:
        ConfigError: a layer type that no lowering knows, or a window that is missing.
    """
    layer_types = values.list_of("layer_types")
    names = layer_types if layer_types is not None else default
    if not names:
        return {}
    num_layers = values.num_layers("num_hidden_layers")
    if layer_types is not None and len(names) != num_layers:
        raise ConfigError(
            f"layer_types has {len(names)} entries but num_hidden_layers={num_layers}; give one per layer"
        )
    sizes = {"full_attention": 0}
    kind = "sliding"
    if "sliding_attention" in names:
        # transformers masks nothing where layers slide but no window is given
        sizes["sliding_attention"] = values.optional_count("sliding_window")
    if "chunked_attention" in names:
        sizes["chunked_attention"] = values.optional_count("attention_chunk_size")
        kind = "chunked"
    unknown = next((name for name in names if not isinstance(name, str) or name not in sizes), None)
    if unknown is not None:
        raise ConfigError(f"layer_types has {shown(unknown)}; known are {', '.join(KNOWN_LAYER_TYPES)}")
    return {"attention_windows": tuple(sizes[str(name)] for name in names), "attention_window_kind": kind}


def every_nth_is_full(values: HfValues, period: int) -> list[str]:
    """Layer types of a model whose layers slide but for the last of every ``period``."""
    num_layers = values.num_layers("num_hidden_layers")
    return ["full_attention" if index % period == period - 1 else "sliding_attention" for index in range(num_layers)]


def layers_with_rotary(values: HfValues) -> list[bool]:
    """Which layers turn queries and keys: those that ``no_rope_layers`` has as 1, else all but every nth."""
    listed = values.list_of("no_rope_layers")
    if listed:
        return [bool(each) for each in listed]
    interval = values.count("no_rope_layer_interval")
    return [(index + 1) % interval != 0 for index in range(values.num_layers("num_hidden_layers"))]


def window_on_every_layer(values: HfValues) -> Fields:
    """Read a sliding window that holds for all layers, if there is one."""
    return {"attention_windows": (values.optional_count("sliding_window"),)}
