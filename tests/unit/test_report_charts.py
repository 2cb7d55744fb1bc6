"""Charts as descriptions, as ECharts options, as files and as a page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from full_disk import full_after
from shapewright.app.cli.console import write_chart
from shapewright.app.figures.chart import (
    Band,
    BarChart,
    BarPart,
    Chart,
    HeatMap,
    Line,
    Mark,
    Points,
    Span,
    Timeline,
    XYChart,
    colors_by_name,
)
from shapewright.app.figures.echarts import chart_option
from shapewright.app.report.page import Figure, Table, Words, render_page
from shapewright.core.errors import ShapewrightError

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'

CHARTS: dict[str, Chart] = {
    "xy": XYChart(
        title="Throughput over n",
        x_label="n",
        y_label="TFLOP/s",
        series=(
            Band("90 % interval", (1, 2, 4), (1.0, 2.0, 3.0), (2.0, 3.0, 5.0)),
            Line("predicted", (1, 2, 4), (1.5, None, 4.0)),
            Points("measured", (1, 4), (1.4, 4.1), labels=("one", "four")),
        ),
        marks=(Mark("x", 2, "1 wave"), Mark("y", 4.5, "peak")),
        alt="Throughput rises with n.",
        x_log=True,
    ),
    "bars": BarChart(
        title="Memory by stage",
        value_label="GB",
        categories=("stage 0", "stage 1"),
        parts=(BarPart("weights", (10.0, 12.0)), BarPart("activations", (30.0, 20.0))),
        limits=(Mark("x", 80, "device"),),
        alt="Both stages fit.",
    ),
    "heat": HeatMap(
        title="Heads against hidden size",
        x_label="hidden size",
        y_label="heads",
        value_label="ms",
        x_values=("1024", "2048"),
        y_values=("8", "16"),
        values=((1.0, 2.0), (None, 1.5)),
        outlined=(0, 1),
        alt="More heads are slower.",
    ),
    "timeline": Timeline(
        title="Pipeline",
        x_label="ms",
        rows=("stage 0", "stage 1"),
        spans=(Span(0, 0.0, 1.0, "forward", "micro-batch 0"), Span(1, 1.0, 3.0, "backward")),
        alt="Two stages.",
    ),
}


@pytest.mark.parametrize("name", CHARTS)
def test_options_are_plain_json_with_every_series(name: str) -> None:
    """An option survives JSON unchanged and names each series of the chart once."""
    option = chart_option(CHARTS[name])
    assert json.loads(json.dumps(option, allow_nan=False)) == option
    expected = {
        "xy": ["90 % interval", "predicted", "measured"],
        "bars": ["weights", "activations"],
        "heat": ["ms", "this shape"],
        "timeline": ["forward", "backward"],
    }
    assert [series["name"] for series in option["series"]] == expected[name]


def test_missing_values_stay_missing() -> None:
    """A value that is not there is drawn as a gap or an empty cell, never as zero."""
    assert chart_option(CHARTS["xy"])["series"][1]["data"][1] == [2, None]
    assert [0, 1, "-"] in chart_option(CHARTS["heat"])["series"][0]["data"]


def test_a_limit_beyond_the_bars_is_inside_the_chart() -> None:
    """A device's capacity far above the bars is still drawn; one below them leaves the axis alone."""
    assert chart_option(CHARTS["bars"])["xAxis"]["max"] > 80
    low = replace(CHARTS["bars"], limits=(Mark("x", 5, "device"),))
    assert "max" not in chart_option(low)["xAxis"]


def test_one_name_has_one_color() -> None:
    """Series of one name share a colour, other names differ, and a chosen colour is kept."""
    colors = colors_by_name(["a", "b", "a", "c"], [None, "#000000", None, None])
    assert colors["b"] == "#000000"
    assert len(set(colors.values())) == 3


def test_page_is_self_contained() -> None:
    """Apart from names inside the plotting library's own text, the page refers to no other place."""
    page = render_page("A page", [Figure(chart, "caption") for chart in CHARTS.values()], subtitle="h100")
    own = re.sub(r"<script>/?\s*\*?.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"""(src|href)\s*=|url\(|https?://|@import""", own)
    assert own.count('data-chart="') == len(CHARTS)
    assert "echarts" in page


def test_page_without_charts_is_small() -> None:
    """The plotting library is inside only where something is plotted."""
    page = render_page("Words", [Words("Why", ["Because."]), Table("T", ("name", "s"), (("a", "1"),), words=("name",))])
    assert len(page) < 5_000
    assert "<script" not in page


def test_hostile_text_stays_text() -> None:
    """Text from a config cannot become markup, in words, tables, captions or chart data."""
    chart = BarChart(HOSTILE, HOSTILE, (HOSTILE,), (BarPart(HOSTILE, (1.0,)),), alt=HOSTILE)
    sections = [Words(HOSTILE, [HOSTILE], HOSTILE), Table(HOSTILE, (HOSTILE,), ((HOSTILE,),), note=HOSTILE)]
    page = render_page(HOSTILE, [*sections, Figure(chart, HOSTILE)], subtitle=HOSTILE)
    assert "<img" not in page.partition("<script>")[0]
    assert "alert(1)</script>" not in page
    block = page.partition('id="chart-options">')[2].partition("</script>")[0]
    assert json.loads(block)[0]["series"][0]["name"] == HOSTILE


def test_a_picture_stays_where_its_successor_cannot_be_written(tmp_path: Path) -> None:
    """On a full disk the command is an error, and leaves the file that is there and no part of another."""
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    path = tmp_path / "chart.svg"
    path.write_text("before", encoding="utf-8")

    with full_after(1000), pytest.raises(ShapewrightError, match="cannot write"):
        write_chart(next(iter(CHARTS.values())), path)

    assert path.read_text(encoding="utf-8") == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", CHARTS)
@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_files_are_drawn(name: str, ending: str, tmp_path: Path) -> None:
    """Each kind of chart becomes a picture; an SVG carries the words and is the same each time."""
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    from shapewright.app.figures.matplotlib_files import save_chart

    first, second = tmp_path / f"a{ending}", tmp_path / f"b{ending}"
    save_chart(CHARTS[name], first)
    save_chart(CHARTS[name], second)
    assert first.read_bytes() == second.read_bytes()
    if ending == ".svg":
        assert CHARTS[name].title in first.read_text(encoding="utf-8")
    else:
        assert first.read_bytes().startswith(b"\x89PNG")
