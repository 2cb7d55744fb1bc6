"""Models: their shape, where it is read from, and how many parameters it has."""

from __future__ import annotations

from shapewright.config.changes import with_changes
from shapewright.config.parameters import LayerParameters, ParameterCounts, count_layer_parameters, count_parameters
from shapewright.config.preset import Preset, list_presets, load_preset
from shapewright.config.read import Model, read_model, read_object
from shapewright.config.transformer import LayerGroup, TransformerConfig
from shapewright.config.write import write_back

__all__ = [
    "LayerGroup",
    "LayerParameters",
    "Model",
    "ParameterCounts",
    "Preset",
    "TransformerConfig",
    "count_layer_parameters",
    "count_parameters",
    "list_presets",
    "load_preset",
    "read_model",
    "read_object",
    "with_changes",
    "write_back",
]
