"""Judged rows: what was measured, what is predicted of it, and what tells it from the other rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.accuracy.columns import Labels, group_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.operations.base import Numeric
    from shapewright.perf.price import Price

    Array = NDArray[np.float64]


class Prices(NamedTuple):
    """Predictions for some rows, in the unit of their measurement."""

    predicted: Array
    low: Array
    high: Array
    roofline: Array

    def take(self, index: NDArray[np.intp]) -> Prices:
        """Rows of an index."""
        return Prices(self.predicted[index], self.low[index], self.high[index], self.roofline[index])

    def scale(self, factor: float) -> Prices:
        """Predictions and intervals times a factor; the roofline stays."""
        return Prices(self.predicted * factor, self.low * factor, self.high * factor, self.roofline)

    def widen(self, power: float) -> Prices:
        """Intervals with the logarithms of their ends times a factor."""
        low, high = (self.predicted * (end / self.predicted) ** power for end in (self.low, self.high))
        return self._replace(low=low, high=high)


def prices_of(price: Price, roofline: Numeric, *, extra_s: float = 0.0) -> Prices:
    """Prices of arrays of operations, with the cost of measuring them added to each. [s]"""
    return Prices(
        predicted=np.asarray(price.time_s) + extra_s,
        low=np.asarray(price.low_s) + extra_s,
        high=np.asarray(price.high_s) + extra_s,
        roofline=np.asarray(roofline, dtype=float),
    )


class Alternatives(NamedTuple):
    """Which rows a user could choose between.

    Attributes:
        group: Number of the group of each row, the same over all parts of a table; NaN for none. [rows]
        work: What each row gets done, in any unit. [rows]
    """

    group: Array
    work: Array


@dataclass(frozen=True, eq=False)
class Chunk:
    """Judged rows that share their words.

    Attributes:
        table: Table, or quantity of a table, that the rows belong to.
        device: Canonical name of the device.
        dtype: Element format.
        library: Library and version that was measured.
        part: What else the table tells rows apart by, such as the kernel.
        measured: Measurements. [s, or tokens/s for training]
        prices: Predictions of the same.
        seconds: Measured time of each row, for its size. [s]
        alternatives: Which rows one could choose between; None where they are no shapes of one purpose.
    """

    table: str
    device: str
    dtype: str
    library: str
    part: str
    measured: Array
    prices: Prices
    seconds: Array
    alternatives: Alternatives | None = None


def split_chunks(
    table: str,
    words: tuple[str, str, str],
    parts: Labels,
    measured: Array,
    prices: Prices,
    alternatives: Alternatives | None = None,
) -> Iterator[Chunk]:
    """Cut priced rows by part.

    Args:
        table: Table or quantity.
        words: Canonical device, dtype and library.
        parts: Part of each row. [rows]
        measured: Measured times. [s], [rows]
        prices: Predictions. [rows]
        alternatives: Which rows one could choose between. [rows]
    """
    for (part,), index in group_rows([parts], len(measured)):
        chosen = alternatives and Alternatives(alternatives.group[index], alternatives.work[index])
        yield Chunk(table, *words, part, measured[index], prices.take(index), measured[index], chosen)
