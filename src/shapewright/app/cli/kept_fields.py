"""--keep of search, plan and design: fields of the shape with a value, fields of the plan with those they may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.ranges import read_integer
from shapewright.core.texts import FieldName, with_fields


def keep_of_shape(entries: Iterable[str]) -> dict[str, int]:
    """Values that fields of the shape are fixed to; one entry may fix several, as in heads=32,depth=24."""
    parts = [part for entry in entries for part in entry.split(",") if part]
    return _read(parts, _read_shape_field, "heads=32")


def keep_of_plan(entries: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Values that fields of the plan may take."""
    from shapewright.optimize.plan.request import read_kept

    return _read(entries, read_kept, "tp=4,8")


def keep_of_design(entries: Iterable[str]) -> dict[str, Any]:
    """Values of fields of the shape, and values that fields of the plan may take."""
    from shapewright.optimize.plan.request import PLAN_FIELDS, SHORT_NAMES, read_kept

    def read_either(name: str, text: str) -> tuple[str, Any]:
        is_of_plan = SHORT_NAMES.get(name, name.replace("-", "_")) in PLAN_FIELDS
        return read_kept(name, text) if is_of_plan else _read_shape_field(name, text)

    return _read(entries, read_either, "heads=32 or tp=1,2")


def _read(entries: Iterable[str], read: Callable[[str, str], tuple[str, Any]], example: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for entry in entries:
        name, _, text = entry.partition("=")
        if not text.strip():
            raise ConfigError(f"--keep {short_repr(entry)} is not FIELD=VALUE, such as {example}")
        field_name, value = read(name.strip(), text)
        if kept.setdefault(field_name, value) != value:
            raise ConfigError(
                with_fields("--keep names {field} twice", field=FieldName(field_name)),
                advice=f"give it once, such as {example}",
            )
    return kept


def _read_shape_field(name: str, text: str) -> tuple[str, int]:
    from shapewright.optimize.search.request import field_of

    value = read_integer(text)
    field_name = field_of(name)
    if value is None or value < 0:
        raise ConfigError(
            f"--keep {short_repr(f'{name}={text}')}: a field of the shape takes one whole number, such as heads=32"
        )
    return field_name, value
