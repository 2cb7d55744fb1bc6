"""docs/json.md and the JSON Schema of docs/json-schema.json, generated from the dataclasses of the outputs."""

from __future__ import annotations

import inspect
import json
from dataclasses import is_dataclass
from typing import Any, get_args

from markdown_parts import WRITTEN_BY, join_parts, markdown_table

from shapewright.app.report.output_registry import COMMAND_OUTPUTS
from shapewright.app.report.outputs.model import SCHEMA_VERSION, FieldDescription, describe_fields, json_schema
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

# Their fields are listed on the page of the notation.
_OWN_PAGE = {TransformerConfig, Workload, ParallelLayout}
_TYPE_NAMES = {"NoneType": "null", "str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_INTRODUCTION = f"""`--json` prints one JSON object on standard output and nothing else there.
`schema_version` is {SCHEMA_VERSION}; it grows when a key changes its meaning or is removed, and new keys may be added
without that. Numbers are in SI base units, named in the suffix of the key. Fractions end in `_fraction` or are one of
`mfu`, `hfu`, `mbu`, `tile_efficiency` and `wave_efficiency`; they are between 0 and 1, but `mfu` and `hfu`, which count
attention as the whole square, can exceed 1. There is no NaN and no infinity. The [JSON Schema](json-schema.json) with a
property for each command is generated from the same definitions."""


def json_page() -> str:
    """The page: a section for each command, then the objects that several commands have."""
    nested = {command: _nested_classes(outputs) for command, outputs in COMMAND_OUTPUTS.items()}
    users: dict[type, int] = {}
    for classes in nested.values():
        for cls in classes:
            users[cls] = users.get(cls, 0) + 1
    parts = ["# JSON output", WRITTEN_BY, _INTRODUCTION]
    for command, outputs in COMMAND_OUTPUTS.items():
        parts.append(f"## shapewright {command}")
        for name, cls in outputs.items():
            if name != command:
                parts.append(f"`{name}`:")
            parts += [_text(cls), _table(cls)]
        for cls in nested[command]:
            if users[cls] == 1:
                parts += [f"### {cls.__name__}", _text(cls), _table(cls)]
    parts += ["## Shared objects", "Objects that the outputs of several commands contain."]
    for cls, count in users.items():
        if count > 1:
            parts += [f"### {cls.__name__}", _text(cls), _table(cls)]
    return join_parts(parts)


def schema_file() -> str:
    """JSON Schema of all outputs, with a property for each command."""
    schema = json_schema({name: cls for outputs in COMMAND_OUTPUTS.values() for name, cls in outputs.items()})
    return json.dumps(schema, indent=1) + "\n"


def _text(cls: type) -> str:
    """Description of a class, without the list of its attributes."""
    return inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[0].strip().replace("``", "`")


def _table(cls: type) -> str:
    return markdown_table(["key", "type", "meaning"], [_row(entry) for entry in _entries(cls)])


def _entries(cls: type) -> list[FieldDescription]:
    """Keys of a class, those of classes that it contains flat included."""
    found: list[FieldDescription] = []
    for entry in describe_fields(cls):
        is_expanded = entry.is_flat and is_dataclass(entry.type) and entry.type not in _OWN_PAGE
        found += _entries(entry.type) if is_expanded else [entry]
    return found


def _row(entry: FieldDescription) -> list[str]:
    key = "..." if entry.is_flat else f"`{entry.key}`"
    return [key, _type_name(entry.type), entry.text.replace("``", "`") + (" (optional)" if entry.is_optional else "")]


def _type_name(annotation: Any) -> str:
    """A type in the words of JSON; dataclasses are linked."""
    if annotation is Any:
        return "any"
    if annotation in _OWN_PAGE:
        return "object"
    if is_dataclass(annotation):
        name = annotation.__name__  # type: ignore[union-attr]
        return f"[{name}](#{name.lower()})"
    parameters = get_args(annotation)
    schema_type = getattr(annotation, "__name__", "")
    if not parameters:
        return _TYPE_NAMES.get(schema_type, schema_type)
    origin = getattr(annotation, "__origin__", None)
    if origin is None:
        return " or ".join(_type_name(one) for one in parameters)
    if origin in (list, tuple):
        return f"array of {_type_name(parameters[0])}"
    return f"object of {_type_name(parameters[1])}"


def _nested_classes(outputs: dict[str, type]) -> list[type]:
    """Classes that outputs contain at any depth, in the order in which they are first mentioned."""
    found: list[type] = []

    def visit(annotation: Any) -> None:
        if is_dataclass(annotation) and annotation not in _OWN_PAGE and annotation not in found:
            found.append(annotation)  # type: ignore[arg-type]
            walk(annotation)  # type: ignore[arg-type]
        for one in get_args(annotation):
            visit(one)

    def walk(cls: type) -> None:
        for entry in _entries(cls):
            visit(entry.type)

    for cls in outputs.values():
        walk(cls)
    return [cls for cls in found if cls not in outputs.values()]
