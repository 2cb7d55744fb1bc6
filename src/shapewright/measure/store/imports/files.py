"""Import files of measurements: detect the format of each, read it, and store all rows in one transaction."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import MeasuredFileError, ShapewrightError, short_repr
from shapewright.core.files import open_file
from shapewright.core.records import dataclass
from shapewright.core.units import find_time_columns
from shapewright.measure.accuracy.measured_files import reading_parquet
from shapewright.measure.store.database import Store
from shapewright.measure.store.imports.campaign import Environment, read_campaign, read_environment, read_lines
from shapewright.measure.store.imports.logs import (
    filter_log,
    is_cookbook,
    is_mamf,
    read_cookbook,
    read_header,
    read_mamf,
)
from shapewright.measure.store.imports.measured import Measurement, Overrides, drop_untimed, make_rows
from shapewright.measure.store.imports.tables import EXPORT_COLUMNS, READERS, UNSUPPORTED_TABLES, read_exported
from shapewright.measure.store.record import Row, Run

ENVIRONMENT_FILE = "environment.jsonl"
_MOST_CHARACTERS = 64 << 20
"""Most characters of a file of records, which has some hundred for each."""
# Errors of a record with a missing column or a value of the wrong type.
_ROW_ERRORS = (KeyError, ValueError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError)


@dataclass
class ImportResult:
    """Numbers of imported and skipped rows.

    Attributes:
        counts: Rows ``added``, ``replaced`` and ``kept``; see Store.add_all.
        skipped: Number of rows that were not imported, by file and reason.
    """

    counts: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, dict[str, int]] = field(default_factory=dict)


def import_files(
    target: str | Path,
    files: Sequence[str | Path],
    overrides: Overrides | None = None,
    *,
    command: str = "",
    on_step: Callable[[str], None] = lambda _step: None,
) -> ImportResult:
    """Import files of measurements into a store, which is opened after all files have been read.

    Args:
        target: The store; it is created if it does not exist.
        files: Tables (parquet, csv), logs, or records (.jsonl); their format is detected from their contents.
        overrides: Device, library and dtype, for files that do not contain them.
        command: Command line, which the rows' runs record.
        on_step: Called with a description of the next step.

    Raises:
        MeasuredFileError: a file is missing, damaged, of unknown format, or does not name the measured device.
        StoreError: the rows cannot be stored; the store is not modified.
    """
    given = overrides or Overrides()
    if given.dtype:
        given = replace(given, dtype=get_dtype(given.dtype).name)
    result = ImportResult()
    runs: list[Run] = []
    rows: list[Row] = []
    for file in files:
        path, skipped = Path(file), Counter[str]()
        if path.name == ENVIRONMENT_FILE:  # read together with the records in its folder
            continue
        on_step(f"reading {path.name}")
        found_runs, found_rows = _read_file(path, given, skipped, command)
        runs += found_runs
        rows += found_rows
        if skipped:
            result.skipped[str(path)] = dict(skipped.most_common())
    if not rows:
        reasons = (
            "; ".join(sorted({reason for counts in result.skipped.values() for reason in counts}))
            or "the files are empty"
        )
        raise MeasuredFileError(f"no rows to import in {', '.join(map(str, files))} ({reasons}); give other files")
    on_step(f"storing {len(rows):,} rows")
    with Store(target) as store:
        result.counts = store.add_all(runs, rows)
    return result


def _read_file(path: Path, given: Overrides, skipped: Counter[str], command: str) -> tuple[list[Run], list[Row]]:
    if not path.is_file():
        raise MeasuredFileError(f"{path} is not a file; give a table (parquet, csv), a log or a .jsonl file of records")
    try:
        if path.suffix in (".parquet", ".csv"):
            columns, records = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
            if columns >= EXPORT_COLUMNS:
                return _exported_rows(path, records)
            measurements = _read_table(path, columns, records, given, skipped)
        else:
            with TextIOWrapper(open_file(path), encoding="utf-8") as file:
                text = file.read(_MOST_CHARACTERS + 1) if path.suffix == ".jsonl" else filter_log(file)
            if path.suffix == ".jsonl" and len(text) > _MOST_CHARACTERS:
                raise MeasuredFileError(f"{path} has more than {_MOST_CHARACTERS >> 20} Mi characters; split the file")
            measurements = _read_text(path, text, given, skipped)
        measurements = drop_untimed(_apply_overrides(measurements, given, path), skipped)
        return make_rows(measurements, command=command)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise MeasuredFileError(f"{path} cannot be read ({reason}); give a readable file") from error
    except ShapewrightError:
        raise
    except _ROW_ERRORS as error:
        raise MeasuredFileError(
            f"{path} has a malformed record ({_reason(error)}); correct it or leave it out"
        ) from error


def _exported_rows(path: Path, records: Iterable[Mapping[str, Any]]) -> tuple[list[Run], list[Row]]:
    try:
        pairs = [read_exported(record) for record in records]
    except _ROW_ERRORS as error:
        raise MeasuredFileError(
            f"{path} is not a complete export of a store ({error!r}); export the store again"
        ) from error
    return list({run.run_id: run for run, _ in pairs}.values()), [row for _, row in pairs]


def _read_table(
    path: Path, columns: frozenset[str], records: Iterable[Mapping[str, Any]], given: Overrides, skipped: Counter[str]
) -> Iterator[Measurement]:
    if {"block", "case"} <= columns:
        yield from read_campaign(records, _environment_of(path), given, skipped)
        return
    for column, reason in UNSUPPORTED_TABLES.items():
        if column in columns:
            raise MeasuredFileError(f"{path} contains {reason}")
    reader = next((read for wanted, read in READERS if wanted <= columns), None)
    if reader is None:
        raise MeasuredFileError(
            f"{path} has the columns of no supported table ({', '.join(sorted(columns)[:8])}, ...); docs/measuring.md "
            "lists what can be imported"
        )
    for record in records:
        try:
            yield from reader(record)
        except _ROW_ERRORS as error:
            skipped[_reason(error)] += 1


def _read_text(path: Path, text: str, given: Overrides, skipped: Counter[str]) -> Iterator[Measurement]:
    header = read_header(text)
    known = Overrides(
        device=given.device or header.device,
        library=given.library or header.library,
        dtype=given.dtype or (get_dtype(header.dtype).name if header.dtype else ""),
    )
    if is_cookbook(text):
        yield from read_cookbook(text, known)
    elif is_mamf(text):
        yield from read_mamf(text, known)
    elif path.suffix == ".jsonl":
        try:
            records = list(read_lines(text))
        except ValueError as error:
            raise MeasuredFileError(f"{path}: {error}; remove the line or leave out the file") from error
        if not all(isinstance(record, dict) and {"block", "case"} <= set(record) for record in records):
            raise MeasuredFileError(f"{path} is not a file of records: a line lacks block or case")
        yield from read_campaign(records, _environment_of(path), given, skipped)
    else:
        raise MeasuredFileError(
            f"{path} is not a table, and not a log of EleutherAI/cookbook or mamf-finder; docs/measuring.md lists what "
            "can be imported"
        )


def _apply_overrides(measurements: Iterable[Measurement], given: Overrides, path: Path) -> Iterator[Measurement]:
    """Replace or complete device and library of measurements; a missing device is an error."""
    for one in measurements:
        known = replace(one, device=given.device or one.device, library=given.library or one.library)
        if not known.device:
            raise MeasuredFileError(f"{path} does not name the measured device; give the device")
        yield known if known.library else replace(known, library=f"unknown, from {path.name}")


def _environment_of(path: Path) -> Environment:
    """Read environment.jsonl in the folder of a file of records; an empty Environment if there is none."""
    environment_path = path.with_name(ENVIRONMENT_FILE)
    try:
        is_there = environment_path.is_file()
        return read_environment(environment_path.read_text(encoding="utf-8").splitlines() if is_there else ())
    except _ROW_ERRORS as error:
        raise MeasuredFileError(f"{environment_path} is malformed ({error}); correct it or give the device") from error


def _read_csv(path: Path) -> tuple[frozenset[str], list[dict[str, Any]]]:
    # utf-8-sig removes the byte order mark that spreadsheets write before the first column name.
    with TextIOWrapper(open_file(path), newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns, records = frozenset(reader.fieldnames or ()), list(reader)
    for name, (other, seconds) in find_time_columns(("latency_s",), columns).items():
        columns |= {name}
        for record in records:
            record[name] = _scaled(record.get(other), seconds)
    return columns, records


def _scaled(cell: str | None, factor: float) -> str | None:
    """A cell times a factor; a cell that is not a number is returned unchanged, for its reader to report."""
    try:
        return None if cell is None else repr(float(cell) * factor)
    except ValueError:
        return cell


def _read_parquet(path: Path) -> tuple[frozenset[str], Iterator[dict[str, Any]]]:
    with reading_parquet(path) as parquet:
        table = parquet.read_table(path)
        table.validate(full=True)
    return frozenset(table.column_names), (record for batch in table.to_batches() for record in batch.to_pylist())


def _reason(error: Exception) -> str:
    """Why a record cannot be read."""
    if isinstance(error, ShapewrightError):
        return str(error)
    if isinstance(error, KeyError):
        return f"column {short_repr(error.args[0])} is missing"
    return f"a cell is not a number ({error})"[:160]
