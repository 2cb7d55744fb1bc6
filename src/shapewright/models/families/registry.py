"""FAMILIES: how the config.json of each model type is read."""

from __future__ import annotations

from shapewright.models.families import (
    deepseek,
    encoders,
    gpt,
    hybrids,
    images,
    llama,
    moe,
    moe_shared,
    rotary_layernorm,
    state_spaces,
    vision_language,
)
from shapewright.models.families.family import Family

_MODULES = (
    gpt, llama, rotary_layernorm, moe, moe_shared, deepseek, encoders, hybrids,
    state_spaces, images, vision_language,
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    model_type: family for module in _MODULES for family in module.FAMILIES for model_type in family.model_types
}
