"""Read a model from a preset, a file, a folder, a hub id, a dict, a TransformerConfig or fields alone.

Presets are published models that ship with the package, one TOML file each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapewright.core.errors import (
    ConfigError,
    ShapewrightError,
    UnknownModelError,
    close_names,
    short_path,
    short_repr,
)
from shapewright.core.notes import Note
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, joined, with_fields
from shapewright.models.config_file import fetch_config, is_hub_id, read_json_file
from shapewright.models.families.vision_language import TILED
from shapewright.models.hf_config import PARTS_LEFT_OUT, REQUIRED_FIELDS, read_hf_config, read_vision_tower
from shapewright.models.transformer import TransformerConfig, check_field_names, with_changes

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
_FOLDER = Path(__file__).parent / "presets"

# TOML has no null; in preset files 0 stands for null under these keys.
_NULL_IF_ZERO = ("q_lora_rank", "sliding_window")


@dataclass(frozen=True)
class Preset:
    """A published model that ships with the package.

    Attributes:
        name: Name on the command line.
        title: Name in reports.
        family: Heading under which presets are listed.
        source: Where its config was published.
        hub_id: Its checkpoint on the Hugging Face hub; empty where the source names none.
        config: Its config.json object.
        notes: Remarks for users.
        num_parameters: The published parameter count; None if there is none.
    """

    name: str
    title: str
    family: str
    source: str
    config: dict[str, Any]
    hub_id: str = ""
    notes: str = ""
    num_parameters: int | None = None


def list_presets() -> tuple[str, ...]:
    """List the names of all presets, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_preset(name: str) -> Preset:
    """Load a preset; other preset files are not read.

    Raises:
        UnknownModelError: no preset has this name.
        ConfigError: the preset file is damaged.
    """
    import tomllib

    path = _FOLDER / f"{name.casefold()}.toml"
    if not is_preset(name):
        raise UnknownModelError(f"no preset {short_repr(name)}; {_hint(name)}")
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
        return Preset(
            name=content["name"],
            title=content["title"],
            family=content.get("family", ""),
            source=content["source"],
            hub_id=content.get("hub_id", ""),
            config={
                key: None if key in _NULL_IF_ZERO and value == 0 else value for key, value in content["config"].items()
            },
            notes=content.get("notes", ""),
            num_parameters=content.get("parameters"),
        )
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"preset file {path.name} is damaged ({reason}); install the package again") from None


def is_preset(name: str) -> bool:
    """Return whether a preset has this name, ignoring case."""
    # The pattern excludes separators, so that a name from the user cannot lead out of the folder.
    return _PLAIN_NAME.fullmatch(name) is not None and (_FOLDER / f"{name.casefold()}.toml").is_file()


def _hint(name: str) -> str:
    known = list_presets()
    return close_names(name, known) or f"there are {len(known)}, such as {', '.join(repr(each) for each in known[:3])}"


@dataclass(frozen=True)
class Model:
    """A model config with its source.

    Attributes:
        config: Its hyperparameters, with overrides applied.
        raw: The config.json object that it was read from; None for a TransformerConfig or fields alone.
        source: ``preset NAME``, a path, ``hub ID``, ``TransformerConfig``, or ``flags`` for fields alone.
        notes: Remarks for users: parts not modelled, assumed values, derived fields that followed an override.
        has_block_scales: Whether its weights are published in fp8 with one scale per block.
    """

    config: TransformerConfig
    raw: dict[str, Any] | None
    source: str
    notes: tuple[str, ...] = ()
    has_block_scales: bool = False

    @property
    def quantization(self) -> str:
        """Method by which its checkpoint is in a narrow format, such as ``mxfp4``; empty if it is not."""
        found = (self.raw or {}).get("quantization_config") or {}
        return str(found.get("quant_method", "unknown")) if found else "fp8" if self.has_block_scales else ""

    def with_vision(self) -> Model:
        """Return the model with the vision tower of its config.json.

        Raises:
            ConfigError: it has none that is read.
        """
        if self.raw is None:
            raise ConfigError(
                f"{self.config.title} has no vision tower; give the config.json of a vision-language model"
            )
        tower = read_vision_tower(self.raw, self.config.hidden_size)
        notes = tuple(note for note in self.notes if not (isinstance(note, Note) and note.code == PARTS_LEFT_OUT))
        if self.raw.get("model_type") in TILED:
            notes += ("images are the tower's: an image of the user is one of them and one for each of its tiles",)
        tied = self.raw.get("tie_word_embeddings")  # that of the whole model applies, as in transformers
        is_tied = tied if isinstance(tied, bool) else self.config.tied_embeddings
        return replace(self, config=replace(self.config, vision=tower, tied_embeddings=is_tied), notes=notes)


ModelLike = str | os.PathLike[str] | Mapping[str, Any] | Model | TransformerConfig | None
"""Anything that read_model accepts."""


def read_model(source: ModelLike, overrides: Mapping[str, object] | None = None) -> Model:
    """Read a model, and change fields of it.

    Args:
        source: Name of a preset, path of a config.json or of its folder, hub id (``organization/name``, or
            ``organization/name@revision``), config.json object, Model or TransformerConfig; None for a model described
            by ``overrides`` alone. A name with a slash is a path if the path exists.
        overrides: New values by field of TransformerConfig, for every kind of source; derived fields follow (see
            ``with_changes``).

    Raises:
        ConfigError: the config is malformed, its values contradict each other, or an override is not a field.
        UnknownModelError: no such preset, path or repository.
        MissingExtraError: the source is a hub id and huggingface_hub is not installed.

    >>> read_model(None, {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}).config.head_dim
    16
    """
    overrides = dict(overrides or {})
    check_field_names(overrides)
    if source is None:
        return _from_fields(overrides)
    if isinstance(source, TransformerConfig):
        source = Model(config=source, raw=None, source="TransformerConfig")
    if isinstance(source, Model):
        return _override(source, overrides)
    if isinstance(source, Mapping):
        return read_object(dict(source), overrides, where="the dict given")
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"a model cannot be read from {type(source).__name__}; give a preset, a path, a hub id, a "
            "TransformerConfig, or a config.json object as a dict (to_dict() of a transformers config)"
        )
    raw, where, name = find_config(os.fspath(source))
    return read_object(raw, overrides, where=where, name=name)


def read_object(
    raw: dict[str, Any], overrides: Mapping[str, object] | None = None, *, where: str, name: str = ""
) -> Model:
    """Read a model from a config.json object, without access to files or network.

    Args:
        overrides: As for ``read_model``.
        where: Its source, for messages and for ``Model.source``.
        name: Name in reports if the object has none.

    Raises:
        ConfigError: the object is malformed, or its values contradict each other.
    """
    overrides = dict(overrides or {})
    check_field_names(overrides)
    try:
        reading = read_hf_config(raw, name=name)
    except ConfigError as error:
        raise ConfigError(f"in {short_path(where)}: " + error.text) from None
    model = Model(
        config=reading.config,
        raw=raw,
        source=where,
        notes=reading.notes,
        has_block_scales=reading.has_block_scales,
    )
    return _override(model, overrides)


def _override(model: Model, overrides: Mapping[str, object]) -> Model:
    """Change fields of a model; a note lists the derived fields that followed."""
    if not overrides:
        return model
    config = with_changes(model.config, overrides)
    return replace(model, config=config, notes=model.notes + _notes_on_derived_fields(model.config, config, overrides))


def _from_fields(overrides: Mapping[str, Any]) -> Model:
    missing = [name for name in REQUIRED_FIELDS if overrides.get(name) is None]
    if missing:
        raise ConfigError(
            with_fields(
                "a model without a config needs {needed}; missing: {missing}",
                needed=joined(map(FieldName, REQUIRED_FIELDS), ", "),
                missing=joined(map(FieldName, missing), ", "),
            ),
            advice="give them, or a preset, a config.json or a hub id",
        )
    return Model(config=TransformerConfig(**overrides), raw=None, source="flags")


def find_config(source: str) -> tuple[dict[str, Any], str, str]:
    """Find a model by name, path or hub id; return its config.json object, its source and a name for it.

    Raises:
        ConfigError: the file cannot be read.
        UnknownModelError: no such preset, path or repository.
    """
    if is_preset(source):
        preset = load_preset(source)
        return preset.config, f"preset {preset.name}", preset.name
    try:
        path = Path(source).expanduser() if source.startswith("~") else Path(source)
        is_there, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # an invalid file name, or an unknown user's home
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot read {short_path(source)}: {reason}; give a preset, a path or a hub id") from None
    if re.search(r"\.py:(?!:)", source):
        raise ConfigError(
            f"{short_path(source)} is a module of PyTorch, which the commands predict, check, memory, mfu, report and "
            f"serve trace, and shapewright.trace in Python; give a preset, a config.json, a model folder or a hub id"
        )
    if is_there and source.endswith(".py"):
        raise ConfigError(
            f"{short_path(source)} is Python, and no config of a trainer; to trace a module, name what returns it, as "
            f"FILE.py:CALLABLE"
        )
    if is_there and source:
        file = path / "config.json" if is_folder else path
        if is_folder and not file.exists():
            raise ConfigError(
                f"folder {short_path(source)} has no config.json; give a folder that holds one, or a file"
            )
        resolved = file.resolve()
        return (
            read_json_file(file),
            str(file),
            resolved.parent.name if resolved.name == "config.json" else resolved.stem,
        )
    if is_hub_id(source) and not source.endswith(".json"):
        return read_json_file(_fetch(source)), f"hub {source}", source.rpartition("/")[2]
    if "/" in source or "\\" in source or source.endswith(".json"):
        raise UnknownModelError(
            f"nothing at path {short_path(source)}; give a preset, a config.json, a model folder or a hub id"
        )
    hint = close_names(source, list_presets()) or "list them with 'shapewright models'"
    raise UnknownModelError(f"no preset, file or folder {short_path(source)}; {hint}")


def _fetch(hub_id: str) -> Path:
    """Download a config.json; errors suggest presets of a similar name, which need no network and no account."""
    try:
        return fetch_config(hub_id)
    except ShapewrightError as error:
        presets = close_names(hub_id.rpartition("/")[2].partition("@")[0], list_presets())
        raise type(error)(error.text, advice=presets) from None


def _notes_on_derived_fields(
    before: TransformerConfig, after: TransformerConfig, overrides: Mapping[str, object]
) -> tuple[str, ...]:
    derived = (
        "head_dim",
        "v_head_dim",
        "num_kv_heads",
        "intermediate_size",
        "embedding_size",
        "moe_intermediate_size",
    )
    leaders = {"v_head_dim": "head_dim", "embedding_size": "hidden_size"}  # equal in nearly every model
    moved = [
        f"{name}={getattr(after, name)}"
        for name in derived
        if name not in overrides
        and getattr(after, name) != getattr(before, name)
        and not (name in leaders and getattr(after, name) == getattr(after, leaders[name]))
    ]
    followed = f"changed with the overrides: {', '.join(moved)}"
    notes: list[str] = [Note(followed, "model", "overrides")] if moved else []
    if before.head_dim == after.head_dim and "hidden_size" in overrides and "head_dim" not in overrides:
        width = after.num_heads * after.head_dim
        if before.num_heads * before.head_dim == before.hidden_size and width != after.hidden_size:
            notes.append(
                f"head_dim={after.head_dim} is kept: {after.num_heads} heads are {width} wide, "
                + with_fields(
                    "{hidden_size} is {width}; set {num_heads} or {head_dim} for other heads", width=after.hidden_size
                )
            )
    return tuple(notes)
