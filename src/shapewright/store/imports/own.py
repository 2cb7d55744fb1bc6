"""measurements.parquet and measurements.csv, as 'shapewright store export' writes them: every row as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from shapewright.store.record import Row, Run

COLUMNS = frozenset(("key", "run_id", "sizes", "status", "median_s", "started_utc"))

_READERS: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda value: int(float(value)),
    "float": float,
    "bool": lambda value: str(value).lower() in ("true", "1", "1.0"),
    "str": str,
    "Mapping[str, Any]": lambda value: json.loads(value) if isinstance(value, str) else value,
    "Mapping[str, float]": lambda value: json.loads(value) if isinstance(value, str) else value,
}


def read_own(record: Mapping[str, Any]) -> tuple[Run, Row]:
    """The run and the row of one line of the table.

    Raises:
        KeyError: a column is missing that a row cannot do without.
        ValueError: a cell holds something else than its column should.
    """
    return Run(**_fields_of(Run, record)), Row(**_fields_of(Row, record))


def _fields_of(cls: type[Run] | type[Row], record: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a class from cells; an empty cell is a missing number or an empty word."""
    found: dict[str, Any] = {}
    for spec in fields(cls):
        word = str(spec.type)
        reader = _READERS[word.removesuffix(" | None")]
        value = record.get(spec.name)
        if value is None or value == "":
            if word == "str":
                found[spec.name] = ""
            elif word.endswith(" | None"):
                found[spec.name] = None
            elif spec.default is MISSING and spec.default_factory is MISSING:
                raise KeyError(spec.name)
            continue
        found[spec.name] = reader(value)
    return found
