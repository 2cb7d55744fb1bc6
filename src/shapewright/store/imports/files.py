"""Files of measurements: find out what each is, read it, and bring its rows into a store, all or none."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shapewright.dtypes import get_dtype
from shapewright.errors import MeasuredFileError, ShapewrightError
from shapewright.parquet import reading_parquet
from shapewright.store.file import Store
from shapewright.store.imports import own
from shapewright.store.imports.campaign import read_campaign, read_environment, read_lines
from shapewright.store.imports.logs import is_cookbook, is_mamf, keep_told, read_cookbook, read_header, read_mamf
from shapewright.store.imports.measured import Measured, Overrides, rows_of, timed
from shapewright.store.imports.tables import NO_OPERATION, READERS
from shapewright.store.record import Row, Run
from shapewright.units import times_in_other_units

ENVIRONMENT_FILE = "environment.jsonl"
# What a row of a file may make go wrong: a column that is missing, or holds something else.
_ROW_ERRORS = (KeyError, ValueError, TypeError, IndexError, ZeroDivisionError)


@dataclass
class Imported:
    """What came of reading files.

    Attributes:
        counts: Rows ``added``, ``replaced`` and ``kept`` out, as Store.add_all says.
        skipped: Rows left out, by file and reason.
    """

    counts: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, dict[str, int]] = field(default_factory=dict)


def import_files(
    target: str | Path,
    files: Sequence[str | Path],
    overrides: Overrides | None = None,
    *,
    command: str = "",
    on_step: Callable[[str], None] = lambda _words: None,
) -> Imported:
    """Read files of measurements into a store; it is opened when all of them have been read.

    Args:
        target: The store; it is made where it is not there.
        files: Tables (parquet, csv), logs, or records (.jsonl), told apart by what is in them.
        overrides: Device, library and dtype, where the files do not say them.
        command: What was asked for, which the rows' runs keep.
        on_step: Called with what is done next, in words.

    Raises:
        MeasuredFileError: a file is missing, broken, of no known form, or does not say what was measured.
        StoreError: the store cannot take the rows; it stays as it was.
    """
    given = overrides or Overrides()
    if given.dtype:
        given = replace(given, dtype=get_dtype(given.dtype).name)
    result = Imported()
    runs: list[Run] = []
    rows: list[Row] = []
    for file in files:
        path, skipped = Path(file), Counter[str]()
        if path.name == ENVIRONMENT_FILE:  # read with the records that it stands beside
            continue
        on_step(f"reading {path.name}")
        found_runs, found_rows = _read_file(path, given, skipped, command)
        runs += found_runs
        rows += found_rows
        if skipped:
            result.skipped[str(path)] = dict(skipped.most_common())
    if not rows:
        reasons = "; ".join(sorted({reason for counts in result.skipped.values() for reason in counts})) or "no rows"
        raise MeasuredFileError(f"nothing to import in {', '.join(map(str, files))} ({reasons}); give other files")
    on_step(f"storing {len(rows):,} rows")
    with Store(target) as store:
        result.counts = store.add_all(runs, rows)
    return result


def _read_file(path: Path, given: Overrides, skipped: Counter[str], command: str) -> tuple[list[Run], list[Row]]:
    if not path.is_file():
        raise MeasuredFileError(f"{path} is not a file; give a table (parquet, csv), a log or a .jsonl of records")
    try:
        if path.suffix in (".parquet", ".csv"):
            columns, records = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
            if columns >= own.COLUMNS:
                return _own_rows(path, records)
            measured = _of_table(path, columns, records, given, skipped)
        else:
            with path.open(encoding="utf-8") as file:
                text = file.read() if path.suffix == ".jsonl" else keep_told(file)
            measured = _of_text(path, text, given, skipped)
        return rows_of(timed(_overridden(measured, given, path), skipped), command=command)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise MeasuredFileError(f"{path} cannot be read ({reason}); give a readable file") from error


def _own_rows(path: Path, records: Iterable[Mapping[str, Any]]) -> tuple[list[Run], list[Row]]:
    try:
        pairs = [own.read_own(record) for record in records]
    except _ROW_ERRORS as error:
        raise MeasuredFileError(
            f"{path} is no whole export of a store ({error!r}); export it again with 'shapewright store export'"
        ) from error
    return list({run.run_id: run for run, _ in pairs}.values()), [row for _, row in pairs]


def _of_table(
    path: Path, columns: frozenset[str], records: Iterable[Mapping[str, Any]], given: Overrides, skipped: Counter[str]
) -> Iterator[Measured]:
    if {"block", "case"} <= columns:
        yield from read_campaign(records, _environment_of(path), given, skipped)
        return
    for column, words in NO_OPERATION.items():
        if column in columns:
            raise MeasuredFileError(f"{path} holds {words}")
    reader = next((read for wanted, read in READERS if wanted <= columns), None)
    if reader is None:
        raise MeasuredFileError(
            f"{path} has columns of no known table ({', '.join(sorted(columns)[:8])}, ...); docs/measuring.md lists "
            "what can be imported"
        )
    for record in records:
        try:
            yield from reader(record)
        except _ROW_ERRORS as error:
            skipped[_reason(error)] += 1


def _of_text(path: Path, text: str, given: Overrides, skipped: Counter[str]) -> Iterator[Measured]:
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
            raise MeasuredFileError(f"{path}: {error}; leave the file out or cut that line") from error
        if any(not {"block", "case"} <= set(record) for record in records):
            raise MeasuredFileError(f"{path} has lines without block and case, so it is no file of records")
        yield from read_campaign(records, _environment_of(path), given, skipped)
    else:
        raise MeasuredFileError(
            f"{path} is no log of EleutherAI/cookbook or mamf-finder, and no table; docs/measuring.md lists what can "
            "be imported"
        )


def _overridden(measured: Iterable[Measured], given: Overrides, path: Path) -> Iterator[Measured]:
    """Measurements with what the caller says of them; what nobody says is an error."""
    for one in measured:
        known = replace(one, device=given.device or one.device, library=given.library or one.library)
        if not known.device:
            raise MeasuredFileError(f"{path} does not say which device was measured; give it with --device")
        yield known if known.library else replace(known, library=f"unknown, from {path.name}")


def _environment_of(path: Path) -> Any:
    """What the file beside a file of records says; nothing where there is none."""
    beside = path.with_name(ENVIRONMENT_FILE)
    try:
        return read_environment(beside.read_text(encoding="utf-8").splitlines() if beside.is_file() else ())
    except (ValueError, KeyError, TypeError) as error:
        raise MeasuredFileError(f"{beside} is malformed ({error}); mend it or give --device") from error


def _read_csv(path: Path) -> tuple[frozenset[str], list[dict[str, Any]]]:
    # A byte order mark, as spreadsheets write it, is no part of the first name.
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns, records = frozenset(reader.fieldnames or ()), list(reader)
    for name, (other, seconds) in times_in_other_units(("latency_s",), columns).items():
        columns |= {name}
        for record in records:
            record[name] = _scaled(record.get(other), seconds)
    return columns, records


def _scaled(cell: str | None, factor: float) -> str | None:
    """A cell times a factor; what is no number stays, and is refused where it is read."""
    try:
        return None if cell is None else repr(float(cell) * factor)
    except ValueError:
        return cell


def _read_parquet(path: Path) -> tuple[frozenset[str], Iterator[dict[str, Any]]]:
    with reading_parquet(path) as parquet:
        table = parquet.read_table(path)
    return frozenset(table.column_names), (record for batch in table.to_batches() for record in batch.to_pylist())


def _reason(error: Exception) -> str:
    """One reason for a row that cannot be read."""
    if isinstance(error, ShapewrightError):
        return str(error)
    return f"column {error} is missing" if isinstance(error, KeyError) else f"a cell is no number ({error})"[:160]
