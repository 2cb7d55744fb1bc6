"""Convert a Hugging Face config.json object to a TransformerConfig.

Also recognize checkpoints in fp8 with one scale per block of a weight, which run different expert kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from shapewright.core.errors import ConfigError, plain_text, short_repr
from shapewright.core.notes import Note
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.fallback import unknown_family
from shapewright.models.families.family import Family, FieldKeys, Fields, refuse_unread
from shapewright.models.families.registry import FAMILIES
from shapewright.models.families.vision_language import ENCODER_PAIRS, TOWERS, TowerValues, find_tower, tower_part
from shapewright.models.transformer import TransformerConfig
from shapewright.models.validate import MAX_TEXT_LENGTH

# Keys used by most families; a family overrides those it names differently.
COMMON_KEYS: FieldKeys = {
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "vocab_size": ("vocab_size",),
    "num_kv_heads": ("num_key_value_heads",),
    "intermediate_size": ("intermediate_size",),
    "max_position_embeddings": ("max_position_embeddings",),
    "activation": ("hidden_act",),
    "attention_dropout": ("attention_dropout",),
    "tied_embeddings": ("tie_word_embeddings",),
}

PARTS_LEFT_OUT = "parts-left-out"
"""Code of notes on parts of a config that are not modelled without ``images``."""
NESTED = ("patches", "vision")
"""Fields that hold objects."""

# Models described by flags are written in this form, with every field under its own name.
NATIVE_MODEL_TYPE = "shapewright"
NATIVE_FAMILY = Family(
    model_types=(NATIVE_MODEL_TYPE,),
    keys={spec.name: (spec.name,) for spec in fields(TransformerConfig) if spec.name not in ("model_type", *NESTED)},
)

# Keys under which multimodal configs hold their language model.
_TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config", "language_model", "text_model")
_MAX_TEXT_NESTING = 4
_VISION_PART = "vision_config"
# Keys of the other parts of older multimodal configs, such as Qwen2-VL's, that hold the language model at the top.
_OTHER_PARTS = ("vision_config", "audio_config", "visual", "vision_tower_config")

# Sizes for which a note says that a default was assumed.
_NOTED_SIZES = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")

_FIELD_KINDS = {spec.name: str(spec.type) for spec in fields(TransformerConfig)}
REQUIRED_FIELDS = ("hidden_size", "num_layers", "num_heads", "vocab_size")
"""Fields without which there is no model."""


@dataclass(frozen=True)
class HfReading:
    """Result of reading a config.json object.

    Attributes:
        config: The model.
        family: The family whose keys were used.
        text_path: Keys that lead from the object to its language model, for multimodal models.
        notes: Remarks for users: parts not modelled, values assumed.
        has_block_scales: Whether its weights are published in fp8 with one scale per block.
    """

    config: TransformerConfig
    family: Family
    text_path: tuple[str, ...]
    notes: tuple[str, ...]
    has_block_scales: bool = False


def read_hf_config(values: Mapping[str, object], name: str = "") -> HfReading:
    """Read a config.json object.

    Raises:
        ConfigError: a value is invalid, or a size is missing.
    """
    text_path, part, model_type = _find_text_part(values)
    notes: list[str] = []
    if text_path:
        kind = "image" if text_path == (_VISION_PART,) else "text"
        notes.append(Note(f"only the {kind} part ({'.'.join(text_path)}) is modelled", PARTS_LEFT_OUT))
    elif any(isinstance(values.get(key), Mapping) for key in _OTHER_PARTS):
        text = "only the language model is modelled, without the other parts of the config"
        notes.append(Note(text, PARTS_LEFT_OUT))
    if notes and values.get("model_type") in tuple(TOWERS):
        notes.append(Note(with_fields("{images} adds the vision tower (vision_config)"), PARTS_LEFT_OUT, "images"))
    if model_type == NATIVE_MODEL_TYPE:
        family = NATIVE_FAMILY
    elif model_type in FAMILIES:
        family = FAMILIES[model_type]
    else:
        family, assumptions = unknown_family(model_type, part)
        problem = f"model_type {short_repr(model_type)} is not known" if model_type else "no model_type is given"
        notes.append(f"{problem}: read by field names, assuming {assumptions}")
    refuse_unread(part, family.unread, model_type)
    hf_values = ConfigValues(part, family.defaults, model_type or "an unknown model")
    read = {**family.fixed, **_read_spelled(hf_values, family)}
    if family.derive is not None:
        read.update(family.derive(hf_values))
    for field in REQUIRED_FIELDS:
        if not read.setdefault(field, 0) and not (field == "vocab_size" and "patches" in read):
            try:
                read[field] = hf_values.count(*hf_keys_of(family)[field])
            except ConfigError as error:
                if family in (NATIVE_FAMILY, *FAMILIES.values()):
                    raise
                advice = "give an integer, or trace the model ('shapewright predict --trace')"
                raise ConfigError(error.fact, advice=advice) from None
    if family.notes is not None:
        notes += family.notes(hf_values)
    notes += _notes_on_defaults(hf_values, family)
    if model_type != NATIVE_MODEL_TYPE:
        read["model_type"] = model_type
    if name:
        read["name"] = plain_text(name)[:MAX_TEXT_LENGTH]
    in_blocks = any(has_block_scales(each, model_type) for each in (values, part))
    return HfReading(TransformerConfig(**read), family, text_path, tuple(notes), in_blocks)


def read_vision_tower(values: Mapping[str, object], width: int) -> TransformerConfig:
    """Read the vision tower of a vision-language model, with its projector to the language model.

    Args:
        values: The config.json object of the whole model.
        width: Hidden size of the language model.

    Raises:
        ConfigError: the model has no tower that is read, or a value is invalid.
    """
    model_type = _model_type(values, "")
    tower = find_tower(model_type)
    part = tower_part(values)
    own = _model_type(part, "")
    own_type = own if own in FAMILIES and own != model_type else tower.model_type
    given = {**tower.defaults, **part, "model_type": own_type}
    config = read_hf_config(given, name=_VISION_PART).config
    patches = config.patches
    if patches is None:
        raise ConfigError(f"{_VISION_PART} of model_type {short_repr(own_type)} is not an image encoder")
    outer, inner = ConfigValues(values, {}, model_type), ConfigValues(given, {}, own_type)
    projector = tower.project(TowerValues(outer, inner, patches, width))
    return replace(config, patches=replace(patches, projector=projector, num_classes=0))


def hf_keys_of(family: Family) -> FieldKeys:
    """Return the Hugging Face keys of each field of TransformerConfig for a family."""
    return family.keys if family is NATIVE_FAMILY else {**COMMON_KEYS, **family.keys}


def _find_text_part(values: Mapping[str, object]) -> tuple[tuple[str, ...], Mapping[str, object], str]:
    """Find the language model in a multimodal config; return its path, object and model type."""
    path: tuple[str, ...] = ()
    model_type = _model_type(values, _model_type({"model_type": values.get("_class_name")}, ""))
    if model_type in ENCODER_PAIRS and isinstance(values.get(_VISION_PART), Mapping):
        encoder = tower_part(values)
        return (_VISION_PART,), encoder, _model_type(encoder, f"{model_type}_vision_model")
    for _ in range(_MAX_TEXT_NESTING):
        inner = next((key for key in _TEXT_PARTS if isinstance(values.get(key), Mapping) and values[key]), None)
        if inner is None:
            break
        part = values[inner]
        assert isinstance(part, Mapping)
        inherited = {key: values[key] for key in ("tie_word_embeddings",) if values.get(key) is not None}
        values = {**inherited, **part}
        # A part without model_type has the type implied by that of its parent.
        model_type = _model_type(values, f"{model_type}_text" if f"{model_type}_text" in FAMILIES else model_type)
        path = (*path, inner)
    return path, values, model_type


def _model_type(values: Mapping[str, object], otherwise: str) -> str:
    model_type = values.get("model_type")
    if model_type is None:
        return otherwise
    if not isinstance(model_type, str) or len(model_type) > 100 or not model_type.isprintable():
        raise ConfigError(f"model_type={short_repr(model_type)} must be a text such as 'llama'", field="model_type")
    return model_type


def _read_spelled(values: ConfigValues, family: Family) -> Fields:
    read: dict[str, Any] = {}
    for field, keys in hf_keys_of(family).items():
        value = values.raw(*keys)
        if value is None:
            continue  # absent or null: the family's fixed value, or the default of the field
        kind = _FIELD_KINDS[field]
        if kind == "int":
            read[field] = values.count(*keys) if field in REQUIRED_FIELDS else values.optional_count(*keys)
        elif kind == "bool":
            read[field] = values.flag(*keys)
        elif kind == "float":
            read[field] = values.probability(*keys)
        elif kind == "str":
            read[field] = values.text(*keys)
        else:
            read[field] = value  # a tuple over layers in the native form; checked by TransformerConfig
    return read


def _notes_on_defaults(values: ConfigValues, family: Family) -> list[str]:
    sizes = {key for field in _NOTED_SIZES for key in hf_keys_of(family).get(field, ())}
    assumed = [f"{key}={short_repr(value)}" for key, value in values.assumed.items() if key in sizes]
    if not assumed:
        return []
    return [f"not given, set to the transformers defaults of {values.model_type}: {', '.join(assumed)}"]


# Parts of module names by which compressed-tensors configs select MLPs, experts included.
_MLP_WORDS = ("expert", "mlp", "ffn", "feed_forward", "block_sparse_moe")


def has_block_scales(values: Mapping[str, object], model_type: str) -> bool:
    """Return whether the weights of experts are quantised to fp8 with one scale per block.

    Two forms are recognized: FineGrainedFP8Config of transformers (``quant_method`` fp8 with ``weight_block_size``),
    and compressed-tensors groups with the strategy ``block``, as written by the scheme FP8_BLOCK of llm-compressor. The
    result is False if groups have different formats or experts are excluded.

    Args:
        values: The config.json object, or the part of its language model.

    Raises:
        ConfigError: the quantization config is malformed.

    Source: transformers 5.23, utils/quantization_config.py; compressed-tensors, quant_config.py and quant_scheme.py
        (FP8_BLOCK); vllm, compressed_tensors_moe.py (both forms run the same expert kernels).

    >>> has_block_scales({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "qwen3_moe")
    True
    """
    name = model_type or "an unknown model"
    quantization = ConfigValues(values, {}, name).nested("quantization_config", {})
    if quantization.raw("quant_method") == "fp8":
        return bool(quantization.list_of("weight_block_size"))
    if quantization.raw("quant_method") != "compressed-tensors":
        return False
    groups = quantization.raw("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise ConfigError(f"config_groups={short_repr(groups)} must be an object", field="config_groups")
    read = [ConfigValues(groups, {}, name).nested(group, {}) for group in groups]
    ignored = quantization.list_of("ignore") or []
    return (
        bool(read)
        and all(_is_block_fp8(group) for group in read)
        and any(_includes_experts(group.list_of("targets")) for group in read)
        and not any(_names_experts(entry) for entry in ignored)
    )


def _is_block_fp8(group: ConfigValues) -> bool:
    """Return whether a group has fp8 weights with one scale per block, and fp8 activations."""
    weights, inputs = group.nested("weights", {}), group.nested("input_activations", {})
    is_fp8 = all(each.raw("type") == "float" and each.raw("num_bits") == 8 for each in (weights, inputs))
    return is_fp8 and weights.raw("strategy") == "block"


def _includes_experts(targets: list[object] | None) -> bool:
    """Return whether a group targets all linear layers or MLPs; patterns are compared as plain text."""
    return targets is None or any(
        target == "Linear" or (isinstance(target, str) and any(word in target for word in _MLP_WORDS))
        for target in targets
    )


def _names_experts(entry: object) -> bool:
    """Return whether a module name or pattern selects routed experts, as opposed to shared experts."""
    return isinstance(entry, str) and "experts" in entry.replace("shared_experts", "")
