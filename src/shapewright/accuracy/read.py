"""Read a measured file (parquet or csv) into columns; what cannot be used is counted with its reason."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.accuracy.columns import Columns, Labels
from shapewright.errors import MeasuredFileError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


# Largest number that a row may hold: sizes beyond it are no measurement, and their products would overflow.
_LARGEST = 1e15


@dataclass(frozen=True)
class Format:
    """Columns that a file must have.

    Attributes:
        numbers: Smallest allowed value of each column of numbers; a row with less, or without one, is left out.
        labels: Columns of words.
        positive: Columns of numbers that must be above zero in every row, such as times.
        optional: Columns of numbers that a row may lack.
    """

    numbers: Mapping[str, float]
    labels: tuple[str, ...]
    positive: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def number_names(self) -> tuple[str, ...]:
        """All columns of numbers."""
        return (*self.numbers, *self.positive, *self.optional)


def read_columns(path: Path, layout: Format, skipped: Counter[str]) -> Columns:
    """Read the columns of a format.

    Args:
        path: A ``.parquet`` or ``.csv`` file.
        layout: What it must hold; further columns are ignored.
        skipped: Gets the rows left out, by reason.

    Raises:
        MeasuredFileError: the file cannot be read, lacks a column, or holds words where numbers belong.
        MissingExtraError: reading parquet needs pyarrow.
    """
    raw = _read_parquet(path, layout) if path.suffix == ".parquet" else _read_csv(path, layout, skipped)
    usable = np.ones(raw.num_rows, dtype=bool)
    for name in (*layout.numbers, *layout.positive):
        column = raw.numbers[name]
        least = layout.numbers.get(name)
        with np.errstate(invalid="ignore"):
            fine = (column <= _LARGEST) & (column > 0.0 if least is None else column >= least)
            if least is not None:
                fine &= column == np.floor(column)
        wrong = usable & ~fine
        if wrong.any():
            wanted = "a number above 0" if least is None else f"a whole number of at least {least:g}"
            skipped[f"{name} is not {wanted} (such as {column[wrong][0]:g})"] += int(wrong.sum())
        usable &= fine
    return raw if usable.all() else raw.take(usable)


def _read_parquet(path: Path, layout: Format) -> Columns:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError(
            f"reading {path.name} needs pyarrow, which is not installed; run: pip install 'shapewright[fit]'"
        ) from error
    try:
        present = pq.read_schema(path).names
        _require_columns(path, layout, present)
        table = pq.read_table(path, columns=[*layout.number_names, *layout.labels])
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, MeasuredFileError):
            raise
        raise MeasuredFileError(
            f"{path.name} cannot be read as parquet ({_first_line(error)}); fetch it anew"
        ) from error
    numbers = {}
    for name in layout.number_names:
        column = table.column(name)
        if not (
            pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)
        ):
            raise MeasuredFileError(f"{path.name}: column {name!r} holds {column.type}, not numbers")
        values = column.cast(pa.float64() if not pa.types.is_boolean(column.type) else pa.int8())
        numbers[name] = np.asarray(values.to_numpy(), dtype=float)
    labels = {}
    for name in layout.labels:
        words = table.column(name).cast(pa.string()).fill_null("").dictionary_encode().combine_chunks()
        if isinstance(words, pa.ChunkedArray):
            words = (
                pa.concat_arrays(words.chunks) if words.num_chunks else pa.array([], pa.string()).dictionary_encode()
            )
        labels[name] = Labels(np.asarray(words.indices.to_numpy(), dtype=np.int64), tuple(words.dictionary.to_pylist()))
    return Columns(table.num_rows, numbers, labels)


def _read_csv(path: Path, layout: Format, skipped: Counter[str]) -> Columns:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            _require_columns(path, layout, reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MeasuredFileError(f"{path.name} cannot be read as csv ({_first_line(error)}); fetch it anew") from error
    numbers = {}
    for name in layout.number_names:
        numbers[name] = np.array([_number(row[name]) for row in rows], dtype=float)
        if name in layout.optional:  # of the other columns a missing number is a reason to leave the row out
            words = [row[name] for row in rows if _is_word(row[name])]
            if words:
                skipped[f"{name} holds {words[0]!r}, not a number: taken as missing"] += len(words)
    labels = {name: Labels.of([row[name] or "" for row in rows]) for name in layout.labels}
    return Columns(len(rows), numbers, labels)


def _number(text: str | None) -> float:
    """A number of a csv cell; an empty cell, or a word, is missing, and a truth is 0 or 1."""
    word = (text or "").strip()
    truths = {"": np.nan, "true": 1.0, "false": 0.0}
    try:
        return truths[word.lower()] if word.lower() in truths else float(word)
    except ValueError:
        return np.nan


def _is_word(text: str | None) -> bool:
    """Whether a csv cell holds something that is no number."""
    word = (text or "").strip().lower()
    return word not in ("", "nan") and np.isnan(_number(word))


def _require_columns(path: Path, layout: Format, present: Any) -> None:
    missing = [name for name in (*layout.labels, *layout.number_names) if name not in present]
    if missing:
        raise MeasuredFileError(
            f"{path.name} lacks column{'s' * (len(missing) > 1)} {', '.join(missing)} "
            f"(it has {', '.join(map(str, present)) or 'none'}); rename its columns or leave the file out"
        )


def _first_line(error: BaseException) -> str:
    """The first line of an error of a library, without its full stop."""
    words = str(error).strip().splitlines() or [type(error).__name__]
    return words[0][:200].rstrip(".")
