"""Base of all outputs: described fields, construction from result objects, JSON values and JSON Schema.

The device and the layout, which most outputs have, are here too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from shapewright.core.fields import doc_field, documented_fields, shown_properties
from shapewright.core.records import dataclass
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from shapewright.core.notes import Refusal
    from shapewright.hardware.device import Device

SCHEMA_VERSION = 1
"""Version of the JSON form of all commands; it grows when a key changes its meaning or is removed."""

_KEY, _IS_OPTIONAL, _IS_FLAT, _IS_TEXT_ONLY = "key", "is_optional", "is_flat", "is_text_only"
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", NoneType: "null"}

_SHARED_KEYS = {
    "source": "where the model was read from",
    "notes": "how the model was read, options without effect and other remarks, one line each",
    "config": "the model: every field of TransformerConfig ([notation](notation.md))",
    "workload": "every field of Workload ([notation](notation.md))",
    "layout": "every field of ParallelLayout ([notation](notation.md)), and `num_devices` of the whole job",
    "device": "the device and its nodes; `shapewright devices show NAME --json` prints all its numbers",
    "software": "generation of the training software; `tuned` by default",
    "step_time_s": "predicted time of one optimizer step, one prefill, or one decoded token per sequence",
    "step_time_low_s": "lower end of the 90 % interval of `step_time_s`",
    "step_time_high_s": "upper end of the 90 % interval of `step_time_s`",
    "tokens_per_step": "new tokens of one step, over all devices",
    "tokens_per_s": "tokens per second of the whole job",
    "tokens_per_s_per_device": "tokens per second and device",
    "mfu": "model FLOP/s over the dense peak of the dtype",
    "hfu": "the same with recomputed FLOPs; above 1 where it counts masked attention that kernels skip",
    "mbu": "bytes of the step's operations (weights in use, cache, activations, each once) over step time and memory "
    "bandwidth; above 1 where operands stay in the cache",
    "total_bytes": "memory of one device of the fullest pipeline stage",
    "capacity_bytes": "memory of the device",
    "elapsed_s": "time that the search took",
    "is_complete": "false where the search was interrupted",
    "usd_per_hour": "price of one device per hour; null without one",
    "parameters": "number of parameters",
    "problem": "why it cannot run; empty where it can",
    "problem_code": "kind of that error, such as `layout`; empty where it can run",
    "problem_field": "field with the wrong value; empty where no single one has",
}
"""Meanings of keys that several outputs share, by field name; a field's own description comes first."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Output:
    """Base of the outputs of commands, which ``--json`` prints."""

    def to_json(self) -> dict[str, Any]:
        """Convert to values that ``json`` can write, with the schema version first."""
        return {"schema_version": SCHEMA_VERSION, **plain(self)}


def described(text: str, *, key: str = "", is_flat: bool = False) -> Any:
    """Declare a required field of an output.

    Args:
        text: Its meaning, without a full stop.
        key: JSON key where it differs from the field's name.
        is_flat: Whether the entries of the value become keys of the object that has the field.
    """
    metadata = {**doc_field(text).metadata, _KEY: key, _IS_FLAT: is_flat}
    return field(metadata=metadata)


def optional(text: str, *, key: str = "") -> Any:
    """Declare a field whose key is absent from the JSON object where the value is None."""
    return field(default=None, metadata={**doc_field(text).metadata, _KEY: key, _IS_OPTIONAL: True})


def text_only() -> Any:
    """Declare a field that text and pages show and that JSON does not have."""
    return field(metadata={_IS_TEXT_ONLY: True})


def problem_keys(refusal: Refusal | None) -> dict[str, Any]:
    """Values of ``problem``, ``problem_code`` and ``problem_field``."""
    if refusal is None:
        return {"problem": "", "problem_code": "", "problem_field": ""}
    return {"problem": refusal.text, "problem_code": refusal.code, "problem_field": refusal.field}


def take(cls: type[T], *sources: object, **given: Any) -> T:
    """Make an object from given fields, and each other field from the first source that has it.

    >>> from shapewright.models.read import load_preset
    >>> @dataclass
    ... class Named:
    ...     name: str
    ...     length: int
    >>> take(Named, load_preset("gpt2"), length=4)
    Named(name='gpt2', length=4)
    """
    for spec in fields(cls):  # type: ignore[arg-type]
        if spec.name in given:
            continue
        source = next((each for each in sources if hasattr(each, spec.name)), None)
        if source is not None or spec.default is MISSING:
            given[spec.name] = getattr(source if source is not None else sources[0], spec.name)
    return cls(**given)


class _Entry(NamedTuple):
    """How one field is written to JSON."""

    name: str
    key: str
    is_optional: bool = False
    is_flat: bool = False


@cache
def _entries(cls: type) -> tuple[_Entry, ...]:
    return tuple(
        _Entry(
            spec.name,
            spec.metadata.get(_KEY) or spec.name,
            spec.metadata.get(_IS_OPTIONAL, False),
            spec.metadata.get(_IS_FLAT, False),
        )
        for spec in fields(cls)
        if not spec.metadata.get(_IS_TEXT_ONLY)
    ) + tuple(_Entry(name, name) for name in shown_properties(cls))


def plain(value: Any) -> Any:
    """Convert dataclasses, mappings and sequences to dicts and lists; other values stay as they are."""
    if value is None or type(value) in (float, int, str, bool):  # most values, of hundreds of operations
        return value
    if is_dataclass(value):
        written: dict[str, Any] = {}
        cls: type = type(value)
        for name, key, is_optional, is_flat in _entries(cls):
            item = getattr(value, name)
            if is_flat:
                written |= plain(item)
            elif not (is_optional and item is None):
                written[key] = plain(item)
        return written
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class FieldDescription(NamedTuple):
    """One key of an output for its documentation.

    Attributes:
        key: JSON key.
        type: Type of the value.
        text: Meaning.
        is_optional: Whether the key can be absent.
        is_flat: Whether the entries of the value take the place of the key.
    """

    key: str
    type: Any
    text: str
    is_optional: bool
    is_flat: bool


def describe_fields(cls: type) -> tuple[FieldDescription, ...]:
    """List keys, types and meanings of a dataclass.

    A field's meaning comes from its metadata, else from the docstring of its class, else from the shared keys.
    """
    # Library classes import these names for annotations alone.
    types = get_type_hints(cls, localns={"Any": Any, "Mapping": Mapping, "Sequence": Sequence})
    texts = _SHARED_KEYS | _docstring_texts(cls) | {spec.name: doc.help for spec, doc in documented_fields(cls)}
    for name, getter in shown_properties(cls).items():
        types[name], texts[name] = (
            get_type_hints(getter)["return"],
            _as_meaning((inspect.getdoc(getter) or "").partition("\n\n")[0]),
        )
    return tuple(
        FieldDescription(key, types[name], texts.get(name, ""), is_optional, is_flat)
        for name, key, is_optional, is_flat in _entries(cls)
    )


def _docstring_texts(cls: type) -> dict[str, str]:
    """Meanings by field from the ``Attributes`` section of a docstring, as those of outputs are written."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section, re.MULTILINE)
    return {name: _as_meaning(" ".join(text.split())) for name, text in found}


def _as_meaning(text: str) -> str:
    """A sentence of a docstring without its unit, which ends the key, and without capital and full stop.

    >>> _as_meaning("Time of ``step``; None without one. [s]")
    'time of `step`; null without one'
    """
    words = re.sub(r" \[[^\]]+\]$", "", text).removesuffix(".").replace("``", "`").replace("None", "null")
    return words[0].lower() + words[1:] if words[1:2].islower() or words[1:2] == " " else words


def json_schema(outputs: Mapping[str, type]) -> dict[str, Any]:
    """Generate a JSON Schema (draft 2020-12) with a property for each of several outputs."""
    definitions: dict[str, Any] = {}
    properties = {}
    for name, cls in outputs.items():
        properties[name] = type_schema(cls, definitions)
        schema = definitions[cls.__name__]
        if issubclass(cls, Output) and "schema_version" not in schema["properties"]:
            version = {"const": SCHEMA_VERSION, "description": "version of this form"}
            schema["properties"] = {"schema_version": version, **schema["properties"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "JSON output of Shapewright, by command",
        "properties": properties,
        "$defs": definitions,
    }


def _object_schema(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
    for entry in describe_fields(cls):
        if not entry.is_flat:
            schema["properties"][entry.key] = {**type_schema(entry.type, definitions), "description": entry.text}
            schema["required"] += [] if entry.is_optional else [entry.key]
        elif is_dataclass(entry.type):
            inner = _object_schema(entry.type, definitions)  # type: ignore[arg-type]
            schema["properties"] |= inner["properties"]
            schema["required"] += inner["required"]
        else:
            schema["additionalProperties"] = type_schema(entry.type, definitions)["additionalProperties"]
    return schema


def type_schema(annotation: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Generate the schema of a type, and collect those of the dataclasses it refers to."""
    origin, parameters = get_origin(annotation), get_args(annotation)
    if is_dataclass(annotation):
        name = annotation.__name__  # type: ignore[union-attr]
        if name not in definitions:
            definitions[name] = {}  # entered first: a class may refer to itself
            definitions[name] = _object_schema(annotation, definitions)  # type: ignore[arg-type]
        return {"$ref": f"#/$defs/{name}"}
    if origin in (Union, UnionType):
        return {"anyOf": [type_schema(one, definitions) for one in parameters]}
    if origin in (list, tuple) and (origin is list or parameters[-1] is Ellipsis):
        return {"type": "array", "items": type_schema(parameters[0], definitions)}
    if origin is tuple:
        return {"type": "array", "prefixItems": [type_schema(one, definitions) for one in parameters], "items": False}
    if origin is Literal:
        return {"enum": list(parameters)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": type_schema(parameters[1], definitions)}
    return {"type": _JSON_TYPES[annotation]} if annotation in _JSON_TYPES else {}


@dataclass(frozen=True, kw_only=True)
class DeviceSummary:
    """A device and its nodes."""

    name: str = described("canonical name")
    title: str = described("name in reports")
    node_size: int = described("devices of a node")
    inter_node_bandwidth_bytes_per_s: float | None = described(
        "network bandwidth per device, one direction; null where unknown"
    )


@dataclass(frozen=True, kw_only=True)
class JobLayout:
    """Fields of ParallelLayout, with the devices of the whole job."""

    layout: ParallelLayout = described("fields of ParallelLayout", is_flat=True)
    num_devices: int = described("devices of the whole job")


def summarize_device(device: Device) -> DeviceSummary:
    """Name, title and nodes of a device."""
    return take(DeviceSummary, device)


def job_layout(layout: ParallelLayout) -> JobLayout:
    """A layout with its number of devices."""
    return JobLayout(layout=layout, num_devices=layout.num_devices)


def degree_words(layout: ParallelLayout) -> list[str]:
    """Every degree above one, and that of experts where it differs from the tensor degree.

    >>> from shapewright.workload.layout import ParallelLayout
    >>> degree_words(ParallelLayout(tensor_parallel=2, data_parallel=4, expert_parallel=8, expert_tensor_parallel=1))
    ['TP 2', 'DP 4', 'EP 8', 'ETP 1']
    """
    words = [
        f"{name} {degree}"
        for name, degree in (
            ("TP", layout.tensor_parallel),
            ("PP", layout.pipeline_parallel),
            ("VPP", layout.virtual_pipeline),
            ("DP", layout.data_parallel),
            ("CP", layout.context_parallel),
            ("EP", layout.expert_parallel),
        )
        if degree > 1
    ]
    return words + [f"ETP {layout.expert_tensor_degree}"] * layout.has_own_expert_degree
