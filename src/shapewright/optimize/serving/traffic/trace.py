"""Read traces of requests: csv or jsonl with times of arrival, prompt and answer lengths, and shared prefixes."""

from __future__ import annotations

import csv
import json
import math
import re
from array import array
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np

from shapewright.core.errors import WorkloadError, first_line, short_path, short_repr
from shapewright.core.files import open_file
from shapewright.optimize.serving.request import LONGEST_LEN
from shapewright.optimize.serving.traffic.requests import MOST_REQUESTS, Traffic

MOST_FILE_BYTES = 512 * 2**20
_MOST_LINE = 2**20  # characters; a line of numbers takes some twenty times the memory of its text
_LATEST_S = 1e10
_NAMES: Mapping[str, tuple[str, ...]] = {
    "arrival_s": ("arrival", "arrived_at", "arrival_time_s", "timestamp_s", "timestamp"),  # timestamps are dates
    "prompt_len": ("input_len", "input_length", "num_prefill_tokens", "isl", "contexttokens"),
    "output_len": ("output_length", "num_decode_tokens", "osl", "generatedtokens"),
    "prefix_id": ("prefix", "session_id"),
    "prefix_len": ("prefix_length",),
}
_OPTIONAL = ("prefix_id", "prefix_len")


def read_trace(path: str | Path) -> Traffic:
    """Read a trace; times count from its first request, whether they are seconds or dates.

    Args:
        path: A file whose name ends in csv, with a header, or in jsonl, with an object per line.

    Raises:
        WorkloadError: the file is missing, too large, empty or malformed, or a row cannot be a request.
    """
    file = Path(path)
    shown = short_path(path)
    try:
        num_bytes = file.stat().st_size
        if num_bytes > MOST_FILE_BYTES:
            raise _trace_error(
                f"trace {shown} has {num_bytes} bytes, more than {MOST_FILE_BYTES}; give a part of it, such as an hour"
            )
        # Spreadsheets write a byte order mark.
        with TextIOWrapper(open_file(file), encoding="utf-8-sig", newline="") as text:
            lines = _lines(text, shown)
            rows = _read_json(lines, shown) if file.suffix.lower() in (".jsonl", ".ndjson") else _read_csv(lines, shown)
            return _collect(rows, shown)
    except OSError as error:
        raise _trace_error(
            f"trace {shown} cannot be read ({error.strerror or error}); give a csv or jsonl file"
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise _trace_error(f"trace {shown} is not csv or jsonl in UTF-8 ({first_line(error)}); convert it") from None


def _trace_error(words: str) -> WorkloadError:
    return WorkloadError(words, field="trace")


def _lines(text: TextIOWrapper, shown: str) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: text.readline(_MOST_LINE), ""), start=1):
        if len(line) == _MOST_LINE:
            raise _trace_error(f"trace {shown}, line {number} has {_MOST_LINE} characters; give a request in each line")
        yield line


def _read_csv(lines: Iterator[str], shown: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(lines)
    header = next(reader, [])
    columns = _columns(header, shown)
    indices = {field: header.index(name) for field, name in columns.items()}
    for cells in reader:
        if cells:
            _refuse_unit(columns["arrival_s"], cells[indices["arrival_s"] : indices["arrival_s"] + 1], shown)
            if len(cells) != len(header):
                raise _trace_error(
                    f"trace {shown}, line {reader.line_num}: {len(cells)} cells, the header has {len(header)}"
                )
            yield reader.line_num, {field: cells[index] for field, index in indices.items()}


def _read_json(lines: Iterator[str], shown: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    columns: dict[str, str] = {}
    known: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise _trace_error(f"trace {shown}, line {number} is not a JSON object; give one object per line")
        missing = [name for field, name in columns.items() if name not in row and field not in _OPTIONAL]
        if missing:
            raise _trace_error(f"trace {shown}, line {number} lacks {missing[0]!r}; give it in every line")
        if not columns or not row.keys() <= known:  # a later line may be the first that has a prefix
            columns |= _columns(list(row), shown)
            known |= row.keys()
        _refuse_unit(columns["arrival_s"], [row[columns["arrival_s"]]], shown)
        yield number, {field: row.get(name) for field, name in columns.items()}


def _refuse_unit(name: str, cells: list[Any], shown: str) -> None:
    """Refuse numbers in a column named timestamp: some traces have seconds there, others milliseconds."""
    if name.strip().lower() == "timestamp" and cells and re.fullmatch(r"[0-9.eE+-]+", str(cells[0]).strip()):
        raise _trace_error(
            f"trace {shown}: the numbers of column {name} have no unit; name it arrival_s if they are seconds, else "
            f"convert them"
        )


def _columns(header: list[str], shown: str) -> dict[str, str]:
    """Return the column of each field."""
    folded = {name.strip().lower(): name for name in header}
    found = {}
    for field, others in _NAMES.items():
        name = next((folded[one] for one in (field, *others) if one in folded), None)
        if name is not None:
            found[field] = name
        elif field not in _OPTIONAL:
            listed = ", ".join(name[:50] for name in header[:12]) or "none"
            raise _trace_error(
                f"trace {shown} has no column {field!r} (its columns: {listed}); give {', '.join(map(repr, _NAMES))}, "
                f"the last two only where prompts share a prefix"
            )
    if ("prefix_id" in found) != ("prefix_len" in found):
        raise _trace_error(f"trace {shown} has one of prefix_id and prefix_len; give both or neither")
    return found


def _collect(rows: Iterator[tuple[int, Mapping[str, Any]]], shown: str) -> Traffic:
    # Arrays: five million requests as Python's numbers take more than a gigabyte.
    arrival, columns = array("d"), [array("q") for _ in range(4)]
    prefixes: dict[object, int] = {}
    for line, row in rows:
        where = f"trace {shown}, line {line}"
        if len(arrival) == MOST_REQUESTS:
            raise _trace_error(f"trace {shown} has more than {MOST_REQUESTS} requests; give a part of it")
        time_s = _read_time(row["arrival_s"], where)
        if arrival and time_s < arrival[-1]:
            raise _trace_error(
                f"{where}: arrival_s={time_s:g} is before the {arrival[-1]:g} of the request above; sort the trace"
            )
        arrival.append(time_s)
        prompt_len = _read_length("prompt_len", row["prompt_len"], 1, LONGEST_LEN, where)
        output_len = _read_length("output_len", row["output_len"], 1, LONGEST_LEN, where)
        prefix, prefix_len = -1, 0
        name = row.get("prefix_id")
        if name not in (None, ""):
            if isinstance(name, list | dict):
                raise _trace_error(f"{where}: prefix_id={short_repr(name)} must be a number or a word")
            prefix = prefixes.setdefault(name, len(prefixes))
            prefix_len = _read_length("prefix_len", row["prefix_len"], 0, prompt_len, where)
        for column, value in zip(columns, (prompt_len, output_len, prefix, prefix_len), strict=True):
            column.append(value)
    if not arrival:
        raise _trace_error(f"trace {shown} holds no requests; give at least one")
    times = np.frombuffer(arrival)
    return Traffic(times - times[0], *(np.frombuffer(column, np.int64) for column in columns))


def _read_time(value: Any, where: str) -> float:
    """Return a time of arrival. [s]"""
    try:
        time_s = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        try:
            date = datetime.fromisoformat(value)
            # Local time would skip or repeat an hour of the trace where the clocks change here.
            time_s = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        except (TypeError, ValueError, OverflowError, OSError):
            time_s = math.nan
    if not 0.0 <= time_s <= _LATEST_S:
        raise _trace_error(
            f"{where}: arrival_s={short_repr(value)} must be seconds from 0 to {_LATEST_S:g}, or a date and time"
        )
    return time_s


def _read_length(name: str, value: Any, least: int, most: int, where: str) -> int:
    """Return a number of tokens."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most or number != int(number):
        allowed = f"a whole number of tokens from {least} to {most}"
        raise _trace_error(f"{where}: {name}={short_repr(value)} must be {allowed}")
    return int(number)
