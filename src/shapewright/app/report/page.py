"""Self-contained HTML pages of paragraphs, tables and charts, and their conversion to PDF.

Style, data and the plotting library (Apache ECharts, in ``assets``) are embedded, so that a page works offline. All
text is escaped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from shapewright import __version__
from shapewright.app.figures.chart import Chart
from shapewright.app.figures.echarts import chart_option
from shapewright.app.report.columns import Column
from shapewright.core.errors import MissingExtraError, ShapewrightError
from shapewright.core.records import dataclass

DEFAULT_CHART_HEIGHT_PX = 360
# Text cells longer than this wrap. [character]
_LONGEST_UNWRAPPED = 36


@dataclass(frozen=True)
class Words:
    """Paragraphs under a heading, followed by preformatted ``code``."""

    title: str
    paragraphs: Sequence[str]
    code: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading; columns named in ``words`` are left-aligned, the others right-aligned."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A chart with its caption, which screen readers read too."""

    chart: Chart
    caption: str = ""
    chart_height_px: int = DEFAULT_CHART_HEIGHT_PX


Section = Words | Table | Figure


def table_of(title: str, columns: Sequence[Column], *, note: str = "") -> Table:
    """Turn the columns of a text table into a table of a page, which has room for all of them."""
    shown = [column for column in columns if any(column.cells)]
    return Table(
        title=title,
        columns=tuple(column.name for column in shown),
        rows=tuple(zip(*(column.cells for column in shown), strict=True)),
        words=tuple(column.name for column in shown if column.is_text),
        note=note,
    )


def sentence(words: str) -> str:
    """Words as a sentence, such as a caption: with a capital and a full stop."""
    return f"{words[0].upper()}{words[1:]}."


def render_page(title: str, sections: Sequence[Section], *, subtitle: str = "") -> str:
    """Render a page as one HTML document.

    Args:
        title: Heading of the page and title of its tab.
        subtitle: One line under the heading, such as the device and the workload.

    Returns:
        The document; about 1.1 MB with charts, because the plotting library is embedded.
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
    """Render one section."""
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
    """Render a table that scrolls horizontally on narrow screens."""
    kinds = [_cell_class(table, index) for index in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, table.columns, strict=True)
    )
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{_cell(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<section><h2>{escape(table.title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}</section>"
    )


def _cell(text: str) -> str:
    """Text of a cell, in which no line ends inside of an arrow."""
    return escape(text).replace("-&gt;", '<span class="arrow">-&gt;</span>')


def _cell_class(table: Table, index: int) -> str:
    """CSS class of a column: numbers and short texts stay on one line, sentences wrap."""
    if table.columns[index] not in table.words:
        return ""
    is_prose = any(len(row[index]) > _LONGEST_UNWRAPPED for row in table.rows)
    return ' class="words prose"' if is_prose else ' class="words"'


def _scripts(figures: Sequence[Figure]) -> str:
    """Scripts with the plotting library and the data of the charts; empty without charts."""
    if not figures:
        return ""
    options = json.dumps([chart_option(figure.chart) for figure in figures], allow_nan=False)
    return (
        f'<script type="application/json" id="chart-options">{_inside_script(options)}</script>\n'
        f"<script>{_asset('echarts.min.js')}</script>\n<script>{_asset('charts.js')}</script>\n"
    )


def _inside_script(text: str) -> str:
    """Escape JSON so that it cannot close the script element around it."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    """Text of a packaged file."""
    return (resources.files("shapewright.app.report") / "assets" / name).read_text(encoding="utf-8")


# Executables of browsers that accept Chromium's arguments.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_PRINT_TIMEOUT_S = 120.0
QUIET_BROWSER = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""Arguments that render one local page without network access, GPU or user profile."""


def find_browser() -> str | None:
    """Path of an installed browser, or None."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


def print_to_pdf(page: Path, target: Path) -> None:
    """Convert an HTML file to PDF.

    Raises:
        MissingExtraError: no browser is installed.
        ShapewrightError: the browser failed.
    """
    browser = find_browser()
    if browser is None:
        raise MissingExtraError(
            f"no browser to print a PDF with: none of {', '.join(BROWSERS)} is on the PATH; install one, or print the "
            "page from your own browser"
        )
    with tempfile.TemporaryDirectory() as profile:
        draft = Path(profile) / "page.pdf"
        try:
            outcome = subprocess.run(
                [
                    browser,
                    *QUIET_BROWSER,
                    "--no-pdf-header-footer",
                    f"--user-data-dir={profile}/user",
                    f"--print-to-pdf={draft}",
                    page.resolve().as_uri(),
                ],
                capture_output=True,
                timeout=_PRINT_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ShapewrightError(
                f"{browser} did not print {page} within {_PRINT_TIMEOUT_S:.0f} s; print the page from your own browser"
            ) from None
        if not draft.is_file():
            words = outcome.stderr.decode(errors="replace").strip().splitlines()
            raise ShapewrightError(
                f"{browser} printed nothing (exit code {outcome.returncode}: {words[-1] if words else 'no message'}); "
                "print the page from your own browser"
            )
        try:
            shutil.copyfile(draft, target)
        except OSError as error:
            raise ShapewrightError(f"cannot write {target}: {error.strerror}; choose a writable folder") from error
