"""One self-contained HTML page: words, tables and charts, with nothing to fetch.

The page works from a mail attachment or an air-gapped machine: style, data and the plotting library (Apache ECharts, as
shipped in ``assets``) are inside. All text is escaped; nothing in it is taken for markup.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from shapewright import __version__
from shapewright.report.charts import Chart
from shapewright.report.columns import Column
from shapewright.report.echarts import chart_option

DEFAULT_CHART_HEIGHT_PX = 360
# Cells of words longer than this wrap. [character]
_LONGEST_UNWRAPPED = 36


@dataclass(frozen=True, slots=True)
class Words:
    """Paragraphs under a heading; ``code`` is shown as it is, such as a config."""

    title: str
    paragraphs: Sequence[str]
    code: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a heading; columns named in ``words`` are set left, the others right, as numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its caption; the caption is also what a screen reader says."""

    chart: Chart
    caption: str = ""
    chart_height_px: int = DEFAULT_CHART_HEIGHT_PX


Section = Words | Table | Figure


def table_of(title: str, columns: Sequence[Column], *, note: str = "") -> Table:
    """The columns that a terminal shows as a table of the page; here all of them fit."""
    shown = [column for column in columns if any(column.cells)]
    return Table(
        title=title,
        columns=tuple(column.name for column in shown),
        rows=tuple(zip(*(column.cells for column in shown), strict=True)),
        words=tuple(column.name for column in shown if column.is_text),
        note=note,
    )


def render_page(title: str, sections: Sequence[Section], *, subtitle: str = "") -> str:
    """Write a page as one HTML document.

    Args:
        title: Heading of the page and name of its tab.
        sections: What stands on it, in order.
        subtitle: One line under the heading, such as the device and the workload.

    Returns:
        The document; about 1.1 MB where it has a chart, for the plotting library is inside.
    """
    figures = [section for section in sections if isinstance(section, Figure)]
    numbers = {id(figure): number for number, figure in enumerate(figures)}
    body = "\n".join(_section(section, numbers) for section in sections)
    under = f'<p class="subtitle">{escape(subtitle)}</p>' if subtitle else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{_asset('page.css')}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{under}\n{body}\n"
        f"<footer>Shapewright {escape(__version__)}</footer>\n{_scripts(figures)}</body>\n</html>\n"
    )


def _section(section: Section, numbers: dict[int, int]) -> str:
    """One part of the page."""
    match section:
        case Words():
            text = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in section.paragraphs)
            code = f"<pre>{escape(section.code)}</pre>" if section.code else ""
            return f"<section><h2>{escape(section.title)}</h2>{text}{code}</section>"
        case Table():
            return _table(section)
        case Figure():
            chart = section.chart
            caption = f"<figcaption>{escape(section.caption)}</figcaption>" if section.caption else ""
            return (
                f"<section><h2>{escape(chart.title)}</h2><figure>"
                f'<div class="chart" role="img" aria-label="{escape(chart.alt)}" data-chart="{numbers[id(section)]}" '
                f'style="height:{section.chart_height_px}px"></div>{caption}</figure></section>'
            )


def _table(table: Table) -> str:
    """A table that scrolls by itself where the screen is narrow."""
    kinds = [_cell_class(table, index) for index in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, table.columns, strict=True)
    )
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<section><h2>{escape(table.title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}</section>"
    )


def _cell_class(table: Table, index: int) -> str:
    """Numbers and short words stay on one line; sentences wrap."""
    if table.columns[index] not in table.words:
        return ""
    is_prose = any(len(row[index]) > _LONGEST_UNWRAPPED for row in table.rows)
    return ' class="words prose"' if is_prose else ' class="words"'


def _scripts(figures: Sequence[Figure]) -> str:
    """The plotting library and the charts' numbers; nothing where there is no chart."""
    if not figures:
        return ""
    options = json.dumps([chart_option(figure.chart) for figure in figures], allow_nan=False)
    return (
        f'<script type="application/json" id="chart-options">{_inside_script(options)}</script>\n'
        f"<script>{_asset('echarts.min.js')}</script>\n<script>{_asset('charts.js')}</script>\n"
    )


def _inside_script(text: str) -> str:
    """JSON that cannot end the script element it stands in."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    """Text of a shipped file."""
    return (resources.files("shapewright.report") / "assets" / name).read_text(encoding="utf-8")
