"""shapewright store: inspect, verify, merge, import and export stores of measurements."""

from __future__ import annotations

import shlex

import click

from shapewright.app.cli.console import echo, given_command, make_console, print_json, print_output, status_line
from shapewright.app.cli.help_pages import GuidedCommand
from shapewright.core.units import format_number_of


@click.group(
    epilog="""\b
Examples:
  shapewright store ls measured.sqlite
  shapewright store import measured.sqlite ./measured/gemm.parquet
  shapewright store merge all.sqlite measured.sqlite
"""
)
def command() -> None:
    """Inspect, verify, merge, import and export stores of measurements."""


@command.command(
    cls=GuidedCommand,
    epilog="""\b
Examples:
  shapewright store ls measured.sqlite
  shapewright store ls measured.sqlite --json
""",
)
@click.argument("path", metavar="PATH")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def ls(path: str, as_json: bool) -> int:
    """Summarize the store at PATH: suites, devices, rows, times and sizes."""
    from shapewright.app.report.measured import print_contents
    from shapewright.app.report.outputs.measure import store_contents_output
    from shapewright.measure.store.database import Store
    from shapewright.measure.store.summary import summarize_store

    with Store(path, read_only=True) as store:
        contents = store_contents_output(summarize_store(store))
    print_output(contents, print_contents, as_json=as_json)
    return 0


@command.command(
    cls=GuidedCommand,
    epilog="""\b
Examples:
  shapewright store show measured.sqlite
  shapewright store show measured.sqlite --json
""",
)
@click.argument("path", metavar="PATH")
@click.option("--json", "as_json", is_flag=True, help="print JSON with every column")
def show(path: str, as_json: bool) -> int:
    """List every row of the store at PATH."""
    from shapewright.app.report.measured import print_rows
    from shapewright.app.report.outputs.measure import BenchRow, StoreRowsOutput
    from shapewright.measure.store.database import Store

    with Store(path, read_only=True) as store:
        rows = store.rows()
    if as_json:
        print_json(StoreRowsOutput(rows=rows).to_json())
    else:
        shown = [BenchRow(row=row, predicted_s=None, predicted_figures={}) for row in rows]
        print_rows(shown, make_console(), most=None)
        make_console().print(format_number_of(len(rows), "row"))
    return 0


@command.command(
    epilog="""\b
Examples:
  shapewright store verify measured.sqlite
"""
)
@click.argument("path", metavar="PATH")
def verify(path: str) -> int:
    """Verify the store at PATH. Exit code 1 if it is damaged."""
    from shapewright.measure.store.database import Store

    with Store(path, read_only=True) as store:
        problems, num_rows = store.verify(), len(store.finished_keys())
    for problem in problems:
        echo(problem)
    if not problems:
        click.echo(f"{format_number_of(num_rows, 'row')}, all sound")
    following = "rescue NEW {}" if problems else "export {} ./tables"
    echo(f"next: shapewright store {following.format(shlex.quote(path))}")
    return 1 if problems else 0


@command.command(
    cls=GuidedCommand,
    epilog="""\b
Examples:
  shapewright store export measured.sqlite ./tables --format csv
""",
)
@click.argument("path", metavar="PATH")
@click.argument("folder", metavar="DIR")
@click.option(
    "--format", "format_name", type=click.Choice(("parquet", "csv")), default="parquet", show_default=True,
    help="'shapewright accuracy DIR' reads parquet, which needs the fit extra",
)  # fmt: skip
def export(path: str, folder: str, format_name: str) -> int:
    """Export the store at PATH to DIR: the tables that 'shapewright accuracy' reads, and one with all rows."""
    from shapewright.measure.store.database import Store
    from shapewright.measure.store.export import export_store

    with Store(path, read_only=True) as store:
        written = export_store(store, folder, format_name=format_name)
    for name, count in written.items():
        echo(f"{name}: {format_number_of(count, 'row')}")
    if not written:
        click.echo("the store has no rows")
    return 0


@command.command(
    cls=GuidedCommand,
    epilog="""\b
Examples:
  shapewright store merge all.sqlite measured.sqlite
""",
)
@click.argument("path", metavar="PATH")
@click.argument("sources", metavar="OTHER...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def merge(path: str, sources: tuple[str, ...], as_json: bool) -> int:
    """Merge the rows of OTHER stores into the store at PATH, which is created if missing.

    A row is the same if device, library, operation, dtype, layout, kernel and repetition are. Of two good rows that of
    PATH stays; a row that failed gives way to a good one. The other stores are not touched.
    """
    from shapewright.measure.store.merge import merge_stores

    _print_counts(path, merge_stores(path, list(sources)), {}, as_json)
    return 0


@command.command(
    cls=GuidedCommand,
    epilog="""\b
Examples:
  shapewright store rescue new.sqlite measured.sqlite
""",
)
@click.argument("path", metavar="PATH")
@click.argument("damaged", metavar="DAMAGED")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def rescue(path: str, damaged: str, as_json: bool) -> int:
    """Copy the sound rows of the store DAMAGED into the store at PATH, which is created if missing.

    Sound are the rows that can be read and match their checksums. DAMAGED is not touched.
    """
    from shapewright.measure.store.merge import rescue_store

    counts, lost = rescue_store(path, damaged)
    _print_counts(path, counts, {damaged: lost} if lost else {}, as_json)
    return 0


@command.command(
    "import",
    cls=GuidedCommand,
    epilog="""\b
Examples:
  shapewright store import measured.sqlite ./measured/gemm.parquet ./measured/paper_gemm.csv
  shapewright store import measured.sqlite ./measured/mm.out --device a100-sxm-40gb --library 'torch 1.13'
""",
)
@click.argument("path", metavar="PATH")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--device", default="", metavar="NAME", help="measured device, for files that do not name it")
@click.option("--library", default="", metavar="NAME", help="library and versions, for files that do not name them")
@click.option("--dtype", default="", metavar="NAME", help="element format, for logs that do not name it")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def import_(path: str, files: tuple[str, ...], device: str, library: str, dtype: str, as_json: bool) -> int:
    """Import measurements of other collectors into the store at PATH: all FILEs or none.

    FILEs are recognized by their content: measured tables (gemm, attention, pointwise, collectives, linear_layers,
    paper_gemm, paper_layers, mamf), logs of EleutherAI/cookbook (its letters are renamed) and of mamf-finder, records
    of measuring campaigns (.jsonl, parquet), and 'store export' of measurements. Parquet needs the fit extra.
    """
    from shapewright.measure.store.imports.files import import_files
    from shapewright.measure.store.imports.measured import Overrides

    given = Overrides(device=_known_device(device), library=library, dtype=dtype)
    with status_line("reading") as on_step:
        imported = import_files(path, files, given, command=given_command(), on_step=on_step)
    _print_counts(path, imported.counts, imported.skipped, as_json)
    return 0


def _known_device(name: str) -> str:
    """A device of --device by its canonical name; ``cpu`` has no device file and needs none."""
    if not name or name == "cpu":
        return name
    from shapewright.hardware.loader import find_measured_device

    return find_measured_device(name).name


def _print_counts(path: str, counts: dict[str, int], skipped: dict[str, dict[str, int]], as_json: bool) -> None:
    if as_json:
        from shapewright.app.report.outputs.measure import StoreChangesOutput

        print_json(StoreChangesOutput(store=path, **counts, skipped=skipped).to_json())
        return
    for name, reasons in skipped.items():
        for reason, number in reasons.items():
            echo(f"{name}: skipped {format_number_of(number, 'row')}: {reason}")
    echo(
        f"{path}: {format_number_of(counts['added'], 'row')} added, {counts['replaced']:,} failed ones replaced, "
        f"{counts['kept']:,} known before and kept as they were"
    )
