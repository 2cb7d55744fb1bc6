"""read_model: one entrance for presets, files, folders, hub ids and flags."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapewright.config.changes import check_field_names, with_changes
from shapewright.config.hf import read_hf
from shapewright.config.hub import fetch_config, is_hub_id
from shapewright.config.json_file import read_json_file
from shapewright.config.preset import is_preset, list_presets, load_preset
from shapewright.config.transformer import TransformerConfig
from shapewright.config.validate import shown_path
from shapewright.errors import ConfigError, UnknownModelError, close_names

REQUIRED_FLAGS = ("hidden_size", "num_layers", "num_heads", "vocab_size")


@dataclass(frozen=True)
class Model:
    """A model with where it came from.

    Attributes:
        config: Its shape, overrides applied.
        raw: The config.json object that it was read from, None for a model described by flags alone.
        source: Where it was found: ``preset NAME``, a path, ``hub ID`` or ``flags``.
        notes: What the reader should know: parts left out, values assumed, fields that followed an override.
        has_block_scales: Whether its weights are published in fp8 with a scale for each block.
    """

    config: TransformerConfig
    raw: dict[str, Any] | None
    source: str
    notes: tuple[str, ...] = ()
    has_block_scales: bool = False


def read_model(
    source: str | os.PathLike[str] | Mapping[str, Any] | None, overrides: Mapping[str, object] | None = None
) -> Model:
    """Read a model.

    Args:
        source: A preset's name, the path of a config.json or of a folder that holds one, a hub id
            (``organisation/name``, or ``organisation/name@revision``), what a config.json holds, or None for a model
            described by ``overrides`` alone. A name with a slash is a path if something is there.
        overrides: Values by field of TransformerConfig, put on top; fields that were derived follow (see
            ``with_changes``).

    Raises:
        ConfigError: the config is malformed, or its values contradict each other.
        UnknownModelError: there is no such preset, path or repository.
        MissingExtraError: a hub id, without huggingface_hub installed.

    >>> read_model(None, {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}).config.head_dim
    16
    """
    overrides = dict(overrides or {})
    check_field_names(overrides)
    if source is None:
        return _from_flags(overrides)
    if isinstance(source, Mapping):
        return read_object(dict(source), overrides, where="the dict given")
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"a model cannot be read from {type(source).__name__}; give a preset, a path, a hub id, a "
            "TransformerConfig or, as a dict, what a config.json holds (to_dict() of a config of transformers)"
        )
    raw, where, name = _find(os.fspath(source))
    return read_object(raw, overrides, where=where, name=name)


def read_object(
    raw: dict[str, Any], overrides: Mapping[str, object] | None = None, *, where: str, name: str = ""
) -> Model:
    """Read a model from a config.json object that is at hand; nothing else is looked for anywhere.

    Args:
        raw: The object.
        overrides: As for ``read_model``.
        where: Where it came from, for messages and for ``Model.source``.
        name: Name to print if the object has none.

    Raises:
        ConfigError: the object is malformed, or its values contradict each other.
    """
    overrides = dict(overrides or {})
    check_field_names(overrides)
    try:
        reading = read_hf(raw, name=name)
    except ConfigError as error:
        raise ConfigError(f"in {shown_path(where)}: {error}") from None
    config, notes = reading.config, reading.notes
    if overrides:
        config = with_changes(config, overrides)
        notes += _notes_on_followers(reading.config, config, overrides)
    return Model(config=config, raw=raw, source=where, notes=notes, has_block_scales=reading.has_block_scales)


def _from_flags(overrides: Mapping[str, Any]) -> Model:
    missing = [name for name in REQUIRED_FLAGS if overrides.get(name) is None]
    if missing:
        raise ConfigError(
            f"a model without a config needs {', '.join(REQUIRED_FLAGS)}; missing: {', '.join(missing)}; "
            f"give them, or a preset, a config.json or a hub id"
        )
    return Model(config=TransformerConfig(**overrides), raw=None, source="flags")


def _find(source: str) -> tuple[dict[str, Any], str, str]:
    """Return the config.json object, where it was found, and a name for the model."""
    if is_preset(source):
        preset = load_preset(source)
        return preset.config, f"preset {preset.name}", preset.name
    try:
        path = Path(source).expanduser() if source.startswith("~") else Path(source)
        is_there, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # a name that no file can have, or nobody's home
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot read {shown_path(source)}: {reason}; give a preset, a path or a hub id") from None
    if is_there and source:
        file = path / "config.json" if is_folder else path
        if is_folder and not file.exists():
            raise ConfigError(
                f"folder {shown_path(source)} has no config.json; give a folder that holds one, or a file"
            )
        resolved = file.resolve()
        return (
            read_json_file(file),
            str(file),
            resolved.parent.name if resolved.name == "config.json" else resolved.stem,
        )
    if is_hub_id(source) and not source.endswith(".json"):
        return read_json_file(fetch_config(source)), f"hub {source}", source.rpartition("/")[2]
    if "/" in source or "\\" in source or source.endswith(".json"):
        raise UnknownModelError(
            f"nothing at path {shown_path(source)}; give a preset, a config.json, a model folder or a hub id"
        )
    hint = close_names(source, list_presets()) or "list them with 'shapewright models'"
    raise UnknownModelError(f"no preset, file or folder {shown_path(source)}; {hint}")


def _notes_on_followers(
    before: TransformerConfig, after: TransformerConfig, overrides: Mapping[str, object]
) -> tuple[str, ...]:
    followers = (
        "head_dim",
        "v_head_dim",
        "num_kv_heads",
        "intermediate_size",
        "embedding_size",
        "moe_intermediate_size",
    )
    moved = [
        f"{name}={getattr(after, name)}"
        for name in followers
        if name not in overrides and getattr(after, name) != getattr(before, name)
    ]
    return (f"followed the overrides: {', '.join(moved)}",) if moved else ()
