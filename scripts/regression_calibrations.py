"""Calibration files of the regression grid: which values a user's record may have, and how others are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from regression_answers import Answer, checksum

from shapewright.core.errors import CalibrationError
from shapewright.pricing.calibration.schema import check_record

# A record of the package for each kind that a user's file may hold.
_RECORDS = {
    "gemm": "gemm/l40s.json", "moe": "moe/h200-sxm-141gb.json", "attention": "attention/h100-sxm-80gb.json",
    "pointwise": "pointwise/a100-sxm.json", "collectives": "collectives/l40s.json",
}  # fmt: skip
_ABSENT = object()
_VALUES: tuple[Any, ...] = (
    _ABSENT, None, True, "x", "free", -1, 0, 0.05, 0.5, 3, 1500.0, 10**7, 10**30, [], ["7", 7], {}, {"7": "x"},
)  # fmt: skip


def list_kinds() -> list[str]:
    """Kinds of records."""
    return list(_RECORDS)


def answer_changes(kind: str) -> dict[str, Answer]:
    """Change each part of a record in turn: how many of the other values are refused, and in which words."""
    path = files("shapewright.pricing") / "data" / _RECORDS[kind]
    raw = json.loads(path.read_text(encoding="utf-8"))
    known = {name: raw[name] for name in ("id", "devices", "architecture", "parameters", "interval", "provenance")}
    answers: dict[str, Answer] = {f"{kind}: as it is": _refusals(kind, [known])}
    for place in _list_places(known):
        words = ".".join(map(str, place))
        answers[f"{kind}: {words}"] = _refusals(kind, [_change(known, place, value) for value in _VALUES])
    return answers


def _refusals(kind: str, records: list[Any]) -> Answer:
    messages = []
    for record in records:
        try:
            check_record(kind, record, where=kind)
        except CalibrationError as error:
            messages.append(str(error))
    return {"refused": float(len(messages)), "messages": checksum("\n".join(messages))}


def _list_places(record: dict[str, Any]) -> Iterator[tuple[str | int, ...]]:
    """List the places of a record: of those with one name and depth the first, of lists the first entry."""
    seen: set[tuple[int, str | int]] = set()
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), record)]
    while waiting:
        place, value = waiting.pop()
        if place and (len(place), place[-1]) not in seen:
            seen.add((len(place), place[-1]))
            yield place
        if isinstance(value, dict):
            waiting += [((*place, key), each) for key, each in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [((*place, 0), each) for each in value[:1]]


def _change(value: Any, place: tuple[str | int, ...], new: object) -> Any:
    """Return a copy of nested objects and lists with another value at a place."""
    copied = value.copy()
    if len(place) > 1:
        copied[place[0]] = _change(value[place[0]], place[1:], new)
    elif new is _ABSENT:
        del copied[place[0]]
    else:
        copied[place[0]] = new
    return copied
