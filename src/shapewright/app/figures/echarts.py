"""Charts as Apache ECharts options, as plain JSON values.

Custom series (a band, a span of a timeline) refer to a drawing function of ``assets/charts.js`` by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any

from shapewright.app.figures.chart import (
    Band,
    BarChart,
    BarPart,
    Chart,
    HeatMap,
    Line,
    Mark,
    Points,
    Timeline,
    XYChart,
    colors_by_name,
)

Option = dict[str, Any]

# From worst to best, with increasing lightness, so that the order survives greyscale printing.
# Source: seven stops of matplotlib's viridis (CC0).
_HEAT_COLORS = ["#440154", "#443983", "#31688e", "#21918c", "#35b779", "#90d743", "#fde725"]


def chart_option(chart: Chart) -> Option:
    """Option object for ``echarts.setOption``; every value can be written as JSON."""
    match chart:
        case XYChart():
            option = _xy(chart)
        case BarChart():
            option = _bars(chart)
        case HeatMap():
            option = _heat_map(chart)
        case Timeline():
            option = _timeline(chart)
    common: Option = {
        "backgroundColor": "transparent",
        "animation": False,
        "textStyle": {"fontFamily": "system-ui, sans-serif"},
        "aria": {"enabled": True, "label": {"description": chart.alt}},
        "toolbox": {"feature": {"saveAsImage": {"title": "Save picture"}}, "right": 0, "top": 0},
    }
    return common | option


def _xy(chart: XYChart) -> Option:
    """Curves, points and bands."""
    colors = colors_by_name([part.name for part in chart.series], [part.color for part in chart.series])
    series = [_xy_series(part, colors[part.name]) for part in chart.series]
    if series and chart.marks:
        series[0]["markLine"] = _mark_lines(chart.marks)
    return {
        "tooltip": {"trigger": "axis" if any(isinstance(part, Line) for part in chart.series) else "item"},
        "legend": {"data": [part.name for part in chart.series], "type": "scroll", "bottom": 0, "right": 40, "left": 8},
        "grid": {"left": 16, "right": 48, "top": 40, "bottom": 56, "containLabel": True},
        "xAxis": _axis(chart.x_label, log_base=chart.x_log_base if chart.x_log else None, centred=True) | _ends(chart),
        "yAxis": _axis(chart.y_label, log_base=10 if chart.has_log_y else None, from_zero=chart.y_from_zero),
        "dataZoom": [{"type": "inside", "filterMode": "none"}],
        "series": series,
    }


def _ends(chart: XYChart) -> Option:
    """Range of the x axis: the data range, rounded outwards to round tick values."""
    if chart.x_log:
        return {"min": "dataMin", "max": "dataMax"}
    known = [x for part in chart.series for x in part.x]
    low, high = min(known, default=0.0), max(known, default=1.0)
    step = 10.0 ** (floor(log10(high - low if high > low else 1.0)) - 1)
    return {"min": float(f"{floor(low / step) * step:.6g}"), "max": float(f"{ceil(high / step) * step:.6g}")}


def _xy_series(part: Line | Points | Band, color: str) -> Option:
    """One series of an XY chart."""
    if isinstance(part, Band):
        rows = [list(row) for row in zip(part.x, part.low, part.high, strict=True)]
        return {
            "type": "custom",
            "renderItem": "band",
            "name": part.name,
            "data": rows,
            "encode": {"x": 0, "y": [1, 2]},
            "dimensions": ["x", "low", "high"],
            "itemStyle": {"color": color, "opacity": 0.18},
            "silent": True,
            "z": 1,
        }
    if isinstance(part, Points):
        labels = part.labels or [""] * len(part.x)
        return {
            "type": "scatter",
            "name": part.name,
            "symbolSize": 8,
            "data": [{"name": label, "value": [x, y]} for label, x, y in zip(labels, part.x, part.y, strict=True)]
            if not part.drawn
            else [
                {"name": label, "value": [x, y], "label": {"show": bool(text), "formatter": text, "position": "left"}}
                for label, x, y, text in zip(labels, part.x, part.y, part.drawn, strict=True)
            ],
            "labelLayout": {"hideOverlap": True},
            "itemStyle": {"color": color},
            "z": 3,
        }
    return {
        "type": "line",
        "name": part.name,
        "data": [list(pair) for pair in zip(part.x, part.y, strict=True)],
        "showSymbol": False,
        "lineStyle": {"color": color, "width": 2, "type": "dashed" if part.dashed else "solid"},
        "itemStyle": {"color": color},
        "z": 2,
    }


def _bars(chart: BarChart) -> Option:
    """Horizontal stacked bars, the first category on top."""
    colors = colors_by_name([part.name for part in chart.parts], [part.color for part in chart.parts])
    series: list[Option] = [
        {
            "type": "bar",
            "stack": "all",
            "name": part.name,
            "data": _bar_data(part, chart),
            "itemStyle": {"color": colors[part.name]},
            "barMaxWidth": 36,
            "labelLayout": {"hideOverlap": True},
        }
        for part in chart.parts
    ]
    # Transparent parts, as in a waterfall, are not in the legend.
    shown = [part.name for part in chart.parts if part.color != "transparent"]
    if series and chart.limits:
        series[0]["markLine"] = _mark_lines(chart.limits, place="start")
    return {
        "tooltip": {"trigger": "axis", "axisPointer": {"type": "shadow"}},
        "legend": {"data": shown, "type": "scroll", "bottom": 0, "left": 8, "right": 40},
        "grid": {
            "left": _left_margin(chart.categories),
            "right": 32 if chart.texts_inside else 80,
            "top": 32,
            "bottom": 76,
        },
        "xAxis": _axis(chart.value_label, from_zero=True, centred=True) | _value_range(chart),
        "yAxis": {"type": "category", "data": list(chart.categories), "inverse": True},
        "series": series,
    }


# Narrower bars have no room for a text. [fraction of the longest]
_LEAST_LABELLED_FRACTION = 0.07


def _bar_data(part: BarPart, chart: BarChart) -> list[Any]:
    """Values of a part, with the texts that there is room for."""
    if not part.texts:
        return list(part.values)
    longest = max(sum(values) for values in zip(*(each.values for each in chart.parts), strict=True))
    place = {"position": "inside"} if chart.texts_inside else {"position": "right"}
    return [
        {"value": value, "label": {"show": True, "formatter": text, **place}}
        if text and (value >= _LEAST_LABELLED_FRACTION * longest or not chart.texts_inside)
        else value
        for value, text in zip(part.values, part.texts, strict=True)
    ]


def _heat_map(chart: HeatMap) -> Option:
    """Cells coloured by value, with a colour scale."""
    cells = [
        [column, row, "-" if value is None else value]
        for row, values in enumerate(chart.values)
        for column, value in enumerate(values)
    ]
    known = [value for values in chart.values for value in values if value is not None]
    series: list[Option] = [{"type": "heatmap", "name": chart.value_label, "data": cells}]
    if chart.outlined is not None:
        row, column = chart.outlined
        series.append(
            {
                "type": "scatter",
                "name": "this shape",
                "symbol": "rect",
                "symbolSize": 14,
                "data": [[column, row]],
                "itemStyle": {"color": "transparent", "borderColor": "#d55e00", "borderWidth": 3},
                "silent": True,
            }
        )
    return {
        "tooltip": {"trigger": "item"},
        "grid": {"left": 24, "right": 96, "top": 40, "bottom": 40, "containLabel": True},
        "xAxis": {"type": "category", "data": list(chart.x_values), "name": chart.x_label, **_CENTRED_NAME},
        "yAxis": {"type": "category", "data": list(chart.y_values), "name": chart.y_label},
        "visualMap": {
            "type": "continuous",
            "min": min(known, default=0.0),
            "max": max(known, default=1.0),
            "calculable": True,
            "right": 0,
            "top": "middle",
            "precision": 2,
            "seriesIndex": 0,
            "inRange": {"color": _HEAT_COLORS},
        },
        "series": series,
    }


def _timeline(chart: Timeline) -> Option:
    """Spans by row; the first row on top."""
    kinds = list(dict.fromkeys(span.kind for span in chart.spans))
    colors = colors_by_name(kinds)
    series = [
        {
            "type": "custom",
            "renderItem": "span",
            "name": kind,
            "encode": {"x": [1, 2], "y": 0},
            "dimensions": ["row", "start", "end"],
            "itemStyle": {"color": colors[kind]},
            "data": [
                {"name": span.text, "value": [span.row, span.start, span.end]}
                for span in chart.spans
                if span.kind == kind
            ],
        }
        for kind in kinds
    ]
    return {
        "tooltip": {"trigger": "item"},
        "legend": {"data": kinds, "type": "scroll", "bottom": 0, "left": 8, "right": 40},
        "grid": {"left": _left_margin(chart.rows), "right": 24, "top": 32, "bottom": 76},
        "xAxis": _axis(chart.x_label, from_zero=True, centred=True),
        "yAxis": {"type": "category", "data": list(chart.rows), "inverse": True},
        "dataZoom": [{"type": "inside", "filterMode": "weakFilter"}],
        "series": series,
    }


# The name of the x axis is centred below it.
_CENTRED_NAME: Option = {"nameLocation": "middle", "nameGap": 28}


# Upper estimate of the width of a character of axis labels. [px]
_CHARACTER_PX = 7


def _left_margin(names: Sequence[str]) -> int:
    """Left margin for the longest name. [px]"""
    return 16 + _CHARACTER_PX * max(map(len, names), default=0)


def _axis(label: str, *, log_base: int | None = None, from_zero: bool = False, centred: bool = False) -> Option:
    """A numeric axis with its label."""
    return {
        "type": "log" if log_base else "value",
        "logBase": log_base or 10,
        "name": label,
        "scale": not from_zero,
        "splitLine": {"lineStyle": {"opacity": 0.35}},
        **(_CENTRED_NAME if centred else {"nameTextStyle": {"align": "left"}}),
    }


def _value_range(chart: BarChart) -> Option:
    """Extend the axis to limits beyond the longest bar; marks outside the range are not visible."""
    limits = [mark.value for mark in chart.limits if mark.axis == "x"]
    longest = max((sum(values) for values in zip(*(part.values for part in chart.parts), strict=True)), default=0.0)
    return {"max": 1.05 * max(limits)} if limits and max(limits) > longest else {}


def _mark_lines(marks: Sequence[Mark], *, place: str = "end") -> Option:
    """Straight lines across a chart, with labels at the given end."""
    return {
        "symbol": "none",
        "silent": True,
        "lineStyle": {"color": "#7f7f7f", "type": "dotted", "width": 1},
        "data": [
            {
                f"{mark.axis}Axis": mark.value,
                "label": {"formatter": mark.text, "show": bool(mark.text), "fontSize": 10, "position": place},
            }
            for mark in marks
        ],
    }
