"""Charts as plain descriptions: what is drawn, in words and numbers, before any library draws it.

One description serves the page in a browser (``echarts.py``) and the file on disk (``matplotlib_charts.py``), so a
figure shows the same numbers wherever it appears. Values are in the unit that the axis label names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Told apart by readers who see few colours. Source: Okabe and Ito, "Color Universal Design" (2008); black left out.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#7f7f7f", "#b8a800")


@dataclass(frozen=True, slots=True)
class Line:
    """A curve through (x, y); where a value is None the curve is interrupted."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    dashed: bool = False
    color: str | None = None


@dataclass(frozen=True, slots=True)
class Points:
    """Separate points, each with a label of its own where given."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    labels: Sequence[str] = ()
    color: str | None = None


@dataclass(frozen=True, slots=True)
class Band:
    """The area between two curves over the same x, such as a 90 % interval."""

    name: str
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    color: str | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A straight line across the chart at one value of an axis, with its words."""

    axis: Literal["x", "y"]
    value: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class XYChart:
    """Curves, points and bands over two numeric axes.

    ``alt`` says in one sentence what the reader should see; it is read out where the picture is not. ``x_log_base`` is
    that of the ticks: 2 for sizes, 10 for times.
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


@dataclass(frozen=True, slots=True)
class BarPart:
    """One colour of a stacked bar chart: a value for each category.

    The colour ``transparent`` holds up what comes after it, as in a waterfall, and stays out of the legend.
    """

    name: str
    values: Sequence[float]
    color: str | None = None


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars by category, each stacked from its parts; lying down, so that long names can be read."""

    title: str
    value_label: str
    categories: Sequence[str]
    parts: Sequence[BarPart]
    alt: str
    limits: Sequence[Mark] = ()


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A value for each pair of categories; ``values[row][column]`` belongs to ``y_values[row]``, ``x_values[column]``.

    None is drawn as an empty cell: no such shape. ``outlined`` is the (row, column) of the cell in question.
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


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work on a row of a timeline; spans of one kind share a colour."""

    row: int
    start: float
    end: float
    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of work by row, such as the stages of a pipeline."""

    title: str
    x_label: str
    rows: Sequence[str]
    spans: Sequence[Span]
    alt: str


Chart = XYChart | BarChart | HeatMap | Timeline


def colors_by_name(names: Sequence[str], chosen: Sequence[str | None] = ()) -> dict[str, str]:
    """Give each name a colour of the palette, in order; a chosen colour stays.

    >>> colors_by_name(["a", "b", "a"], [None, "#123456"])
    {'a': '#0072b2', 'b': '#123456'}
    """
    wanted = {name: color for name, color in zip(names, chosen, strict=False) if color is not None}
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        found[name] = wanted.get(name, PALETTE[len(found) % len(PALETTE)])
    return found
