"""write_back: a changed model in the form that it was read in."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from shapewright.config.changes import with_changes
from shapewright.config.hf import NATIVE_MODEL_TYPE, read_hf, spellings_of
from shapewright.config.read import Model
from shapewright.config.transformer import TransformerConfig
from shapewright.config.validate import shortest_period
from shapewright.errors import ConfigError

_PROVENANCE = ("name", "model_type")
# Keys that may hold a list with one entry per layer.
_LAYER_LISTS = (
    "layer_types", "mlp_layer_types", "no_rope_layers", "moe_topk", "moe_intermediate_size", "num_shared_expert",
)  # fmt: skip


def write_back(model: Model, new_config: TransformerConfig) -> dict[str, Any]:
    """Return the model's config.json object with the changed fields changed and everything else kept.

    Only what differs from the object is written, under the key that it uses (``n_head``, ``d_model``, ...). The
    result is read again before it is returned, so it says exactly what ``new_config`` says.

    Args:
        model: The model as it was read.
        new_config: The shape to write.

    Raises:
        ConfigError: the family's config.json cannot express a change.
    """
    if model.raw is None:
        return _native_form(new_config)
    written = copy.deepcopy(model.raw)
    original = read_hf(model.raw)
    part = _part(written, original.text_path)
    changed = _differing(original.config, new_config)
    if "num_layers" in changed:
        _refit_layer_lists(part, original.config, new_config)
    spellings = spellings_of(original.family)
    # First the keys that are there with a value. What is still different then, such as a head_dim that used to follow
    # from the other sizes and no longer does, is spelled out.
    problem: ConfigError | None = None
    for only_present in (True, False):
        for name in changed:
            key = _key_to_write(part, spellings.get(name, ()), only_present=only_present)
            if key:
                part[key] = _as_json(getattr(new_config, name))
        try:
            changed = _differing(read_hf(written).config, new_config)
        except ConfigError as error:  # between the two passes the object may contradict itself
            problem = error
            continue
        problem = None
        if not changed:
            return written
    reason = f" ({problem})" if problem else ""
    raise ConfigError(
        f"a config.json of model_type {original.config.model_type!r} cannot express {', '.join(changed)} together with "
        f"the other values{reason}; change other fields, or fewer"
    )


def _key_to_write(part: Mapping[str, Any], keys: Sequence[str], *, only_present: bool) -> str:
    """Key that takes a changed value: the spelling in use, else the family's first; empty for none."""
    used = next((key for key in keys if part.get(key) is not None), "")
    return used or ("" if only_present or not keys else keys[0])


def _differing(one: TransformerConfig, other: TransformerConfig) -> list[str]:
    names = (spec.name for spec in fields(TransformerConfig) if spec.name not in _PROVENANCE)
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _native_form(config: TransformerConfig) -> dict[str, Any]:
    """Every field under its own name, which read_model reads as well."""
    values = {spec.name: _as_json(getattr(config, spec.name)) for spec in fields(TransformerConfig)}
    return {**values, "model_type": NATIVE_MODEL_TYPE}


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _part(written: dict[str, Any], path: Iterable[str]) -> dict[str, Any]:
    for key in path:
        written = written[key]
    return written


def _refit_layer_lists(part: dict[str, Any], old: TransformerConfig, new: TransformerConfig) -> None:
    """Cut or continue lists with one entry per layer, so that they fit the new number of layers."""
    for key in _LAYER_LISTS:
        entries = part.get(key)
        if isinstance(entries, list) and len(entries) == old.num_layers:
            part[key] = _continued(entries, new.num_layers)
    if "attention_types" in part:  # gpt_neo
        # the pattern as with_changes carries it over, spelled out once
        windows = with_changes(old, {"num_layers": new.num_layers})
        kinds = ["local" if windows.window_of_layer(index) else "global" for index in range(new.num_layers)]
        part["attention_types"] = [[kinds, 1]]
    if part.get("moe_layer_end_index") == old.num_layers - 1:  # ernie4_5_moe: experts up to the last layer
        part["moe_layer_end_index"] = new.num_layers - 1
    if isinstance(part.get("moe_layers"), list):  # llama4: numbers of the layers with experts
        part["moe_layers"] = [index for index in range(new.num_layers) if new.is_moe_layer(index)]


def _continued(entries: list[Any], length: int) -> list[Any]:
    period = shortest_period(entries)
    if len(period) < len(entries):
        return [period[index % len(period)] for index in range(length)]
    return [*entries[:length], *[entries[-1]] * (length - len(entries))]
