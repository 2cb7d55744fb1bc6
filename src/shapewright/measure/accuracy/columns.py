"""Columns of a measured table as NumPy arrays; labels are stored as codes, so that a million rows group quickly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    Index = Int[np.ndarray, " rows"]


@dataclass(frozen=True, eq=False)
class Labels:
    """A column of text labels.

    Attributes:
        codes: Position of each row's label in ``words``. [rows]
        words: Distinct labels; a missing one is the empty string.
    """

    codes: Int[np.ndarray, " rows"]
    words: tuple[str, ...]

    @classmethod
    def of(cls, values: Any) -> Labels:
        """Encode a sequence of labels."""
        words, codes = np.unique(np.asarray(values, dtype=str), return_inverse=True)
        return cls(codes.reshape(-1).astype(np.int64), tuple(str(word) for word in words))

    def take(self, index: Any) -> Labels:
        """Return the rows of an index or of a mask."""
        return Labels(self.codes[index], self.words)

    def __getitem__(self, row: int) -> str:
        return self.words[int(self.codes[row])]


@dataclass(frozen=True, eq=False)
class Columns:
    """A table; every column has ``num_rows`` entries.

    Attributes:
        num_rows: Number of rows.
        numbers: Numeric columns; NaN for missing values.
        labels: Columns of labels.
    """

    num_rows: int
    numbers: dict[str, Float[np.ndarray, " rows"]]
    labels: dict[str, Labels]

    def take(self, index: Any) -> Columns:
        """Return the rows of an index or of a mask."""
        numbers = {name: column[index] for name, column in self.numbers.items()}
        labels = {name: column.take(index) for name, column in self.labels.items()}
        return Columns(np.arange(self.num_rows)[index].size, numbers, labels)

    def groups(self, *names: str) -> Iterator[tuple[tuple[str, ...], Columns]]:
        """Yield the parts in which all the named labels are equal, with those labels."""
        for words, index in group_rows([self.labels[name] for name in names], self.num_rows):
            yield words, self.take(index)


def group_rows(labels: list[Labels], num_rows: int) -> Iterator[tuple[tuple[str, ...], Index]]:
    """Yield the rows that share all their labels, in the order of the labels' codes."""
    if not num_rows:
        return
    combined = np.zeros(num_rows, dtype=np.int64)
    for column in labels:
        combined = combined * max(len(column.words), 1) + column.codes
    order = np.argsort(combined, kind="stable")
    edges = np.flatnonzero(np.diff(combined[order])) + 1
    for index in np.split(order, edges):
        yield tuple(column[int(index[0])] for column in labels), index
