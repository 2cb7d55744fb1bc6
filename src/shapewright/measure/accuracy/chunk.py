"""Priced rows of a table: measurements, predictions, and the labels that distinguish them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.measure.accuracy.columns import Labels, group_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from shapewright.core.numeric import Numeric
    from shapewright.pricing.price import Price


class Prices(NamedTuple):
    """Predictions for some rows, in the unit of their measurement."""

    predicted: Float[np.ndarray, " rows"]
    low: Float[np.ndarray, " rows"]
    high: Float[np.ndarray, " rows"]
    roofline: Float[np.ndarray, " rows"]

    def take(self, index: Int[np.ndarray, " kept"]) -> Prices:
        """Return the rows of an index."""
        return Prices(self.predicted[index], self.low[index], self.high[index], self.roofline[index])

    def scale(self, factor: float) -> Prices:
        """Return predictions and intervals times a factor; the roofline stays."""
        return Prices(self.predicted * factor, self.low * factor, self.high * factor, self.roofline)

    def widen(self, power: float) -> Prices:
        """Return intervals with the logarithms of their ends times a factor."""
        low, high = (self.predicted * (end / self.predicted) ** power for end in (self.low, self.high))
        return self._replace(low=low, high=high)


def prices_of(price: Price, roofline: Numeric, *, extra_s: float = 0.0) -> Prices:
    """Return the prices of arrays of operations, with the cost of the measurement added to each. [s]"""
    return Prices(
        predicted=np.asarray(price.time_s) + extra_s,
        low=np.asarray(price.low_s) + extra_s,
        high=np.asarray(price.high_s) + extra_s,
        roofline=np.asarray(roofline, dtype=float),
    )


class Alternatives(NamedTuple):
    """Rows between which a user could choose.

    Attributes:
        group: Number of the group of each row, consistent over all parts of a table; NaN for none. [rows]
        work: Work of each row, in any unit. [rows]
    """

    group: Float[np.ndarray, " rows"]
    work: Float[np.ndarray, " rows"]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Priced rows with the same labels.

    Attributes:
        table: Table, or quantity of a table.
        device: Canonical name of the device.
        dtype: Element format.
        library: Measured library and version.
        part: Another label of the table, such as the kernel.
        measured: Measurements. [s, or tokens/s for training]
        prices: Predictions of the same.
        seconds: Measured time of each row, for grouping by size. [s]
        alternatives: Rows between which one could choose; None if they are not shapes for one purpose.
    """

    table: str
    device: str
    dtype: str
    library: str
    part: str
    measured: Float[np.ndarray, " rows"]
    prices: Prices
    seconds: Float[np.ndarray, " rows"]
    alternatives: Alternatives | None = None


def split_chunks(
    table: str,
    labels: tuple[str, str, str],
    parts: Labels,
    measured: Float[np.ndarray, " rows"],
    prices: Prices,
    alternatives: Alternatives | None = None,
) -> Iterator[Chunk]:
    """Split priced rows by part.

    Args:
        table: Table or quantity.
        labels: Canonical device, dtype and library.
        parts: Part of each row. [rows]
        measured: Measured times. [s], [rows]
        prices: Predictions. [rows]
        alternatives: Rows between which one could choose. [rows]
    """
    for (part,), index in group_rows([parts], len(measured)):
        chosen = alternatives and Alternatives(alternatives.group[index], alternatives.work[index])
        yield Chunk(table, *labels, part, measured[index], prices.take(index), measured[index], chosen)
