"""Columns of a parquet file, whatever types its writer chose for numbers and words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.accuracy.columns import Columns, Labels
from shapewright.accuracy.read_csv import read_number, require_columns
from shapewright.errors import MeasuredFileError
from shapewright.parquet import reading_parquet

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[np.float64]


def read_parquet(
    path: Path, number_names: Sequence[str], label_names: Sequence[str]
) -> tuple[Columns, dict[str, tuple[str, int]]]:
    """Read columns of numbers and of words; arguments, results and errors as of read_csv.

    Raises:
        MeasuredFileError: the file cannot be read, lacks a column, or holds something else in one.
        MissingExtraError: pyarrow is not installed.
    """
    with reading_parquet(path) as parquet:
        require_columns(path, (*label_names, *number_names), parquet.read_schema(path).names)
        table = parquet.read_table(path, columns=[*dict.fromkeys((*number_names, *label_names))])
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
    """Numbers of a column, NaN where one is missing; a word among them, and how many there are."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_boolean(kind):
        column, kind = column.cast(pa.int8()), pa.int8()
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        # Text, of which only distinct ones are parsed. A date or a list cannot become text and is refused by the cast.
        if pa.types.is_temporal(kind):
            raise pa.ArrowInvalid("a date is no number")
        labels = _read_labels(column)
        parsed = [read_number(word) for word in labels.words]
        values = np.array([number for number, _ in parsed], dtype=float)[labels.codes]
        is_word = np.array([word for _, word in parsed], dtype=bool)[labels.codes]
        if not is_word.any():
            return values, None
        return values, (labels[int(np.flatnonzero(is_word)[0])], int(is_word.sum()))
    # Integers beyond 2**53 lose digits, and are refused as sizes afterwards.
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), dtype=float), None


def _read_labels(column: Any) -> Labels:
    """Words of a column; a missing one is the empty word."""
    import pyarrow as pa

    words = column.cast(pa.string()).fill_null("").dictionary_encode().combine_chunks()
    if isinstance(words, pa.ChunkedArray):
        words = pa.concat_arrays(words.chunks) if words.num_chunks else pa.array([], pa.string()).dictionary_encode()
    return Labels(np.asarray(words.indices.to_numpy(), dtype=np.int64), tuple(words.dictionary.to_pylist()))
