"""Charts as PNG, SVG or PDF files, drawn by matplotlib (the plot extra)."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapewright.app.figures.chart import (
    Band,
    BarChart,
    Chart,
    HeatMap,
    Line,
    Mark,
    Points,
    Timeline,
    XYChart,
    colors_by_name,
)
from shapewright.core.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMATS = (".png", ".svg", ".pdf")
FIGURE_INCHES = (8.0, 3.6)
PNG_DOTS_PER_INCH = 150
# Legends with more entries are placed outside the axes.
_MAX_INSIDE = 5
# Reproducible files: fixed salt for the ids of an SVG, and no date.
_SVG_STYLE = {"svg.hashsalt": "shapewright", "svg.fonttype": "none", "font.size": 10}


def save_chart(chart: Chart, path: Path, *, description: str = "") -> None:
    """Draw a chart into a file; its suffix selects the format. Other arguments and errors as for draw_chart.

    Raises:
        OSError: The file cannot be written.
    """
    path.write_bytes(draw_chart(chart, path.suffix, description=description))


def draw_chart(chart: Chart, suffix: str, *, description: str = "") -> bytes:
    """Draw a chart; return the content of a file.

    Args:
        suffix: Format, one of ``FORMATS``.
        description: Description in the metadata of an SVG file.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(
            "drawing a PNG or SVG needs matplotlib, which is not installed; "
            "run: pip install 'shapewright[plot]', or write .html instead"
        ) from None

    with mpl.rc_context(_SVG_STYLE):
        figure = Figure(figsize=_inches(chart), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(chart.title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        match chart:
            case XYChart():
                _draw_xy(chart, axes)
            case BarChart():
                _draw_bars(chart, axes)
            case HeatMap():
                _draw_heat_map(chart, figure, axes)
            case Timeline():
                _draw_timeline(chart, axes)
        metadata: dict[str, Any] = {}
        if suffix == ".svg":
            metadata = {"Date": None, "Creator": None, "Description": description or chart.alt}
        content = BytesIO()
        figure.savefig(content, format=suffix.removeprefix("."), dpi=PNG_DOTS_PER_INCH, metadata=metadata)
        return content.getvalue()


def _inches(chart: Chart) -> tuple[float, float]:
    """Width and height of the figure; the height grows with the number of rows."""
    width, height = FIGURE_INCHES
    if isinstance(chart, BarChart):
        return width, max(2.4, 1.6 + 0.32 * len(chart.categories))
    if isinstance(chart, Timeline):
        return width, max(2.4, 1.4 + 0.3 * len(chart.rows))
    if isinstance(chart, HeatMap):
        return width, max(height, 1.4 + 0.24 * len(chart.y_values))
    return width, height


def _draw_xy(chart: XYChart, axes: Any) -> None:
    """Curves, points and bands."""
    colors = colors_by_name([part.name for part in chart.series], [part.color for part in chart.series])
    for part in chart.series:
        color = colors[part.name]
        if isinstance(part, Band):
            axes.fill_between(part.x, part.low, part.high, color=color, alpha=0.18, linewidth=0, label=part.name)
        elif isinstance(part, Points):
            axes.plot(part.x, part.y, "o", color=color, markersize=5, label=part.name, zorder=3)
        elif isinstance(part, Line):
            heights = [float("nan") if value is None else value for value in part.y]
            axes.plot(
                part.x,
                heights,
                color=color,
                linestyle="--" if part.dashed else "-",
                label=part.name,
            )
    if chart.x_log:
        axes.set_xscale("log", base=chart.x_log_base)
    if chart.has_log_y:
        axes.set_yscale("log")
    if chart.y_from_zero:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    _draw_marks(chart.marks, axes, at_bottom=chart.y_from_zero)
    if len(chart.series) > _MAX_INSIDE:
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    elif len(chart.series) > 1:
        axes.legend(frameon=False, fontsize=9)


def _draw_bars(chart: BarChart, axes: Any) -> None:
    """Horizontal stacked bars, the first category on top."""
    colors = colors_by_name([part.name for part in chart.parts], [part.color for part in chart.parts])
    rows = range(len(chart.categories))
    ends = [0.0] * len(chart.categories)
    for part in chart.parts:
        if part.color != "transparent":
            axes.barh(rows, part.values, left=ends, color=colors[part.name], label=part.name, height=0.7)
        ends = [end + value for end, value in zip(ends, part.values, strict=True)]
    axes.set_yticks(rows, chart.categories)
    axes.invert_yaxis()
    axes.set_xlabel(chart.value_label)
    _draw_marks(chart.limits, axes)
    if len(chart.parts) > 1:
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_heat_map(chart: HeatMap, figure: Any, axes: Any) -> None:
    """Cells coloured by value; cells without a value are empty."""
    from matplotlib.patches import Rectangle

    values = [[float("nan") if value is None else value for value in row] for row in chart.values]
    image = axes.imshow(values, aspect="auto", cmap="viridis", origin="lower", interpolation="nearest")
    axes.set_xticks(range(len(chart.x_values)), chart.x_values, rotation=45, fontsize=8)
    axes.set_yticks(range(len(chart.y_values)), chart.y_values, fontsize=8)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.outlined is not None:
        row, column = chart.outlined
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="#d55e00", linewidth=2))
    figure.colorbar(image, ax=axes, label=chart.value_label)


def _draw_timeline(chart: Timeline, axes: Any) -> None:
    """Spans by row; the first row on top."""
    colors = colors_by_name([span.kind for span in chart.spans])
    for kind, color in colors.items():
        spans = [span for span in chart.spans if span.kind == kind]
        axes.barh(
            [span.row for span in spans],
            [span.end - span.start for span in spans],
            left=[span.start for span in spans],
            color=color,
            edgecolor="white",
            linewidth=0.3,
            height=0.8,
            label=kind,
        )
    axes.set_yticks(range(len(chart.rows)), chart.rows)
    axes.invert_yaxis()
    axes.set_xlabel(chart.x_label)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_marks(marks: Sequence[Mark], axes: Any, *, at_bottom: bool = False) -> None:
    """Straight lines across the chart, with labels at the top, or at the bottom if curves start above it."""
    height, anchor = (0.02, "bottom") if at_bottom else (0.98, "top")
    for mark in marks:
        (axes.axvline if mark.axis == "x" else axes.axhline)(mark.value, color="#999999", linewidth=0.8, linestyle=":")
        if mark.axis == "x":
            axes.annotate(
                mark.text, (mark.value, height), xycoords=("data", "axes fraction"), rotation=90, ha="right", va=anchor,
                fontsize=8, color="#666666",
            )  # fmt: skip
        else:
            axes.annotate(
                mark.text, (0.99, mark.value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8,
                color="#666666",
            )  # fmt: skip
