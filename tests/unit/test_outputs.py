"""Output dataclasses: JSON values, schema, and a description of every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator

from shapewright.app.report.output_registry import COMMAND_OUTPUTS
from shapewright.app.report.outputs.model import (
    SCHEMA_VERSION,
    Output,
    describe_fields,
    described,
    json_schema,
    optional,
    plain,
    take,
)
from shapewright.core.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part."""

    length_m: float = described("length")


@dataclass(frozen=True, kw_only=True)
class Whole(Output):
    """A whole."""

    parts: tuple[Part, ...] = described("its parts")
    pass_name: str | None = described("a keyword as key", key="pass")
    colors: Mapping[str, int] = described("numbers by color", is_flat=True)
    hint: str | None = optional("a remark")


WHOLE = Whole(parts=(Part(length_m=2.0),), pass_name=None, colors={"red": 1})
WRITTEN = {"schema_version": SCHEMA_VERSION, "parts": [{"length_m": 2.0}], "pass": None, "red": 1}


def test_json_has_keys_in_order() -> None:
    """Keys may be renamed, absent or those of a mapping; the schema version comes first."""
    assert list(WHOLE.to_json().items()) == list(WRITTEN.items())
    assert plain([WHOLE]) == [{key: value for key, value in WRITTEN.items() if key != "schema_version"}]


@pytest.mark.parametrize(
    ("changes", "is_valid"),
    [
        ({}, True),
        ({"hint": "blue is missing"}, True),
        ({"blue": 2}, True),
        ({"blue": "many"}, False),
        ({"parts": [{}]}, False),
        ({"pass": 1}, False),
        ({"schema_version": SCHEMA_VERSION + 1}, False),
    ],
)
def test_schema_rejects_invalid_values(changes: dict[str, Any], is_valid: bool) -> None:
    """The generated schema accepts the written object and refuses wrong types and missing keys."""
    assert Draft202012Validator(json_schema({"it": Whole})).is_valid({"it": {**WRITTEN, **changes}}) is is_valid


def test_take_reads_attributes_that_are_not_given() -> None:
    """Given values come before attributes, and a default before an attribute that is missing."""
    taken = take(Whole, WHOLE, pass_name="forward")

    assert (taken.pass_name, taken.parts, taken.hint) == ("forward", WHOLE.parts, None)


def nested(annotation: Any) -> set[type]:
    """Dataclasses that a type contains at any depth."""
    found = set().union(*map(nested, get_args(annotation)))
    if is_dataclass(annotation):
        found |= {annotation}.union(*(nested(entry.type) for entry in describe_fields(annotation)))  # type: ignore[arg-type]
    return found


def test_every_key_is_described() -> None:
    """Every key of every output and of everything inside has a meaning."""
    classes = set().union(*(nested(cls) for outputs in COMMAND_OUTPUTS.values() for cls in outputs.values()))

    assert len(classes) > 40
    assert [(cls.__name__, entry.key) for cls in classes for entry in describe_fields(cls) if not entry.text] == []
    assert all(fields(cls) for cls in classes)
