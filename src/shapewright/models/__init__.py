"""Models: hyperparameters, readers and writers of config.json, presets, and parameter counts."""

from __future__ import annotations

from shapewright.models.layers import LayerGroup
from shapewright.models.parameters import LayerParameters, ParameterCounts, count_layer_parameters, count_parameters
from shapewright.models.read import Model, ModelLike, Preset, list_presets, load_preset, read_model, read_object
from shapewright.models.transformer import TransformerConfig, with_changes
from shapewright.models.write import locate_fields, to_config_json, untimed_values, without_position_scaling

__all__ = [
    "LayerGroup",
    "LayerParameters",
    "Model",
    "ModelLike",
    "ParameterCounts",
    "Preset",
    "TransformerConfig",
    "count_layer_parameters",
    "count_parameters",
    "list_presets",
    "load_preset",
    "locate_fields",
    "read_model",
    "read_object",
    "to_config_json",
    "untimed_values",
    "with_changes",
    "without_position_scaling",
]
