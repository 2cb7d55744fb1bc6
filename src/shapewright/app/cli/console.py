"""Output: a Rich console with colour on terminals only, and files written atomically."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import EISDIR
from os import strerror
from typing import TYPE_CHECKING, Any, Literal, TextIO

import click

from shapewright.core.errors import ShapewrightError, plain_text
from shapewright.core.files import draft_of, replacing

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.progress import Progress

    from shapewright.app.figures.chart import Chart
    from shapewright.app.report.outputs.model import Output

# Width for pipes and files, where there is no terminal to ask: the operations table needs this much.
_PIPE_WIDTH = 160
_COUNT_EVERY_S = 0.2


def make_console() -> Console:
    """Return a console on standard output; NO_COLOR and pipes turn colour off, FORCE_COLOR turns it on."""
    import shutil

    from rich.console import Console
    from rich.segment import Segment

    class PipeConsole(Console):
        """A console that leaves closed pipes to main(), and shows control characters instead of sending them."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            """Render to segments whose text a terminal only prints."""
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(_without_controls(segment.text), segment.style)

        def on_broken_pipe(self) -> None:
            """Raise instead of exiting with 1, which means findings here."""
            raise BrokenPipeError

    is_terminal = is_shown(sys.stdout)
    width = (
        shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns
        if is_terminal
        else int(os.environ.get("COLUMNS") or _PIPE_WIDTH)
    )
    # Variables of https://force-color.org and https://no-color.org; Rich itself obeys NO_COLOR.
    is_forced = bool(os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")
    colors: Literal["auto", "standard"] | None = "auto" if is_terminal else "standard" if is_forced else None
    return PipeConsole(width=width, color_system=colors, emoji=False, markup=False, highlight=False)


def echo(text: str, *, err: bool = False) -> None:
    """Print one line, control characters of names in it escaped; on standard error with ``err``."""
    click.echo(plain_text(text), err=err)


def _without_controls(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object."""
    click.echo(json_text(value))


def json_text(value: dict[str, Any]) -> str:
    """A JSON object, indented."""
    import json

    return json.dumps(value, indent=2, allow_nan=False)


def print_output(
    output: Output,
    print_text: Callable[[Any, Console], None],
    *,
    as_json: bool,
    html: str | None = None,
    page: Callable[[Any], str] | None = None,
) -> None:
    """Print an output as JSON or as text, after its page is written where a file is named."""
    if html is not None and page is not None:
        write_text_file(html, page(output))
        echo(f"wrote {html}", err=True)
    if as_json:
        print_json(output.to_json())
    else:
        print_text(output, make_console())


def write_chart(chart: Chart, path: str | Path) -> None:
    """Draw a chart into a .png, .svg or .pdf file; raises as write_text_file does."""
    from pathlib import Path

    from shapewright.app.figures.matplotlib_files import draw_chart

    _write_file(str(path), draw_chart(chart, Path(path).suffix))


def print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as CSV under the names of their keys; lists are joined with ``x``, as sizes are."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(list(rows[0]) if rows else [])
    for row in rows:
        writer.writerow(["x".join(map(str, each)) if isinstance(each, list) else each for each in row.values()])
    click.echo(text.getvalue(), nl=False)


def refuse_unwritable(*paths: str | None) -> None:
    """Check that output files can be written before the work starts; None is skipped.

    Raises:
        ShapewrightError: one of them cannot be written.
    """
    from pathlib import Path

    for path in filter(None, paths):
        target = Path(path)
        try:
            if target.is_dir():
                raise IsADirectoryError(EISDIR, strerror(EISDIR))
            if target.exists() and not target.is_file():
                continue  # a pipe waits for its reader
            draft = draft_of(target)
            draft.unlink(missing_ok=True)
            draft.touch(exist_ok=False)
            draft.unlink()
        except (OSError, ValueError) as error:
            raise _unwritable(path, error) from error


def write_json_file(path: str, value: dict[str, Any]) -> None:
    """Write a JSON file atomically; raises as write_text_file does."""
    write_text_file(path, json_text(value) + "\n")


def write_text_file(path: str, text: str) -> None:
    """Write a file atomically; existing pipes and devices (/dev/null) are written to directly.

    Raises:
        ShapewrightError: the file cannot be written.
    """
    try:
        content = text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise _unwritable(path, error) from error
    _write_file(path, content)


def _write_file(path: str, content: bytes) -> None:
    from pathlib import Path

    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)  # replacing it would turn it into a plain file
            return
        with replacing(target) as draft, draft.open("xb") as file:
            file.write(content)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str, error: Exception) -> ShapewrightError:
    reason = getattr(error, "strerror", None) or str(error)
    return ShapewrightError(f"cannot write {path}: {reason}; give the path of a file in a folder that you can write to")


def given_command() -> str:
    """The command line as a shell takes it, for records of where a file is from."""
    import shlex

    return shlex.join(["shapewright", *sys.argv[1:]])


def counting_line(words: str) -> Callable[[int, int], None] | None:
    """Progress such as ``12 % of 3,000 shapes`` on a terminal's standard error; None elsewhere."""
    if not is_shown(sys.stderr):
        return None
    last_s = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last_s
        if done >= total:
            click.echo("\r\033[K", nl=False, err=True)
        elif time.monotonic() - last_s > _COUNT_EVERY_S:
            last_s = time.monotonic()
            click.echo(f"\r{100.0 * done / total:3.0f} % of {total:,} {words}", nl=False, err=True)

    return show


def is_shown(stream: TextIO | None) -> bool:
    """Whether what is written to a standard stream is shown on a terminal; the stream is None if it is closed."""
    return stream is not None and stream.isatty()


def progress_bars() -> Progress:
    """Progress bars on a terminal's standard error, to be used in a with statement; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), transient=True, disable=not is_shown(sys.stderr))


@contextmanager
def status_line(words: str) -> Iterator[Callable[[str], None]]:
    """Status line on a terminal's standard error; nothing elsewhere."""
    if not is_shown(sys.stderr):
        yield lambda _words: None
        return
    from rich.console import Console

    with Console(stderr=True).status(words) as status:
        yield status.update
