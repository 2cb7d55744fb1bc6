"""Inputs of the MCP server's tools: fields with a short schema, and what a server may read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from shapewright.core.errors import ConfigError, close_names, short_path
from shapewright.core.fields import documented_fields
from shapewright.core.records import dataclass
from shapewright.core.units import parse_count
from shapewright.models.config_file import fetch_config, is_hub_id, read_json_file
from shapewright.models.read import Model, is_preset, list_presets, read_model, read_object
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

LIMIT_S = 60.0
"""Default time limit of a call. [s]"""
MAX_CONFIG_BYTES = 256 * 1024
_TYPES: dict[str, Any] = {
    "int": int, "float": float, "str": str, "bool": bool, "tuple[int, ...]": list[int], "tuple[bool, ...]": list[bool],
}  # fmt: skip
# Fields that the schemas of the tools describe; the others are accepted too.
_DESCRIBED: dict[type, tuple[str, ...]] = {
    TransformerConfig: (
        *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size"),
        *("num_experts", "num_experts_per_token", "moe_intermediate_size"),
    ),
    Workload: (
        *("phase", "micro_batch_size", "seq_len", "context_len", "global_batch_size", "dtype", "weight_dtype"),
        *("kv_cache_dtype", "attention", "recompute"),
    ),
    ParallelLayout: (
        *("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "expert_parallel"),
        *("sequence_parallel", "zero_stage"),
    ),
}


class Fields(BaseModel):
    """Fields of a model, workload or layout by name; unknown ones are refused with similar names."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_names(cls, value: object) -> object:
        """Say where a name belongs that is given instead of fields."""
        if isinstance(value, str):
            raise ValueError("give an object of fields; a preset or the content of a config.json goes into `config`")
        return value

    def given(self) -> dict[str, Any]:
        """Fields that a call gives, with lists as tuples."""
        values = {name: value for name, value in self if value is not None}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _be_brief(schema: dict[str, Any]) -> None:
    """Remove from a field's schema what its name and description repeat."""
    schema.pop("title", None)
    schema.pop("default", None)


def _described_fields(cls: type) -> type[Fields]:
    """Make the input type of a dataclass, with the usual fields in its schema."""
    fields: dict[str, Any] = {}
    for spec, note in documented_fields(cls):
        if spec.name in _DESCRIBED[cls]:
            kind = Literal[note.choices] if note.choices else _TYPES[str(spec.type).removesuffix(" | None")]
            fields[spec.name] = (kind, Field(default=None, description=note.help, json_schema_extra=_be_brief))
    doc = f"Fields of {cls.__name__}; any other of its fields is accepted too."
    return create_model(f"{cls.__name__}Fields", __base__=Fields, __doc__=doc, **fields)


if TYPE_CHECKING:
    ModelFields = Fields
    WorkloadFields = Fields
    LayoutFields = Fields
else:
    ModelFields = _described_fields(TransformerConfig)
    WorkloadFields = _described_fields(Workload)
    LayoutFields = _described_fields(ParallelLayout)
NO_FIELDS = Fields()


def place_of_field(name: str) -> str:
    """Argument that a field belongs to; empty for a name that is no field."""
    places = {"model": TransformerConfig, "workload": Workload, "layout": ParallelLayout}
    return next(
        (place for place, cls in places.items() if name in (spec.name for spec, _ in documented_fields(cls))), ""
    )


def read_count(value: object) -> object:
    """Number of a text such as ``3b``; any other value as it is.

    Raises:
        ValueError: the text is not a number.
    """
    return parse_count(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Access:
    """What a server may read.

    Attributes:
        roots: Folders under which configs may be read.
        allows_hub: Whether configs may be downloaded from the Hugging Face hub.
        limit_s: Time limit of a call. [s]
    """

    roots: tuple[Path, ...] = ()
    allows_hub: bool = False
    limit_s: float = LIMIT_S

    def read(self, config: str | Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> Model:
        """Read a model.

        Raises:
            ConfigError: the model is invalid, or the source is not one that the user allowed.
        """
        if config is None:
            return read_model(None, overrides)
        if isinstance(config, Mapping):
            if len(json.dumps(config)) > MAX_CONFIG_BYTES:
                raise ConfigError(f"the config is larger than {MAX_CONFIG_BYTES // 1024} KiB; a config.json has a few")
            return read_object(dict(config), overrides, where="the config given")
        if is_preset(config):
            return read_model(config, overrides)
        file = self._find_file(config)
        if file is not None:
            return read_object(read_json_file(file), overrides, where=config, name=file.parent.name)
        if self.allows_hub and is_hub_id(config):
            found = fetch_config(config)
            return read_object(read_json_file(found), overrides, where=f"hub {config}", name=config.rpartition("/")[2])
        folders = ", ".join(short_path(root) for root in self.roots) or "none (shapewright mcp --root FOLDER)"
        hub = "allowed" if self.allows_hub else "not allowed (--hub)"
        hint = close_names(config, list_presets())
        raise ConfigError(
            f"config {short_path(config)} is no preset and no file that this server may read; "
            f"{f'{hint} ' if hint else ''}folders: {folders}; hub ids: {hub}; give a preset or the content of the "
            "config.json"
        )

    def _find_file(self, config: str) -> Path | None:
        """File of a path under one of the folders, links resolved; None if there is none."""
        for root in self.roots:
            try:
                found = (root / config).resolve()
                file = found / "config.json" if found.is_dir() else found
                if file.resolve().is_relative_to(root) and file.is_file():
                    return file.resolve()
            except (OSError, ValueError, RuntimeError):  # an invalid name, or a loop of links
                continue
        return None
