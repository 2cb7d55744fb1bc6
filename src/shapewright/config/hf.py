"""From a Hugging Face config.json object to a TransformerConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shapewright.config.block_scales import has_block_scales
from shapewright.config.families import FAMILIES
from shapewright.config.families.family import Family, Fields, Spellings
from shapewright.config.families.unknown import unknown_family
from shapewright.config.hf_values import HfValues
from shapewright.config.transformer import TransformerConfig
from shapewright.config.validate import shown
from shapewright.errors import ConfigError

# The spellings of most families; a family's own come first.
COMMON_SPELLINGS: Spellings = {
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

# Our own form, for models that were described by flags: every field under its own name.
NATIVE_MODEL_TYPE = "shapewright"
NATIVE_FAMILY = Family(
    model_types=(NATIVE_MODEL_TYPE,),
    spellings={spec.name: (spec.name,) for spec in fields(TransformerConfig) if spec.name != "model_type"},
)

# Where multimodal configs keep their language model.
_TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config", "language_model", "text_model")
_DEEPEST_TEXT_PART = 4
# What stands beside the language model's own sizes in older multimodal configs, such as Qwen2-VL's.
_OTHER_PARTS = ("vision_config", "audio_config", "visual", "vision_tower_config")

# Sizes that the reader is told about when they were not given.
_NOTED_SIZES = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")

_FIELD_KINDS = {spec.name: str(spec.type) for spec in fields(TransformerConfig)}
_REQUIRED = ("hidden_size", "num_layers", "num_heads", "vocab_size")


@dataclass(frozen=True)
class HfReading:
    """What was read from a config.json object.

    Attributes:
        config: The model.
        family: The table that it was read by.
        text_path: Keys that lead from the object to the part that was read, for multimodal models.
        notes: What the reader should know: parts left out, values assumed.
        has_block_scales: Whether its weights are published in fp8 with a scale for each block.
    """

    config: TransformerConfig
    family: Family
    text_path: tuple[str, ...]
    notes: tuple[str, ...]
    has_block_scales: bool = False


def read_hf(values: Mapping[str, object], name: str = "") -> HfReading:
    """Read a config.json object.

    Args:
        values: The parsed JSON object.
        name: Name to give the model.

    Raises:
        ConfigError: a value that makes no sense, or a size that is missing.
    """
    text_path, part, model_type = _find_text_part(values)
    notes = []
    if text_path:
        notes.append(f"only the text part ({'.'.join(text_path)}) is modelled")
    elif any(isinstance(values.get(key), Mapping) for key in _OTHER_PARTS):
        notes.append("only the language model is modelled, without what else the config describes")
    if model_type == NATIVE_MODEL_TYPE:
        family = NATIVE_FAMILY
    elif model_type in FAMILIES:
        family = FAMILIES[model_type]
    else:
        family, assumptions = unknown_family(model_type, part)
        what = f"model_type {shown(model_type)} is not known" if model_type else "no model_type is given"
        notes.append(f"{what}: read by field names, assuming {assumptions}")
    hf_values = HfValues(part, family.defaults, model_type or "an unknown model")
    read = {**family.facts, **_read_spelled(hf_values, family)}
    if family.derive is not None:
        read.update(family.derive(hf_values))
    for field in _REQUIRED:
        read.setdefault(field, 0)
        read[field] = read[field] or hf_values.count(*spellings_of(family)[field])
    if family.remark is not None:
        notes += family.remark(hf_values)
    notes += _notes_on_defaults(hf_values, family)
    if model_type != NATIVE_MODEL_TYPE:
        read["model_type"] = model_type
    if name:
        read["name"] = name
    in_blocks = any(has_block_scales(each, model_type) for each in (values, part))
    return HfReading(TransformerConfig(**read), family, text_path, tuple(notes), in_blocks)


def spellings_of(family: Family) -> Spellings:
    """Hugging Face keys by field of TransformerConfig, for one family."""
    return family.spellings if family is NATIVE_FAMILY else {**COMMON_SPELLINGS, **family.spellings}


def _find_text_part(values: Mapping[str, object]) -> tuple[tuple[str, ...], Mapping[str, object], str]:
    """Follow a multimodal config down to its language model: path, object, model type."""
    path: tuple[str, ...] = ()
    model_type = _model_type(values, "")
    for _ in range(_DEEPEST_TEXT_PART):
        inner = next((key for key in _TEXT_PARTS if isinstance(values.get(key), Mapping) and values[key]), None)
        if inner is None:
            break
        part = values[inner]
        assert isinstance(part, Mapping)
        inherited = {key: values[key] for key in ("tie_word_embeddings",) if values.get(key) is not None}
        values = {**inherited, **part}
        # A part that does not say what it is has the type that its parent's name implies.
        model_type = _model_type(values, f"{model_type}_text" if f"{model_type}_text" in FAMILIES else model_type)
        path = (*path, inner)
    return path, values, model_type


def _model_type(values: Mapping[str, object], otherwise: str) -> str:
    model_type = values.get("model_type")
    if model_type is None:
        return otherwise
    if not isinstance(model_type, str) or len(model_type) > 100:
        raise ConfigError(f"model_type={shown(model_type)} must be a text such as 'llama'")
    return model_type


def _read_spelled(values: HfValues, family: Family) -> Fields:
    read: dict[str, Any] = {}
    for field, keys in spellings_of(family).items():
        value = values.raw(*keys)
        if value is None:
            continue  # absent or null: the family's fact, or the field's own default
        kind = _FIELD_KINDS[field]
        if kind == "int":
            read[field] = values.count(*keys) if field in _REQUIRED else values.optional_count(*keys)
        elif kind == "bool":
            read[field] = values.flag(*keys)
        elif kind == "float":
            read[field] = values.fraction(*keys)
        elif kind == "str":
            read[field] = values.text(*keys)
        else:
            read[field] = value  # a tuple over layers, in our own form; checked by TransformerConfig
    return read


def _notes_on_defaults(values: HfValues, family: Family) -> list[str]:
    sizes = {key for field in _NOTED_SIZES for key in spellings_of(family).get(field, ())}
    assumed = [f"{key}={shown(value)}" for key, value in values.assumed.items() if key in sizes]
    if not assumed:
        return []
    return [f"not given, so as transformers assumes for {values.model_type}: {', '.join(assumed)}"]
