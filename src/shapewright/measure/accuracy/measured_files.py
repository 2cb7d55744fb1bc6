"""Read measured csv and parquet files into columns; unusable rows are counted by reason."""

from __future__ import annotations

import csv
from collections import Counter
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import MeasuredFileError, MissingExtraError, first_line, short_repr
from shapewright.core.files import open_file
from shapewright.core.records import dataclass
from shapewright.core.units import find_time_columns
from shapewright.measure.accuracy.chunk import Columns, Labels

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import ModuleType

    from numpy.typing import NDArray

    Array = NDArray[np.float64]


def read_csv(
    path: Path, number_names: Sequence[str], label_names: Sequence[str]
) -> tuple[Columns, dict[str, tuple[str, int]]]:
    """Read numeric and label columns; a time in seconds may be given in another unit, as latency_us for latency_s.

    Returns:
        The columns, NaN for missing numbers; by numeric column that holds text, the first text and how many there are.

    Raises:
        MeasuredFileError: the file cannot be read or lacks a column.
    """
    names = tuple(dict.fromkeys((*label_names, *number_names)))
    try:
        # Skip the byte order mark that spreadsheets write.
        with TextIOWrapper(open_file(path), newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            columns_of_times = find_time_columns(names, header)
            require_columns(path, [name for name in names if name not in columns_of_times], header)
            places = [header.index(columns_of_times.get(name, (name, 1.0))[0]) for name in names]
            cells: list[list[str]] = [[] for _ in names]
            for row in reader:
                if row:  # skip empty lines
                    for column, place in zip(cells, places, strict=True):
                        column.append(row[place] if place < len(row) else "")
    except FileNotFoundError:
        raise MeasuredFileError(f"{path} does not exist; give a table with the columns of docs/measuring.md") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MeasuredFileError(
            f"{path.name} cannot be read as csv ({first_line(error)}); download it again"
        ) from error
    columns = dict(zip(names, cells, strict=True))
    numbers, words = {}, {}
    for name in number_names:
        parsed = [read_number(cell) for cell in columns[name]]
        unit = columns_of_times.get(name, (name, 1.0))[1]
        numbers[name] = np.array([number for number, _ in parsed], dtype=float) * unit
        among = [cell for cell, (_, is_word) in zip(columns[name], parsed, strict=True) if is_word]
        if among:
            words[name] = (among[0].strip()[:60], len(among))
    labels = {name: Labels.of(columns[name]) for name in label_names}
    return Columns(len(cells[0]), numbers, labels), words


def read_number(text: str) -> tuple[float, bool]:
    """Return the number in a cell, and whether the cell holds text instead; an empty cell is NaN, a truth value 0 or 1.

    >>> read_number("3e8"), read_number("true"), read_number("many")
    ((300000000.0, False), (1.0, False), (nan, True))
    """
    word = text.strip().casefold()
    try:
        return float(word), False
    except ValueError:
        truths = {"": np.nan, "true": 1.0, "false": 0.0}
        return truths.get(word, np.nan), word not in truths


def require_columns(path: Path, names: Sequence[str], present: Any) -> None:
    """Reject a file that lacks a column.

    Raises:
        MeasuredFileError: it lacks one.
    """
    missing = [name for name in names if name not in present]
    if missing:
        found = ", ".join(repr(str(name)[:50]) for name in list(present)[:30]) or "none"
        raise MeasuredFileError(
            f"{path.name} lacks column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))} (it has {found}); "
            f"add or rename columns (docs/measuring.md, Tables of your own), or leave the file out"
        )


@contextmanager
def reading_parquet(path: Path) -> Iterator[ModuleType]:
    """Provide ``pyarrow.parquet`` to read a file, and translate its errors.

    Raises:
        MeasuredFileError: the file does not exist, or is not valid parquet.
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError(
            f"reading {path.name} needs pyarrow, which is not installed; run: pip install 'shapewright[fit]'"
        ) from error
    try:
        yield pq
    except MeasuredFileError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise MeasuredFileError(f"{path} cannot be read as parquet ({first_line(error)}); replace the file") from error


def read_parquet(
    path: Path, number_names: Sequence[str], label_names: Sequence[str]
) -> tuple[Columns, dict[str, tuple[str, int]]]:
    """Read numeric and label columns; arguments, results and errors as in read_csv.

    Raises:
        MeasuredFileError: the file cannot be read, lacks a column, or holds other types in one.
        MissingExtraError: pyarrow is not installed.
    """
    with reading_parquet(path) as parquet:
        require_columns(path, (*label_names, *number_names), parquet.read_schema(path).names)
        table = parquet.read_table(path, columns=[*dict.fromkeys((*number_names, *label_names))])
        table.validate(full=True)  # texts that are not UTF-8
    import pyarrow as pa

    numbers: dict[str, Array] = {}
    words: dict[str, tuple[str, int]] = {}
    for name in number_names:
        try:
            numbers[name], found = _read_numbers(table.column(name))
        except pa.ArrowException as error:
            held = table.column(name).type
            raise MeasuredFileError(f"{path.name}: column {name!r} holds {held}, not numbers; convert it") from error
        if found is not None:
            words[name] = found
    labels = {}
    for name in label_names:
        try:
            labels[name] = _read_labels(table.column(name))
        except pa.ArrowException as error:
            held = table.column(name).type
            raise MeasuredFileError(f"{path.name}: column {name!r} holds {held}, not words; convert it") from error
    return Columns(table.num_rows, numbers, labels), words


def _read_numbers(column: Any) -> tuple[Array, tuple[str, int] | None]:
    """Return the numbers of a column, NaN for missing ones; the first text among them, and how many there are."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_boolean(kind):
        column, kind = column.cast(pa.int8()), pa.int8()
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        # Parse distinct texts only. A date or a list cannot be cast to text, which raises.
        if pa.types.is_temporal(kind):
            raise pa.ArrowInvalid("a date is no number")
        labels = _read_labels(column)
        parsed = [read_number(word) for word in labels.words]
        values = np.array([number for number, _ in parsed], dtype=float)[labels.codes]
        is_word = np.array([word for _, word in parsed], dtype=bool)[labels.codes]
        if not is_word.any():
            return values, None
        return values, (labels[int(np.flatnonzero(is_word)[0])], int(is_word.sum()))
    # Integers beyond 2**53 lose digits; they are rejected as sizes later.
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), dtype=float), None


def _read_labels(column: Any) -> Labels:
    """Return the labels of a column; a missing one is the empty string."""
    import pyarrow as pa

    words = column.cast(pa.string()).fill_null("").dictionary_encode().combine_chunks()
    if isinstance(words, pa.ChunkedArray):
        words = pa.concat_arrays(words.chunks) if words.num_chunks else pa.array([], pa.string()).dictionary_encode()
    return Labels(np.asarray(words.indices.to_numpy(), dtype=np.int64), tuple(words.dictionary.to_pylist()))


# Longest word of a label column, which messages quote. [character]
_LONGEST_WORD = 500
# Largest valid number: larger sizes are errors, and products of them would overflow.
_LARGEST = 1e15
# Odd multiplier that mixes the bits of a column, as in hash functions: 2**64 over the golden ratio.
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Format:
    """Columns that a file must have.

    Attributes:
        numbers: Smallest allowed value of each integer column; rows with less, or without a value, are skipped.
        labels: Label columns.
        positive: Numeric columns that must be above zero in every row, such as times.
        optional: Numeric columns that may lack values.
    """

    numbers: Mapping[str, float]
    labels: tuple[str, ...]
    positive: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def number_names(self) -> tuple[str, ...]:
        """All numeric columns."""
        return (*self.numbers, *self.positive, *self.optional)


def read_columns(path: Path, layout: Format, skipped: Counter[str]) -> Columns:
    """Read the columns of a format.

    Args:
        path: A ``.parquet`` or ``.csv`` file.
        layout: Required columns; further columns are ignored.
        skipped: Receives the number of skipped rows by reason.

    Raises:
        MeasuredFileError: the file cannot be read, lacks a column, or holds text in a numeric one or a long word.
        MissingExtraError: reading parquet needs pyarrow.
    """
    read = read_parquet if path.suffix == ".parquet" else read_csv
    raw, words = read(path, layout.number_names, layout.labels)
    for name in layout.labels:
        longest = max(raw.labels[name].words, key=len, default="")
        if len(longest) > _LONGEST_WORD:
            raise MeasuredFileError(
                f"{path.name}: column {name!r} holds {short_repr(longest)} of {len(longest)} characters; words have "
                f"at most {_LONGEST_WORD}, so repair the file"
            )
    for name in layout.optional:  # in the other columns a missing number skips the row
        if name in words:
            first, count = words[name]
            skipped[f"{name} holds {short_repr(first)}, not a number: treated as missing"] += count
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
            wanted = "a number above 0" if least is None else f"an integer of at least {least:g}"
            first_wrong = column[wrong][0]
            such = short_repr(words[name][0]) if name in words and np.isnan(first_wrong) else f"{first_wrong:g}"
            skipped[f"{name} is not {wanted} (such as {such})"] += int(wrong.sum())
        usable &= fine
    return raw if usable.all() else raw.take(usable)


def count_repeated(columns: Columns) -> int:
    """Count rows that equal an earlier one in every column, measurement included."""
    if not columns.num_rows:
        return 0
    mixed: NDArray[np.uint64] = np.zeros(columns.num_rows, dtype=np.uint64)
    coded = (label.codes.astype(float) for label in columns.labels.values())
    for column in (*columns.numbers.values(), *coded):
        mixed = (mixed ^ np.ascontiguousarray(column, dtype=float).view(np.uint64)) * _MIX
        mixed ^= mixed >> np.uint64(29)
    return columns.num_rows - len(np.unique(mixed))
