"""Answers of the regression grid as named cells, and those of command lines."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shlex
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shapewright.app.cli.main import main

# A number, the sum of a column with a mean of its logarithms, or a text.
Cell = float | tuple[float, float] | str
Answer = dict[str, Cell]

_ROOT = Path(__file__).resolve().parent.parent
NEAR_ZERO = 1e-12
# Longer lists become columns.
_MOST_ROWS = 2
# Parts of an output that repeat the question, and times of the machine.
_LEFT_OUT = re.compile(
    r"schema_version|config|device|workload|layout|request|server|formats|elapsed_s|.*baseline\.(config|layout)"
    r"|calibration|calibration_records|.*\.calibration|.*\.notes?"
    r"|.*\.gains\.\*\.module"  # in an order that rounding decides where gains are equal
)
_NUMBER = re.compile(r"\d[\d.,]*")
# Weights by the place of a row, so that a column also changes where rows change places.
_WEIGHTS = (0.5, 0.8, 0.9, 1.1, 1.3, 1.4)


def answer_command(line: str) -> Answer:
    """Run a command line in this process: its refusal, or its exit code and the cells of its output."""
    output, errors = io.StringIO(), io.StringIO()
    code: Any = 0
    # Paths of a command are those of the repository.
    with contextlib.chdir(_ROOT), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main(shlex.split(line))
        except SystemExit as stop:
            code = stop.code
    if code == 2:
        return {"refused": errors.getvalue().strip().removeprefix("shapewright: ")}
    answer: Answer = {"exit code": float(code)}
    text = output.getvalue()
    if text.startswith(("{", "[")):
        return answer | dict(list_cells(json.loads(text), ""))
    lines = (each.strip() for each in text.splitlines())
    return answer | {f"line {number}": each for number, each in enumerate(lines, 1) if each}


def list_cells(value: Any, path: str) -> Iterator[tuple[str, Cell]]:
    """List the cells of a part of an output; absent values have none."""
    if _LEFT_OUT.fullmatch(path):
        return
    if isinstance(value, Mapping):
        for key, each in value.items():
            name = shorten(str(key)) if len(str(key)) > 60 else str(key)
            yield from list_cells(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list | tuple) and len(value) > _MOST_ROWS:
        yield f"{path} (rows)", float(len(value))
        yield from list_columns([dict(list_cells(row, f"{path}.*")) for row in value])
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from list_cells(each, f"{path}.{index}")
    elif value is not None:
        yield path, float(value) if _is_number(value) else shorten(value)


def list_columns(rows: Iterable[Answer]) -> Iterator[tuple[str, Cell]]:
    """List the columns of some rows as cells: of numbers a summary, of texts one that all share, or a checksum."""
    columns: dict[str, list[Cell]] = {}
    for row in rows:
        for name, cell in row.items():
            columns.setdefault(name, []).append(cell)
    for name, cells in columns.items():
        numbers = [part for cell in cells if not isinstance(cell, str) for part in _parts(cell)]
        texts = [cell for cell in cells if isinstance(cell, str)]
        if numbers:
            yield name, summarize(numbers)
        if texts:
            told = texts[0] if len(set(texts)) == 1 else checksum(" ".join(texts))
            yield f"{name} (texts)", f"{len(texts)} {told}"


def _parts(cell: float | tuple[float, float]) -> tuple[float, ...]:
    return cell if isinstance(cell, tuple) else (cell,)


def summarize(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the sum of a column, and a weighted mean of its logarithms that small rows and the order also change."""
    logs = [math.log(max(abs(number), NEAR_ZERO)) for number in numbers]
    weighted = (_WEIGHTS[index % len(_WEIGHTS)] * each for index, each in enumerate(logs))
    return math.fsum(numbers), math.fsum(weighted) / len(numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shorten(value: Any) -> str:
    """Return a name or a truth value as it is, and of a text the numbers in it: wording may change."""
    text = str(value)
    if " " not in text:
        return text
    found = " ".join(each.rstrip(".,") for each in _NUMBER.findall(text))
    return f"text {found}".rstrip() if len(found) < 30 else f"text {checksum(found)}"


def checksum(text: str) -> str:
    """Return eight digits that tell texts apart."""
    return f"{zlib.crc32(text.encode()):08x}"
