"""Chart descriptions: titles, labels and data of charts, independent of the plotting library.

``echarts`` and ``matplotlib_files`` draw the same description, so that pages and files show the same
numbers. Values are in the unit of the axis label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from shapewright.core.records import dataclass

# Distinguishable with colour vision deficiency. Source: Okabe and Ito, "Color Universal Design" (2008); without black.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#7f7f7f", "#b8a800")

# Values that span less are legible on a linear axis, which has more ticks.
_LOG_SPAN = 10.0


@dataclass(frozen=True)
class Line:
    """A curve through (x, y); the curve is interrupted at values of None."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    dashed: bool = False
    color: str | None = None


@dataclass(frozen=True)
class Points:
    """Separate points with optional labels, which a reader points at, and short names, which are drawn."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    labels: Sequence[str] = ()
    color: str | None = None
    drawn: Sequence[str] = ()


@dataclass(frozen=True)
class Band:
    """The area between two curves over the same x, such as a 90 % interval."""

    name: str
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    color: str | None = None


@dataclass(frozen=True)
class Mark:
    """A straight line across the chart at one value of an axis, with a label."""

    axis: Literal["x", "y"]
    value: float
    text: str = ""


@dataclass(frozen=True)
class XYChart:
    """Curves, points and bands over two numeric axes.

    ``alt`` is the text alternative, one sentence. ``x_log_base`` is the base of the ticks: 2 for sizes, 10 for times.
    ``y_log`` holds where the values span a factor of ten: shorter logarithmic axes would have one tick or two.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Line | Points | Band]
    alt: str
    marks: Sequence[Mark] = ()
    x_log: bool = False
    x_log_base: int = 2
    y_log: bool = False
    y_from_zero: bool = False

    @property
    def has_log_y(self) -> bool:
        """Whether the y axis is logarithmic."""
        columns = [
            values
            for part in self.series
            for values in ((part.low, part.high) if isinstance(part, Band) else (part.y,))
        ]
        known = [value for values in columns for value in values if value is not None]
        return self.y_log and max(known, default=1.0) >= _LOG_SPAN * min(known, default=1.0)


@dataclass(frozen=True)
class BarPart:
    """One colour of a stacked bar chart: a value for each category, with a text to draw on it.

    A part with the colour ``transparent`` offsets the next part, as in a waterfall, and is not in the legend.
    """

    name: str
    values: Sequence[float]
    color: str | None = None
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class BarChart:
    """Horizontal stacked bars by category."""

    title: str
    value_label: str
    categories: Sequence[str]
    parts: Sequence[BarPart]
    alt: str
    limits: Sequence[Mark] = ()
    texts_inside: bool = True


@dataclass(frozen=True)
class HeatMap:
    """A value for each pair of categories; ``values[row][column]`` belongs to ``y_values[row]``, ``x_values[column]``.

    None is drawn as an empty cell. ``outlined`` is the (row, column) of a highlighted cell.
    """

    title: str
    x_label: str
    y_label: str
    value_label: str
    x_values: Sequence[str]
    y_values: Sequence[str]
    values: Sequence[Sequence[float | None]]
    alt: str
    outlined: tuple[int, int] | None = None


@dataclass(frozen=True)
class Span:
    """A time span on a row of a timeline; spans of one kind share a colour."""

    row: int
    start: float
    end: float
    kind: str
    text: str = ""


@dataclass(frozen=True)
class Timeline:
    """Time spans by row, such as the passes of pipeline stages."""

    title: str
    x_label: str
    rows: Sequence[str]
    spans: Sequence[Span]
    alt: str


Chart = XYChart | BarChart | HeatMap | Timeline


def colors_by_name(names: Sequence[str], chosen: Sequence[str | None] = ()) -> dict[str, str]:
    """Assign palette colours to names in order; names with a chosen colour keep it.

    >>> colors_by_name(["a", "b", "a"], [None, "#123456"])
    {'a': '#0072b2', 'b': '#123456'}
    """
    wanted = {name: color for name, color in zip(names, chosen, strict=False) if color is not None}
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        found[name] = wanted.get(name, PALETTE[len(found) % len(PALETTE)])
    return found


def fold_small_parts(parts: Sequence[BarPart]) -> list[BarPart]:
    """As many parts as there are colours, in their order; the smallest are added up as ``other``.

    >>> [part.name for part in fold_small_parts([BarPart(str(size), [float(size)]) for size in range(10)])]
    ['3', '4', '5', '6', '7', '8', '9', 'other']
    """
    if len(parts) <= len(PALETTE):
        return list(parts)
    largest = sorted(parts, key=lambda part: -sum(part.values))[: len(PALETTE) - 1]
    names = {part.name for part in largest}
    rest = [part.values for part in parts if part.name not in names]
    return [
        *(part for part in parts if part.name in names),
        BarPart("other", [sum(values) for values in zip(*rest, strict=True)]),
    ]
