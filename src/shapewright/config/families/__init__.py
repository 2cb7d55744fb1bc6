"""Readers of config.json, one table per family of models."""

from __future__ import annotations

from shapewright.config.families import (
    deepseek,
    encoders,
    experts,
    gpt,
    llama,
    near_llama,
    rotary_layernorm,
    shared_experts,
)
from shapewright.config.families.family import Family

FAMILIES: dict[str, Family] = {
    model_type: family
    for module in (gpt, llama, near_llama, rotary_layernorm, experts, shared_experts, deepseek, encoders)
    for family in module.FAMILIES
    for model_type in family.model_types
}

__all__ = ["FAMILIES", "Family"]
