"""Read a measured file into columns and keep its usable rows; what cannot be used is counted with its reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shapewright.accuracy.columns import Columns
from shapewright.accuracy.read_csv import read_csv
from shapewright.accuracy.read_parquet import read_parquet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray


# Largest number that a row may hold: sizes beyond it are no measurement, and their products would overflow.
_LARGEST = 1e15
# Odd multiplier that spreads the bits of a column over 64: the golden ratio's, as hash functions take it.
_MIX = np.uint64(0x9E3779B97F4A7C15)


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
        MeasuredFileError: the file cannot be read, lacks a column, or holds no numbers where numbers belong.
        MissingExtraError: reading parquet needs pyarrow.
    """
    read = read_parquet if path.suffix == ".parquet" else read_csv
    raw, words = read(path, layout.number_names, layout.labels)
    for name in layout.optional:  # of the other columns a missing number is a reason to leave the row out
        if name in words:
            first, count = words[name]
            skipped[f"{name} holds {first!r}, not a number: taken as missing"] += count
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
            first_wrong = column[wrong][0]
            such = repr(words[name][0]) if name in words and np.isnan(first_wrong) else f"{first_wrong:g}"
            skipped[f"{name} is not {wanted} (such as {such})"] += int(wrong.sum())
        usable &= fine
    return raw if usable.all() else raw.take(usable)


def count_repeated(columns: Columns) -> int:
    """Rows that are equal to an earlier one in every column, measurement included."""
    if not columns.num_rows:
        return 0
    mixed: NDArray[np.uint64] = np.zeros(columns.num_rows, dtype=np.uint64)
    coded = (label.codes.astype(float) for label in columns.labels.values())
    for column in (*columns.numbers.values(), *coded):
        mixed = (mixed ^ np.ascontiguousarray(column, dtype=float).view(np.uint64)) * _MIX
        mixed ^= mixed >> np.uint64(29)
    return columns.num_rows - len(np.unique(mixed))
