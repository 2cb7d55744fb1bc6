"""Write a changed model as a config.json object, in the form in which it was read."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from shapewright.core.errors import ConfigError
from shapewright.core.texts import FieldName, joined
from shapewright.models.hf_config import NATIVE_MODEL_TYPE, NESTED, hf_keys_of, read_hf_config
from shapewright.models.layers import (
    ATTENTION,
    CROSS_ATTENTION,
    HEAVILY_COMPRESSED,
    SPARSE_COMPRESSED,
    WINDOW_ATTENTION,
    LayerKind,
    mixers_of,
    shortest_period,
)
from shapewright.models.read import Model
from shapewright.models.transformer import TransformerConfig, with_changes

_IGNORED_FIELDS = ("name", "model_type")
# Fields that a config.json may leave to be derived from sizes, which a change can make underivable.
_DERIVED_FIELDS = ("head_dim", "v_head_dim")
# Keys that may hold a list with one entry per layer.
_LAYER_LISTS = (
    "layer_types", "mlp_layer_types", "no_rope_layers", "moe_topk", "moe_intermediate_size", "num_shared_expert",
    "compress_ratios",
)  # fmt: skip


def to_config_json(model: Model, new_config: TransformerConfig) -> dict[str, Any]:
    """Return the model's config.json object with the changed fields updated and everything else kept.

    Only changed values are written, under the keys that the object uses (``n_head``, ``d_model``, ...). The result is
    read again before it is returned, which ensures that it describes exactly ``new_config``.

    Args:
        model: The model as it was read.

    Raises:
        ConfigError: the config.json of this family cannot express a change.
    """
    if model.raw is None:
        return _native_form(new_config)
    written = copy.deepcopy(model.raw)
    original = read_hf_config(model.raw)
    part = _part(written, original.text_path)
    changed = _differing(original.config, new_config)
    if "num_layers" in changed:
        _resize_layer_lists(part, original.config, new_config)
    if "layer_types" in changed and original.config.model_type != NATIVE_MODEL_TYPE:
        _write_layer_types(part, new_config)
    keys = hf_keys_of(original.family)
    # Where all layers have experts, a family may have no key for the width of the dense MLP that no layer has.
    unused = {"intermediate_size"} if all(group.is_moe for group in new_config.layer_groups()) else set()
    # First pass: keys that are present with a value. Second pass: fields that still differ get a new key, such as a
    # head_dim that was derived from the other sizes before.
    problem: ConfigError | None = None
    for only_present in (True, False):
        for name in changed:
            key = _key_to_write(part, keys.get(name, ()), only_present=only_present)
            if key:
                part[key] = _as_json(getattr(new_config, name))
        try:
            changed = _differing(read_hf_config(written).config, new_config)
        except ConfigError as error:  # the object may be inconsistent between the two passes
            problem = error
            changed += [name for name in _DERIVED_FIELDS if name not in changed]
            continue
        problem = None
        if not set(changed) - unused:
            return written
    reason = " (" + problem.text + ")" if problem else ""
    raise ConfigError(
        f"a config.json of model_type {original.config.model_type!r} cannot express "
        + joined(map(FieldName, changed), ", ")
        + " together with the other values"
        + reason,
        advice="change other fields, or fewer",
    )


def locate_fields(model: Model, path: str) -> dict[str, int]:
    """Return the line, from 1, of each field of a model in its config.json.

    Args:
        model: The model as it was read.
        path: The file it was read from; other places, such as presets, have no lines.
    """
    if model.raw is None or not path.endswith(".json") or not Path(path).is_file():
        return {}
    numbered = list(enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1))
    lines: dict[str, int] = {}
    for name, keys in hf_keys_of(read_hf_config(model.raw).family).items():
        found = [number for key in keys for number, line in numbered if f'"{key}"' in line]
        if found:
            lines[name] = found[-1]  # the language model of a multimodal one comes last
    return lines


# Names of each value in config.json files; rope_theta stands in rope_parameters since transformers 5.
_UNTIMED_KEYS = {
    "rotary_base": ("rope_theta", "rotary_emb_base"),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon"),
}


def untimed_values(model: Model) -> dict[str, float]:
    """Return the values of a model's config.json that its trainer needs and no prediction depends on.

    ``rotary_base``, ``norm_epsilon``, and ``rope_scaling_factor`` where positions are scaled as Llama 3.1 does. A value
    that the file does not give is missing.
    """
    if model.raw is None:
        return {}
    part = _part(model.raw, read_hf_config(model.raw).text_path)
    rope = part.get("rope_parameters")
    part = {**(rope if isinstance(rope, Mapping) else {}), **part}
    found = {name: next(filter(None, map(part.get, keys)), None) for name, keys in _UNTIMED_KEYS.items()}
    scaling = part.get("rope_scaling") or rope
    if isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type")) == "llama3":
        found["rope_scaling_factor"] = scaling.get("factor")
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def without_position_scaling(model: Model, least_positions: int) -> Model:
    """Return a model as it is first trained: without the scaling that stretches rotary positions of a trained one.

    Args:
        model: The model as it was read; returned as it is without such a scaling.
        least_positions: Context window that it needs at least.
    """
    raw = model.raw
    if raw is None or read_hf_config(raw).text_path:
        return model
    scaling = raw.get("rope_scaling")
    trained = scaling.get("original_max_position_embeddings") if isinstance(scaling, Mapping) else None
    if not isinstance(trained, int) or trained < 1:
        return model
    positions = max(trained, least_positions)
    note = f"rope_scaling of {model.config.title} is left out: it stretches the positions of a model that is trained"
    return replace(
        model,
        raw={name: value for name, value in raw.items() if name != "rope_scaling"}
        | {"max_position_embeddings": positions},
        config=replace(model.config, max_position_embeddings=positions),
        notes=(*model.notes, note),
    )


def _key_to_write(part: Mapping[str, Any], keys: Sequence[str], *, only_present: bool) -> str:
    """Return the key to write: the present one, else the first of the family; empty for none."""
    used = next((key for key in keys if part.get(key) is not None), "")
    return used or ("" if only_present or not keys else keys[0])


def _differing(one: TransformerConfig, other: TransformerConfig) -> list[str]:
    names = (spec.name for spec in fields(TransformerConfig) if spec.name not in _IGNORED_FIELDS)
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _native_form(config: TransformerConfig) -> dict[str, Any]:
    """Return every field under its own name, which read_model accepts."""
    if config.patches is not None or config.vision is not None:
        raise ConfigError(f"{config.title} has images and is written only in the form of the config.json it came from")
    values = {
        spec.name: _as_json(getattr(config, spec.name)) for spec in fields(TransformerConfig) if spec.name not in NESTED
    }
    return {**values, "model_type": NATIVE_MODEL_TYPE}


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _part(written: dict[str, Any], path: Iterable[str]) -> dict[str, Any]:
    for key in path:
        written = written[key]
    return written


def _resize_layer_lists(part: dict[str, Any], old: TransformerConfig, new: TransformerConfig) -> None:
    """Truncate or extend lists with one entry per layer to the new number of layers."""
    for key in _LAYER_LISTS:
        entries = part.get(key)
        if isinstance(entries, list) and len(entries) == old.num_layers:
            part[key] = _resize(entries, new.num_layers)
    if "attention_types" in part:  # gpt_neo
        # the pattern as with_changes resizes it, written out once
        windows = with_changes(old, {"num_layers": new.num_layers})
        kinds = ["local" if windows.window_of_layer(index) else "global" for index in range(new.num_layers)]
        part["attention_types"] = [[kinds, 1]]
    if part.get("moe_layer_end_index") == old.num_layers - 1:  # ernie4_5_moe: experts up to the last layer
        part["moe_layer_end_index"] = new.num_layers - 1
    layers = [new.kind_of_layer(index) for index in range(new.num_layers)]
    for key in ("full_attn_idxs", "attn_layer_indices"):  # lfm2, bamba: indices of the layers with attention
        if isinstance(part.get(key), list):
            part[key] = [index for index, layer in enumerate(layers) if ATTENTION in mixers_of(layer.layer_type)]
    if isinstance(part.get("cross_attention_layers"), list):  # mllama
        part["cross_attention_layers"] = [
            index for index, layer in enumerate(layers) if layer.layer_type == CROSS_ATTENTION
        ]
    if isinstance(part.get("hybrid_override_pattern"), str):  # nemotron_h: a letter for each layer
        part["hybrid_override_pattern"] = "".join(_letter(layer) for layer in layers)
    if isinstance(part.get("moe_layers"), list):  # llama4: indices of the layers with experts
        part["moe_layers"] = [index for index in range(new.num_layers) if new.is_moe_layer(index)]


def _letter(layer: LayerKind) -> str:
    """Return the letter of a layer in nemotron_h, each of whose layers is one block."""
    if layer.mlp != "none":
        return "E" if layer.mlp == "experts" else "-"
    return "*" if layer.has_attention else "M"


def _write_layer_types(part: dict[str, Any], new: TransformerConfig) -> None:
    """Name the mixer of every layer as transformers does, where the config can list them."""
    names = {ATTENTION: "full_attention", "short_convolution": "conv", WINDOW_ATTENTION: "sliding_attention"}
    names |= {kind: kind for kind in (SPARSE_COMPRESSED, HEAVILY_COMPRESSED)}
    kinds = [new.kind_of_layer(index).layer_type for index in range(new.num_layers)]
    key = "layers_block_type" if "layers_block_type" in part else "layer_types"
    part[key] = [names.get(kind, "linear_attention") for kind in kinds]


def _resize(entries: list[Any], length: int) -> list[Any]:
    period = shortest_period(entries)
    if len(period) < len(entries):
        return [period[index % len(period)] for index in range(length)]
    return [*entries[:length], *[entries[-1]] * (length - len(entries))]
