"""Columns of a csv file, and what its cells can hold."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.accuracy.columns import Columns, Labels
from shapewright.errors import MeasuredFileError, first_line
from shapewright.units import times_in_other_units

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def read_csv(
    path: Path, number_names: Sequence[str], label_names: Sequence[str]
) -> tuple[Columns, dict[str, tuple[str, int]]]:
    """Read columns of numbers and of words; a time in seconds may stand in another unit, as latency_us for latency_s.

    Args:
        path: The file.
        number_names: Columns of numbers.
        label_names: Columns of words.

    Returns:
        The columns, NaN where a number is missing; by column of numbers that holds words, the first and how many.

    Raises:
        MeasuredFileError: the file cannot be read or lacks a column.
    """
    names = tuple(dict.fromkeys((*label_names, *number_names)))
    try:
        # A byte order mark, as spreadsheets write it, is no part of the first name.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            columns_of_times = times_in_other_units(names, header)
            require_columns(path, [name for name in names if name not in columns_of_times], header)
            places = [header.index(columns_of_times.get(name, (name, 1.0))[0]) for name in names]
            cells: list[list[str]] = [[] for _ in names]
            for row in reader:
                if row:  # an empty line is none
                    for column, place in zip(cells, places, strict=True):
                        column.append(row[place] if place < len(row) else "")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MeasuredFileError(f"{path.name} cannot be read as csv ({first_line(error)}); fetch it anew") from error
    columns = dict(zip(names, cells, strict=True))
    numbers, words = {}, {}
    for name in number_names:
        parsed = [read_number(cell) for cell in columns[name]]
        unit = columns_of_times.get(name, (name, 1.0))[1]
        numbers[name] = np.array([number for number, _ in parsed], dtype=float) * unit
        among = [cell for cell, (_, is_word) in zip(columns[name], parsed, strict=True) if is_word]
        if among:
            words[name] = (among[0].strip(), len(among))
    labels = {name: Labels.of(columns[name]) for name in label_names}
    return Columns(len(cells[0]), numbers, labels), words


def read_number(text: str) -> tuple[float, bool]:
    """A number in a cell, and whether the cell holds a word instead; an empty cell is missing, a truth is 0 or 1.

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
    """Refuse a file that lacks a column.

    Raises:
        MeasuredFileError: it does.
    """
    missing = [name for name in names if name not in present]
    if missing:
        raise MeasuredFileError(
            f"{path.name} lacks column{'s' * (len(missing) > 1)} {', '.join(missing)} "
            f"(it has {', '.join(map(str, present)) or 'none'}); add or rename columns (docs/measuring.md, "
            f"Tables of your own), or leave the file out"
        )
