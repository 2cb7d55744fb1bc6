"""Columns: a measured table as NumPy arrays, with words as codes so that a million rows group quickly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Index = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Labels:
    """A column of words.

    Attributes:
        codes: Position of each row's word in ``words``. [rows]
        words: Distinct words; a missing one is the empty word.
    """

    codes: NDArray[np.int64]
    words: tuple[str, ...]

    @classmethod
    def of(cls, values: Any) -> Labels:
        """Code a sequence of words."""
        words, codes = np.unique(np.asarray(values, dtype=str), return_inverse=True)
        return cls(codes.reshape(-1).astype(np.int64), tuple(str(word) for word in words))

    def take(self, index: Any) -> Labels:
        """Rows of an index or of a mask."""
        return Labels(self.codes[index], self.words)

    def __getitem__(self, row: int) -> str:
        return self.words[int(self.codes[row])]


@dataclass(frozen=True, eq=False)
class Columns:
    """A table; every column has ``num_rows`` entries.

    Attributes:
        num_rows: Rows.
        numbers: Columns of numbers; NaN where one is missing.
        labels: Columns of words.
    """

    num_rows: int
    numbers: dict[str, Array]
    labels: dict[str, Labels]

    def take(self, index: Any) -> Columns:
        """Rows of an index or of a mask."""
        numbers = {name: column[index] for name, column in self.numbers.items()}
        labels = {name: column.take(index) for name, column in self.labels.items()}
        return Columns(np.arange(self.num_rows)[index].size, numbers, labels)

    def groups(self, *names: str) -> Iterator[tuple[tuple[str, ...], Columns]]:
        """Parts in which all the named words are the same, with those words."""
        for words, index in group_rows([self.labels[name] for name in names], self.num_rows):
            yield words, self.take(index)


def group_rows(labels: list[Labels], num_rows: int) -> Iterator[tuple[tuple[str, ...], Index]]:
    """Rows that share all their words, in the order of the words' codes."""
    if not num_rows:
        return
    combined = np.zeros(num_rows, dtype=np.int64)
    for column in labels:
        combined = combined * max(len(column.words), 1) + column.codes
    order = np.argsort(combined, kind="stable")
    edges = np.flatnonzero(np.diff(combined[order])) + 1
    for index in np.split(order, edges):
        yield tuple(column[int(index[0])] for column in labels), index
