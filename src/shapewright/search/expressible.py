"""Which fields the form of a config can hold: a search offers nothing that nobody could write down."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shapewright.config import list_presets, read_model, write_back
from shapewright.errors import ConfigError
from shapewright.search.request import DEFAULT_VARIED, DEFAULT_VARIED_WITH_STAGES, ffn_field

if TYPE_CHECKING:
    from shapewright.config import Model, TransformerConfig
    from shapewright.search.request import SearchRequest

_STEP = 64


def keep_expressible(model: Model, request: SearchRequest) -> tuple[SearchRequest, tuple[str, ...]]:
    """Leave out fields that the model's form cannot hold, with a note for each; those asked for by name are an error.

    Raises:
        ConfigError: a field that was asked for cannot be varied.
    """
    kept, notes = [], []
    for name in request.vary:
        reason = _why_not(model, name)
        if not reason:
            kept.append(name)
        elif request.vary in (DEFAULT_VARIED, DEFAULT_VARIED_WITH_STAGES):
            notes.append(f"{name} stays as it is: {reason}")
        else:
            raise ConfigError(f"--vary {name} is not possible: {reason}; leave it out")
    return replace(request, vary=tuple(kept)), tuple(notes)


def _why_not(model: Model, name: str) -> str:
    """Why a field cannot be varied, or an empty string."""
    config = model.config
    if config.is_mla and name in ("heads", "head_dim", "kv_heads"):
        return "the heads of multi-head latent attention share one latent"
    is_plain = config.num_kv_heads == config.num_heads and model.raw is not None
    if name == "kv_heads" and is_plain and config.model_type not in types_with_grouped_heads():
        return f"no public model of model_type {config.model_type!r} has fewer key-value heads than heads"
    if name == "depth":
        lists = {name: getattr(config, name) for name in ("moe_layers", "attention_windows", "rotary_layers")}
        if config.stack == "encoder-decoder":
            return "an encoder-decoder has two depths"
        for field_name, pattern in lists.items():
            if len(pattern) >= config.num_layers > 1:
                return f"{field_name} names every layer"
    changes = _example(config, name)
    if not changes or model.raw is None:
        return ""
    try:
        write_back(model, replace(config, **changes))
    except ConfigError:
        return f"a config.json of model_type {config.model_type!r} cannot say it"
    return ""


@lru_cache(maxsize=1)
def types_with_grouped_heads() -> frozenset[str]:
    """Model types of the presets that share key-value heads; code for other types may know nothing of it."""
    configs = (read_model(name).config for name in list_presets())
    return frozenset(config.model_type for config in configs if config.num_kv_heads < config.num_heads)


def _example(config: TransformerConfig, name: str) -> dict[str, Any]:
    """One change of a field, small enough to be sound."""
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    followers = {"v_head_dim": 2 * head_dim} if config.v_head_dim == head_dim else {}
    if name == "heads" and not heads % 2 and not kv_heads % 2:
        return {"num_heads": heads // 2, "num_kv_heads": kv_heads // 2, "head_dim": 2 * head_dim, **followers}
    if name == "kv_heads":
        return {"num_kv_heads": 1 if kv_heads > 1 else heads}
    if name == "head_dim":
        return {"head_dim": 2 * head_dim, **followers}
    if name == "ffn":
        field_name = ffn_field(config)
        width = getattr(config, field_name) + _STEP
        is_same = config.is_moe and config.moe_intermediate_size == config.intermediate_size
        return {field_name: width, **({"intermediate_size": width} if is_same else {})}
    if name == "experts" and config.is_moe:
        return {"num_experts": 2 * config.num_experts}
    if name == "vocab":
        return {"vocab_size": config.vocab_size + _STEP}
    return {}
