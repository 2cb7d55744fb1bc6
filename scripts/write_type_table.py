"""Write how the model types without a table of their own compare with transformers, read by field names.

    python scripts/write_type_table.py [MODEL_TYPE...]

For every type of transformers with a language head, each integer or boolean of its config is changed in turn, and the
parameters of the model that transformers builds on the meta device are compared with those counted here. The table
holds the defaults of transformers, the fields that change the model but are not read, and the types that are refused.
It takes about 15 minutes for all types; given types are replaced in the table.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from shapewright.core.errors import ShapewrightError
from shapewright.models.families import fallback
from shapewright.models.families.registry import FAMILIES
from shapewright.models.hf_config import read_hf_config
from shapewright.models.parameters import count_parameters

TABLE = Path(fallback.__file__).with_name("transformers_types.json")
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers")
FEW_LAYERS = 4
# A type is refused where its default model has so many parameters more or less than are counted.
MOST_BASE_ERROR = 0.02
# A field is not read where a change of it moves the count by another amount, beyond this share of it and of the model.
MOST_CHANGE_ERROR, LEAST_SHARE = 0.25, 0.01
NOT_SHAPES = (
    "token_id",
    "use_cache",
    "output_",
    "return_dict",
    "torchscript",
    "chunk_size_feed_forward",
    "vocab_size",
    "is_encoder_decoder",
    "is_decoder",
    "cross_attention",
    "tie_encoder_decoder",
    "labels",
    "problem_type",
)


def language_types() -> dict[str, str]:
    """Model types with a language head and no table here, with the class that builds them."""
    from transformers.models.auto import modeling_auto as auto

    found: dict[str, str] = {}
    for name, builder in (
        ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
        ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
        ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
    ):
        found |= dict.fromkeys(getattr(auto, name), builder)
    return {name: found[name] for name in sorted(found) if name not in FAMILIES}


def build(config: Any, builder: str) -> int:
    """Count the parameters of the model that transformers builds."""
    import torch
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, builder).from_config(config, attn_implementation="eager")
    return sum(parameter.numel() for parameter in model.parameters())


def count(values: dict[str, Any]) -> int | None:
    """Count the parameters of a config.json object as read here; None where it is refused."""
    try:
        return count_parameters(read_hf_config(values).config).total
    except ShapewrightError:
        return None


def changes(key: str, value: object) -> list[object]:
    """Other values of a field to try."""
    if any(word in key for word in NOT_SHAPES):
        return []
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value // 2, value + 1] if value > 0 else [1, 2, value + 64]
    return []


def compare(model_type: str, builder: str) -> dict[str, Any] | None:
    """Entry of a type; None where transformers cannot build its default model or it is refused by its keys."""
    from transformers import AutoConfig

    plain = AutoConfig.for_model(model_type)
    if plain.get_text_config() is not plain:
        return None
    filled = plain.to_dict()
    own = {**dict.fromkeys(filled), **{key: getattr(type(plain), key, None) for key in filled}}
    defaults: dict[str, Any] = {
        key: value
        for key, value in filled.items()
        if key in fallback.READ_KEYS and isinstance(value, bool | int | float | str) and own[key] == value
    }
    if filled.get("rope_parameters"):
        defaults["rope_parameters"] = {}
    if count(filled) is None:
        return None
    truth, here = build(plain, builder), count(filled) or 0
    error = here / truth - 1.0
    entry: dict[str, Any] = {"defaults": defaults, "error_fraction": round(error, 6), "unread": {}}
    if abs(error) > MOST_BASE_ERROR:
        return {"error_fraction": entry["error_fraction"]}
    given = {key: value for key, value in filled.items() if key not in defaults}
    fallback.transformers_types()[model_type] = entry
    entry["needed"] = [
        key
        for key in given
        if key != "model_type" and count({other: given[other] for other in given if other != key}) not in (None, here)
    ]
    fallback.transformers_types().clear()
    few = {key: FEW_LAYERS for key in LAYER_KEYS if key in filled}
    try:
        small = AutoConfig.for_model(model_type, **few)
        truth, here = build(small, builder), count(small.to_dict()) or 0
    except Exception:
        few, small = {}, plain
    fields = small.to_dict()
    for key, value in fields.items():
        pair = key.replace("decoder_", "encoder_", 1)  # fields of the two stacks that must be equal change together
        if key in few or key.replace("encoder_", "decoder_", 1) in set(fields) - {key}:
            continue
        for other in changes(key, value):
            try:
                both = dict.fromkeys({key, pair} & set(fields), other)
                changed = AutoConfig.for_model(model_type, **few, **both)
                found, read = build(changed, builder) - truth, count(changed.to_dict())
            except Exception:
                continue
            if read is not None and abs(read - here - found) > max(MOST_CHANGE_ERROR * abs(found), LEAST_SHARE * truth):
                entry["unread"][key] = value
                break
    return entry


def main() -> None:
    """Compare the given types, or all."""
    import transformers

    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))["types"] if TABLE.is_file() else {}
    types = language_types()
    for model_type in sys.argv[1:] or types:
        fallback.transformers_types.cache_clear()
        fallback.transformers_types().clear()  # compare what the field names alone say
        try:
            entry = compare(model_type, types[model_type])
        except Exception as error:
            sys.stderr.write(f"{model_type} cannot be built: {' '.join(str(error).split())[:100]}\n")
            entry = None
        table.pop(model_type, None)
        if entry is not None:
            table[model_type] = entry
        source = json.dumps(f"transformers {transformers.__version__}")
        lines = [f"    {json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(table.items())]
        text = ",\n".join(lines)
        TABLE.write_text(f'{{\n  "source": {source},\n  "types": {{\n{text}\n  }}\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
