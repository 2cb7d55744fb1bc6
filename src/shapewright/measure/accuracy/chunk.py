"""Priced rows of a table: measurements, predictions, and the labels that distinguish them.

Labels are stored as codes, so that a million rows group quickly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.records import dataclass
from shapewright.prediction.composition.step import compose_step
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from shapewright.core.numeric import Numeric
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.composition.stages import PricedOperation
    from shapewright.pricing.price import Price
    from shapewright.workload.workload import Workload

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

    def join(self, other: Labels) -> Labels:
        """Return one column of the labels of two."""
        words: list[str] = []
        codes = np.zeros(len(self.codes), dtype=np.int64)
        for pair, index in group_rows([self, other], len(self.codes)):
            codes[index] = len(words)
            words.append(" ".join(pair))
        return Labels(codes, tuple(words))

    @property
    def values(self) -> np.ndarray:
        """The label of each row."""
        found: np.ndarray = np.array(self.words, dtype=str)[self.codes]
        return found

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

    def row(self, place: int) -> tuple[dict[str, str], dict[str, float]]:
        """Return labels and numbers of one row, by column."""
        labels = {name: column[place] for name, column in self.labels.items()}
        return labels, {name: float(column[place]) for name, column in self.numbers.items()}

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

    def add(self, extra_s: float, low_s: float, high_s: float) -> Prices:
        """Return times with a cost of the measurement added, which lies in an interval of its own. [s]"""
        low, high = self.low + low_s, self.high + high_s
        return Prices(self.predicted + extra_s, low, high, self.roofline)

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


def roofline_step_s(
    priced: Sequence[PricedOperation], config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> float:
    """Return the time of a step whose operations take their roofline times. [s]"""
    bounds = [replace(entry, price=replace(entry.price, time_s=entry.price.roofline_s)) for entry in priced]
    return compose_step(bounds, config, workload, layout).step_s


def price_step(
    priced: Sequence[PricedOperation], config: TransformerConfig, workload: Workload
) -> tuple[float, float, float, float]:
    """Return the time of operations on one device as a step, the ends of its interval and its roofline. [s]"""
    times = compose_step(priced, config, workload, ParallelLayout())
    floor_s = roofline_step_s(priced, config, workload, ParallelLayout())
    return times.step_s, times.step_low_s, times.step_high_s, floor_s


class Alternatives(NamedTuple):
    """Rows between which a user could choose.

    Attributes:
        group: Number of the group of each row, consistent over all parts of a table; NaN for none. [rows]
        work: Work of each row, in any unit. [rows]
    """

    group: Float[np.ndarray, " rows"]
    work: Float[np.ndarray, " rows"]


class LossGroups(NamedTuple):
    """Groups of losses that can be compared: models of one size, after the same tokens of one recipe.

    Attributes:
        group: Number of the recipe of each row. [rows]
        log_parameters: ln of the parameters without embeddings. [rows]
        log_tokens: ln of the training tokens. [rows]
    """

    group: Int[np.ndarray, " rows"]
    log_parameters: Float[np.ndarray, " rows"]
    log_tokens: Float[np.ndarray, " rows"]


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
        loss_groups: Which rows are losses that can be compared; None if measurements are not losses. [nats]
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
    loss_groups: LossGroups | None = None


def split_chunks(
    table: str,
    labels: tuple[str, str, str],
    parts: Labels | str,
    measured: Float[np.ndarray, " rows"],
    prices: Prices,
    alternatives: Alternatives | None = None,
) -> Iterator[Chunk]:
    """Split priced rows by part.

    Args:
        parts: Part of each row, or of all. [rows]
        measured: Measured times. [s], [rows]
        prices: Predictions. [rows]
        alternatives: Rows between which one could choose. [rows]
    """
    if isinstance(parts, str):
        parts = Labels(np.zeros(len(measured), dtype=np.int64), (parts,))
    for (part,), index in group_rows([parts], len(measured)):
        chosen = alternatives and Alternatives(alternatives.group[index], alternatives.work[index])
        yield Chunk(table, *labels, part, measured[index], prices.take(index), measured[index], chosen)
